"""The modes of exchange: six, each with the settings that it has and no others.

A setting that several modes have is declared once, in the base that they share, so the classes' headers say which mode
has which setting. From them :mod:`gossipx.settings.refusals` derives which settings exclude each other, and what to
tell a user who combines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from gossipx.settings.keys import setting

EASGD_BETA = 0.9
"""β of EASGD (Zhang et al.), which sets α = β/p for p workers."""
FOR_PEERS = "{shown} is for peers that exchange with each other"


@dataclass(frozen=True)
class HasPolicy:
    """Modes whose exchanges a policy begins."""

    preset: Literal["paper"] | None = setting(None)
    """paper: settings that are not given are those of Adaptive Communication: its rule, --blocking, --finish none,
    --outer none."""
    policy: str = setting(
        "tau:10",
        check="policies:check",
        common="Exchange",
        metavar="SPEC",
    )
    """When to exchange: never, tau:N, auto:budget, random:p, adaptive:threshold, travel:distance, drift:distance."""
    blocking: bool = setting(False)
    """Wait for each exchange (Algorithms 1 and 2 as printed) or wave, instead of training during it."""
    delta: Literal["exact", "sampled"] = setting("exact", marks="training")
    """Measure each step over all weights, or estimate it from one sixteenth of them, for large models."""


@dataclass(frozen=True)
class HasPartners:
    """Modes in which two peers exchange, and a topology says which."""

    topology: str = setting(
        "full", absolute="topology.files:absolute_topology", purpose="{shown} limits which peers exchange"
    )
    """Which peers may exchange with each other: a name from 'gossipx topology list', or a file."""
    schedule: str | None = setting(
        None, check="topology.schedules:check_schedule", purpose="{shown} orders the exchanges"
    )
    """How partners are chosen: random, static, one-peer, inner-outer, bandwidth-aware. Default: random, or that of the
    topology file."""
    weights: Literal["uniform", "metropolis", "push-sum"] = setting(
        "uniform", purpose="{shown} weights the models of two peers"
    )
    """Factor on the share of a received model: 1, Metropolis weights by how often two peers pull, or push-sum."""


@dataclass(frozen=True)
class HasMixing:
    """Modes in which a received model is mixed in."""

    mixing: str = setting(
        "average", check="mixing:mixing_from", marks="training", purpose="{shown} is for pulled models"
    )
    """How a model is mixed in: average:beta=0.5, aged:beta=0.5,half_life=100; with --codec choco:gamma=0.2."""


@dataclass(frozen=True)
class HasOuter:
    """Modes in which momentum may act across exchanges."""

    outer: str = setting("none", check="outer:outer_from", purpose="{shown} acts on exchanges that a peer begins")
    """Momentum across exchanges: momentum:0.6, nesterov:lr=0.7,momentum=0.9 (with --exchange waves), or none."""


@dataclass(frozen=True)
class HasFragments:
    """Modes in which an exchange may move a part of the model."""

    fragments: int = setting(1, 1, 1000)
    """Number of parts of the model, of which each exchange moves one in turn; 1: it moves the model."""


@dataclass(frozen=True)
class HasCodec:
    """Modes in which peers may encode the models that they exchange."""

    codec: str = setting("none", check="codecs:parse")
    """Codec of the models that peers exchange: none, 3lc:sparsity=1,residual=0.3, ...; see Codecs."""
    references: int = setting(8, 0, 65_536)
    """Reference models kept per direction, so that --codec encodes differences; 0: whole models."""


@dataclass(frozen=True)
class HasServing:
    """Modes in which peers answer pulls."""

    max_served: int = setting(4, 1, 1000, marks="later", purpose="{option} counts pulls")
    """Pulls answered at a time; other requesters are sent to another peer."""
    serve_share: float = setting(0.03, 0.001, 1, marks="later", purpose="{option} limits answers to pulls")
    """Upper limit of the fraction of training time spent on answering pulls; 1: no limit."""


@dataclass(frozen=True)
class AnyMode:
    """The base of all modes: the attributes that distinguish one, and those that refusals are made of.

    A refusal has the purpose of the setting and what happens instead, or the one text of ``reasons`` or ``needed``. In
    them ``{shown}`` is the option with its value, ``{option}`` without it, ``{mode}`` the value of ``--mode``, and
    ``{around}`` the option that names the hub or the servers.

    Attributes:
        chosen_by: the setting of :class:`Choice` that means this mode, and its value; empty: ``--hub`` does.
        also: settings of :class:`Choice` that may be given beside it.
        purpose: of all settings that this mode lacks; empty: each has its own.
        instead: what is exchanged in this mode.
        remedy: what a user can do.
        needed: what is told of a setting that only this mode has, if another one is chosen.
        weights_allowed: of the values of ``--weights``.
        reasons: what is told of certain settings that this mode lacks.
    """

    chosen_by: ClassVar[tuple[str, str]] = ("mode", "pull")
    also: ClassVar[tuple[str, ...]] = ("mode", "exchange")
    purpose: ClassVar[str] = ""
    instead: ClassVar[str] = ""
    remedy: ClassVar[str] = "leave one out"
    needed: ClassVar[str] = ""
    weights_allowed: ClassVar[tuple[str, ...]] = ("uniform",)
    reasons: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True)
class Pulls(AnyMode, HasPolicy, HasPartners, HasMixing, HasOuter, HasFragments, HasCodec, HasServing):
    """A peer fetches the model of another one and mixes it in."""

    weights_allowed = ("uniform", "metropolis")


@dataclass(frozen=True)
class Pushes(AnyMode, HasPolicy, HasPartners, HasMixing, HasFragments, HasCodec):
    """A peer sends its model to another one, which mixes it in."""

    chosen_by = ("mode", "push")
    instead = "with --mode push nobody pulls"
    needed = "{option} needs --mode push, not {mode}: leave one out"
    weights_allowed = ("uniform", "push-sum")

    max_pushes: int = setting(1, 1, 64, marks="later")
    """Pushes received at a time, each with memory for a model; others are sent to another peer."""


@dataclass(frozen=True)
class Pairs(AnyMode, HasPolicy, HasPartners, HasMixing, HasOuter, HasFragments, HasCodec):
    """Two peers average their models."""

    chosen_by = ("mode", "pushpull")
    instead = "with --mode pushpull nobody pulls"


@dataclass(frozen=True)
class Waves(AnyMode, HasPolicy, HasOuter, HasFragments, HasCodec):
    """All peers average their models in a few rounds."""

    chosen_by = ("exchange", "waves")
    also = ("exchange",)
    instead = "with --exchange waves all peers average all models equally"
    remedy = "leave it out, or give --exchange pulls"


@dataclass(frozen=True)
class Elastic(AnyMode, HasPolicy, HasPartners, HasMixing, HasServing):
    """Workers average elastically with the centre that a hub holds; the TOML table ``[hub]``.

    While the hub does not respond, they may pull from each other, for which the settings of pulls are there.
    """

    chosen_by, also = ("", ""), ()
    purpose, instead = FOR_PEERS, "with {around} they exchange only with the hub"
    needed = "{option} needs a hub: name it with --hub, or leave {option} out"
    weights_allowed = ("uniform", "metropolis")

    hub: str = setting(None, peers="one")
    """Peer that holds the centre of elastic averaging, by name or number; the other peers exchange with it."""
    hub_only: bool = setting(False)
    """The hub only serves the other peers and does not train."""
    alpha: float | None = setting(None, 1e-9, 1)
    """Fraction of its difference to the centre by which a worker moves. Default: 0.9 / workers."""
    beta: float | None = setting(None, 1e-9, 65_536)
    """Workers times the fraction by which the centre moves. Default: workers times --alpha."""
    hub_lost: Literal["gossip", "wait", "stop"] = setting("gossip")
    """While the hub does not respond: pull from other workers, train alone, or stop with exit code 4."""

    def worker_share(self, workers: int) -> float:
        """Return α of Eq. 1, the share of its difference to the centre by which each of the workers moves."""
        return EASGD_BETA / workers if self.alpha is None else self.alpha

    def centre_share(self, workers: int) -> float:
        """Return β/p of Eq. 2, the share of a worker's difference by which the centre moves.

        By default it is equal to α; then the sum of worker and centre is conserved.
        """
        return (workers * self.worker_share(workers) if self.beta is None else self.beta) / workers


@dataclass(frozen=True)
class Server(AnyMode):
    """Workers push gradients to a parameter server and pull its tables; the TOML table ``[server]``."""

    chosen_by = ("mode", "server")
    also = ()
    purpose, instead = FOR_PEERS, "with {around} they exchange only with the servers, as --sync says"
    needed = "{option} needs a parameter server: name its peers with --servers, or leave {option} out"
    reasons: ClassVar[Mapping[str, str]] = {
        "codec": "{shown} is for models, and servers have --push-codec and --pull-codec: leave it out",
        "delta": "{shown} is for peers that keep a copy of their last step, and with servers only these send tables:"
        " leave it out",
        "hub": "--hub and --servers exclude each other: leave one out",
    }

    servers: str | None = setting(None, peers="several", common="Exchange", metavar="PEERS")
    """Train with a parameter server whose shards are on these peers, by name or number: 0,1."""
    servers_only: bool = setting(False)
    """Servers only serve the workers and do not train."""
    sync: str = setting("bsp", check="server.sync_models:check")
    """Sync model: bsp, asp, ssp:staleness, dsps, drop:n, pssp:staleness,p or staleness,alpha, hybrid:step; one for all
    shards, or one per shard separated by '|'."""
    pulls: Literal["lazy", "soft"] = setting("lazy")
    """When delayed pulls are answered: when the clock has passed them, or (soft barrier) when it ticks."""
    apply: Literal["push", "each", "tick", "threshold"] | None = setting(None)
    """Apply each push at once, by 1/N or whole, or their mean at each tick. Default: the sync model's."""
    placement: str = setting("heuristic", check="server.placement:placement_from")
    """How tensors are placed on servers: range, greedy, uniform, round-robin, heuristic or sliced."""
    bucket: int | None = setting(None, 0, 2**30)
    """Send small tensors together, up to this many bytes; 0: each alone. Default: 1 to 4 MiB."""
    push_codec: str = setting("none", check="codecs:parse")
    """Codec of the gradients that workers push: none, 3lc:1.75, ...; see Codecs."""
    pull_codec: str = setting("none", check="codecs:parse")
    """Codec of the table changes that workers pull: none, 3lc:1.75, ...; see Codecs."""
    wait_free: bool = setting(True)
    """Send gradients as the backward pass produces them; else all at the optimizer's step."""
    overlap: bool = setting(True)
    """Pull from each shard separately; else from all shards once all of them can answer."""
    journal: bool = setting(True, marks="real")
    """Write each gradient to a journal before acknowledging it, so that a killed server can be restarted."""
    server_lost: Literal["wait", "stop"] = setting("wait")
    """What to do while a server does not respond: wait until it is back, or stop with exit code 4."""


@dataclass(frozen=True)
class Choice:
    """The settings by which a user chooses a mode, besides ``--hub`` and ``--servers``."""

    mode: Literal["pull", "push", "pushpull", "server"] = setting(
        "pull", purpose="{shown} is for exchanges between two peers"
    )
    """How two peers exchange: pull a model, push a model, or average both models; or use a parameter server
    (--servers)."""
    exchange: Literal["pulls", "waves"] = setting("pulls")
    """What a policy starts when it fires: an exchange with one peer (--mode), or a wave through all."""


Mode: TypeAlias = Pulls | Pushes | Pairs | Waves | Elastic | Server
MODES = (Pulls, Pushes, Pairs, Waves, Elastic, Server)
