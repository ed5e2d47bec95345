"""The place of a peer in its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gossipx.peer.joining.admission import Admission
from gossipx.protocol.fields import JoinedPeer
from gossipx.runtime.figures.progress import Progress
from gossipx.transports import Address


@dataclass(frozen=True)
class Place:
    """The identity of a peer in its run: its rank, addresses and directories.

    Attributes:
        rank: this peer's rank, from 0.
        names: the names of all peers, by rank, also of those that have joined the run while it was in progress.
        addresses: the addresses of all peers, by rank.
        bind: the address on which this peer listens.
        digest: a hash of the list of peers; peers with another one are refused.
        directory: the run's directory; None: nothing is written.
        progress: the pipe to the parent process.
        under_run: whether ``gossipx run`` started this process.
        resumes: whether the run resumes from checkpoints.
        is_added: whether this peer has had no part in the run so far, and needs the model of one that has.
        resumes_at: the iteration of the checkpoint to resume from; None: the newest.
        job: mark of the launcher's job, in all of its attempts, which checkpoints record; empty: unknown.
        admission: with which this peer joins a run under way; None: it is one of those that begin it.
    """

    rank: int
    names: tuple[str, ...]
    addresses: tuple[Address, ...]
    bind: Address
    digest: str
    directory: Path | None
    progress: Progress
    under_run: bool
    resumes: bool = False
    is_added: bool = False
    resumes_at: int | None = None
    admission: Admission | None = None
    job: str = ""

    @property
    def name(self) -> str:
        """This peer's name."""
        return self.names[self.rank]

    @property
    def begun(self) -> int:
        """The number of peers that begin the run."""
        return len(self.names) if self.admission is None else len(self.admission.begun)

    @property
    def joined(self) -> tuple[JoinedPeer, ...]:
        """The peers that have joined the run while it was in progress."""
        return () if self.admission is None else self.admission.joined
