"""Requests to other peers and responses to theirs, over real connections.

One request, end to end, from :class:`gossipx.comm.client.RequestClient` here to
:class:`gossipx.comm.listener.RequestListener` on the other peer ("there")::

    request()       here    queues a job, wakes or starts a worker, returns
      _work         here    the worker takes the job
      _exchange     here    picks an idle connection to that peer, or _open makes one (Hello, Welcome)
      Link.request  here    sends the request ...
        _respond    there   ... is called on the connection's own thread and passes it to on_request,
        answer()    there   waits for the response, then sends it
      Link.request  here    ... receives the reply, a model straight into the payload buffer
      _finish       here    calls done(reply) or done(error)

A connection carries one request at a time, always from the side that opened it, unless it was handed over to the other
side (:mod:`gossipx.comm.member`). Callbacks run without locks held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence

from gossipx.comm.client import OutgoingRequest, RequestClient, StandBy
from gossipx.comm.listener import OnRequest, RequestListener, Response, SinkFor, no_sink
from gossipx.comm.member import Member
from gossipx.errors import GossipxError
from gossipx.figures import Counters
from gossipx.memory import Source
from gossipx.protocol.fields import JoinedPeer
from gossipx.protocol.messages import Reply, Request
from gossipx.transports import Address, Carriers, Counting, Transport, tcp, unix
from gossipx.transports.handshake import JoinDecider, Trust
from gossipx.transports.link import Links
from gossipx.transports.pace import Pace
from gossipx.wire import Hello, Sink, SinkFactory, auth
from gossipx.wire.agreement import manifest_bytes

# Seconds that close() waits for its threads. It wakes all of them except those in a callback or in connect.
_CLOSE = 5.0


class CommManager:
    """Sends requests to the peers of a run and receives theirs.

    Args:
        rank: this peer's rank.
        names: names of all peers, by rank; the list may grow as peers join the run.
        addresses: addresses of all peers, by rank; read each time a connection is opened.
        bind: address to listen at; port 0 lets the system choose a port.
        peers_digest: digest of the peer list; a peer with another digest is refused.
        settings: options that must be equal on all peers, name to value; a peer that differs is refused.
        manifest: one line per tensor, ``name dtype shape stride``; must be equal on all peers.
        on_request: called with (sender's rank, key, request, its payload or None) on a connection's thread. The callee
            must pass each key to :meth:`answer` exactly once, then or later, and must release the payload.
        sink_for: called with (sender's rank, request); returns the buffer for the request's payload. It may block until
            memory is free, while the sender waits; a GossipxError ends the connection. Default: payloads are refused.
        peer_timeout: seconds allowed for a handshake, and for receiving a request once its first byte has arrived.
        transport: makes the connections.
        share_memory: pass models to peers on this machine through shared memory where the system supports it. Such a
            connection is opened with ``transport`` and then replaced by a Unix socket.
        only_memory: fail requests to peers that cannot share memory, with UsageError.
        carriers: builds a side channel for models (gloo, NCCL) per connection. Where that fails, models use the
            connection itself and one line per peer is logged. Excludes ``share_memory``.
        max_rate: limit on model bytes per second sent over networks, to all peers together; None: unlimited.
        secret: shared by all peers of the run, one or two while one is replaced. Each connection then starts with a
            proof, and each frame has a MAC.
        joined: this peer, if it joined the run while it was in progress; None: it is in the hosts file.
        begun: number of peers that began the run; None: all in ``names``.
        max_connections: limit on inbound connections; above it the oldest one without a finished handshake is closed.
            Default: 32 plus four per peer (two idle, two in use). Connections without a finished handshake are
            limited to 32, or two per peer if that is more.

    Attributes:
        counts: the corrupted frames, strangers and warnings of this process.
        trust: which peers and strangers were turned away.
        queries: answers to requests from outside the run: by part of a CheckupRequest, a function that returns the
            report. It is called on a connection's thread, after authentication.

    Raises:
        UsageError: the manifest exceeds the 16 MiB that can be sent.
    """

    def __init__(
        self,
        *,
        rank: int,
        names: Sequence[str],
        addresses: Sequence[Address],
        bind: Address,
        peers_digest: str,
        settings: Mapping[str, str],
        manifest: Sequence[str],
        on_request: OnRequest,
        sink_for: SinkFor = no_sink,
        peer_timeout: float,
        transport: Transport = tcp,
        share_memory: bool = True,
        only_memory: bool = False,
        carriers: Carriers | None = None,
        max_rate: float | None = None,
        secret: auth.Secrets | None = None,
        joined: JoinedPeer | None = None,
        begun: int | None = None,
        max_connections: int | None = None,
    ):
        described = manifest_bytes(manifest)
        model, size = hashlib.sha256(described).hexdigest(), len(names) if begun is None else begun
        self.counts = transport.counts if isinstance(transport, Counting) else Counters()
        self.trust = Trust(len(names) - 1, peer_timeout, self.counts)
        pace = None if max_rate is None else Pace(max_rate)
        links = Links(names[rank], len(names), peer_timeout, pace, self.counts)
        self._member = Member(
            me=Hello(rank, names[rank], size, peers_digest, model, settings, () if joined is None else (joined,)),
            names=names,
            addresses=addresses,
            manifest=described,
            timeout=peer_timeout,
            transport=transport,
            machine=unix.machine() if share_memory else "",
            carriers=carriers,
            secret=secret,
            trust=self.trust,
            links=links,
        )
        most = 32 + 4 * len(names) if max_connections is None else max_connections
        self._listener = RequestListener(self._member, bind, on_request, sink_for, most)
        self.queries = self._listener.queries
        self._client = RequestClient(self._member, only_memory, self._listener)
        self._stand_by = StandBy(self._member, self._client, self._listener.serve_reversed)

    @property
    def address(self) -> Address:
        """The address that the manager listens at; RuntimeError before :meth:`start`."""
        return self._listener.address

    @property
    def names(self) -> Sequence[str]:
        """Names of all peers, by rank."""
        return self._member.names

    @property
    def bytes_sent(self) -> int:
        """Bytes sent on the wire, including messages and handshakes."""
        return self._member.links.sent

    @property
    def bytes_received(self) -> int:
        """Bytes received from the wire, including data that was discarded."""
        return self._member.links.received

    @property
    def join_handler(self) -> JoinDecider | None:
        """The object that decides on processes which are not in the hosts file, or None if nobody is admitted."""
        return self._member.join_handler

    @join_handler.setter
    def join_handler(self, handler: JoinDecider | None) -> None:
        self._member.join_handler = handler

    def forget(self, rank: int) -> None:
        """Close idle connections to a peer, as another one has its rank now."""
        self._member.links.forget(rank)

    def start(self) -> None:
        """Listen and serve requests; GossipxError if the address is not available."""
        self._listener.start()
        self._stand_by.start()

    def request(
        self,
        to: int,
        request: Request,
        *,
        deadline: float,
        payload: Sink | SinkFactory | None,
        done: Callable[[Reply | GossipxError], None],
        upload: Source | None = None,
    ) -> Callable[[], None]:
        """Send a request to peer ``to``, which may be this peer; never blocks.

        Args:
            upload: payload of a CarryingRequest; its bytes must not change until ``done`` is called.
            deadline: absolute, on time.monotonic(), for everything until the last byte.
            payload: receives a ModelReply's bytes, which must match its size exactly (None: no payload). It may be
                written to until ``done`` is called, and its content is valid only if the result is a ModelReply.
            done: called once, on a thread of the manager, with the reply or with
                PeerUnreachableError, PeerTimeoutError, ProtocolError, ModelMismatchError or CancelledError.

        Returns:
            A function that cancels the request; it may be called from any thread, any number of times. It stops a model
            in transfer, and unless ``done`` was called before, ``done`` soon receives CancelledError.

        Raises:
            ValueError: the request is invalid.
            RuntimeError: the system cannot start another thread; ``done`` is not called.
        """
        return self._client.request(OutgoingRequest(to, request, deadline, payload, done, upload))

    def answer(
        self,
        key: Hashable,
        reply: Reply,
        *,
        payload: Source | None,
        deadline: float,
        done: Callable[[bool], None],
        begins: float = 0.0,
    ) -> None:
        """Answer a received request; never blocks.

        Args:
            key: the key that was passed to ``on_request``.
            payload: a ModelReply's bytes; they must not change until ``done`` is called.
            deadline: absolute; the response is abandoned if its last byte was not sent, or a model not acknowledged, by
                then.
            done: called once, on a thread of the manager, with whether the response was delivered, as far as is known.
            begins: absolute; nothing is sent earlier.

        Raises:
            ValueError: the reply is invalid.
        """
        self._listener.answer(key, Response(reply, payload, deadline, done, begins))

    def linger(self, stop: Callable[[], bool]) -> None:
        """Wait, at most peer_timeout, until peers behind NAT have ended, which may reach each other only through this.

        Args:
            stop: polled; returns whether to wait no longer.
        """
        hosts = {address.host for address in self._member.addresses if address.behind_nat}
        if len(hosts) > 1 and not self._member.is_cut_off_itself:
            self._listener.kept.linger(self._member.timeout, stop)

    def close(self) -> None:
        """End all connections; pending calls receive an error or False. May be called any number of times."""
        self._member.links.abort()
        self._listener.end()
        self.queries.clear()  # break reference cycles
        self._client.wake()
        self._listener.kept.wake()
        self._member.links.join(_CLOSE)
        self._client.give_up()
