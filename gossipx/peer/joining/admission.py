"""Everything that a peer needs to join a run under way: the run's settings, its peers, and the newcomer's rank."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec

from gossipx.errors import MALFORMED, ProtocolError
from gossipx.protocol.fields import MAX_RANKS, JoinedPeer, Port, Rank, at_most
from gossipx.settings import files
from gossipx.settings.modes import Elastic, Server
from gossipx.settings.sections import KEYS, RunConfig, marked
from gossipx.topology.schedules import BandwidthAware, RandomNeighbour, Schedule


class Admission(msgspec.Struct, frozen=True):
    """The admission of one newcomer.

    Attributes:
        rank: of the newcomer.
        settings: of the run, as TOML, without those that belong to a machine.
        begun: name, host and port of each peer that began the run, by rank.
        joined: the peers that joined it, including the newcomer.
        lost: ranks that the newcomer need not wait for.
    """

    rank: Rank
    settings: str
    begun: Annotated[tuple[tuple[str, str, Port], ...], at_most(MAX_RANKS)]
    joined: tuple[JoinedPeer, ...]
    lost: tuple[Rank, ...] = ()

    @property
    def own(self) -> JoinedPeer:
        """The newcomer itself."""
        return next(peer for peer in self.joined if peer.rank == self.rank)

    def encoded(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, content: bytes) -> Admission:
        """Return the admission that :meth:`encoded` has written.

        Raises:
            ProtocolError: it is malformed.
        """
        try:
            admission = msgspec.json.decode(content, type=cls)
            _ = admission.own
        except (*MALFORMED, StopIteration) as error:
            raise ProtocolError("the admission to the run is malformed") from error
        return admission

    def peers(self) -> list[tuple[str, str, int]]:
        """Return name, host and port of all peers by rank, up to the highest that is known."""
        known = dict(enumerate(self.begun))
        known |= {peer.rank: (peer.name, peer.host, peer.port) for peer in self.joined}
        return [known.get(rank, (f"peer {rank}", *self.own[2:4])) for rank in range(max(known) + 1)]


def settings_of_run(config: RunConfig) -> str:
    """Return the settings of a run as TOML, without those that belong to a machine."""
    of_machine = marked("machine")
    told = files.changed(config, **{name: KEYS[name].default for name in of_machine})
    return files.dump(dataclasses.replace(told, given=config.given - of_machine))


def why_closed(config: RunConfig, schedule: Schedule, behind_nat: bool = False) -> str:
    """Return why no peer can join a run while it is in progress, in one line; empty: one can.

    Args:
        schedule: the exchange schedule.
        behind_nat: whether a peer that begins the run is behind NAT.
    """
    which = "only peers that exchange with each other take newcomers"
    if behind_nat:
        return "a peer of the run is behind NAT, and could not be reached by a new one"
    if isinstance(config.mode, Elastic):
        return f"the run has a hub, whose centre counts its workers: {which}"
    if isinstance(config.mode, Server):
        return f"the run has servers, which count their workers: {which}"
    if schedule.topology.generator != "full":
        return (
            f"--topology {schedule.topology.name} has no place for a new peer: only in 'full', the default, may any two"
            " peers exchange"
        )
    if not isinstance(schedule, RandomNeighbour | BandwidthAware):
        spec = config.values["schedule"] or schedule.topology.schedule
        return f"--schedule {spec} is an order of the peers that began the run: use random, the default"
    return ""
