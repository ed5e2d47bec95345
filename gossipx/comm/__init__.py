"""Requests to other peers and answers to theirs, over real connections.

One request, from end to end: of :class:`gossipx.comm.client.Client` here, which sends it, and of
:class:`gossipx.comm.listener.Listener` there::

    request()     here    queues a job, wakes or starts a worker, returns
      _work       here    the worker takes the job
      _exchange   here    on an idle connection to that peer, or one from _open (Hello, Welcome):
      Link.ask    here    the request goes out ...
        _ask      there   ... comes in on the connection's own thread, which tells on_request of it
        answer()  there   and waits until it is answered, then sends the reply
      Link.ask    here    ... the reply comes in, a model straight into the payload buffer
      _finish     here    done(reply), or done(error)

A connection carries one request at a time, of the side that opened it. Callbacks hold no lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence

from gossipx.comm.client import Client, Job
from gossipx.comm.listener import Listener, OnRequest, Response, RoomFor, no_room
from gossipx.comm.member import Member
from gossipx.errors import GossipxError
from gossipx.memory import Source
from gossipx.protocol.messages import Reply, Request
from gossipx.transports import Address, Carriers, Transport, tcp, unix
from gossipx.transports.links import Links
from gossipx.transports.pace import Pace
from gossipx.transports.trust import Trust
from gossipx.wire import Hello, Sink, SinkFactory, auth
from gossipx.wire.agreement import manifest_bytes

# Seconds that close() gives its threads: it wakes all but those in a callback or in connect.
_CLOSE = 5.0


class CommManager:
    """Sends requests to the peers of a run and receives theirs.

    Args:
        rank: this peer's own.
        names: of all peers, by rank.
        addresses: of all peers, by rank; looked up whenever a connection is opened.
        bind: where to listen; port 0 lets the system choose.
        peers_digest: of the list of peers; peers with another are refused.
        settings: by option, those that all peers must have alike; who has others is refused.
        manifest: one line a tensor, ``name dtype shape stride``; all peers must have the same.
        on_request: told (sender's rank, key, request, what it brought or None) from a connection's thread; each key is
            to be given to :meth:`answer` once, then or later, and what was brought is to be released.
        room_for: given (sender's rank, request), where what that brings is taken in. It may wait for memory to be free,
            as the sender waits meanwhile; a GossipxError ends the connection. By default nothing may be brought.
        peer_timeout: seconds within which a handshake, and a request once begun, must be whole.
        transport: makes the connections.
        share_memory: give models to peers on this machine in memory that both share, where the system can; connections
            to them are opened by ``transport`` and go on over a Unix socket.
        only_memory: requests to a peer with which that cannot be end in a UsageError.
        carriers: build a way for models beside each connection that one is asked for over. Where they cannot, models
            go over the connections, and a line is logged once a peer. Go not with ``share_memory``.
        max_rate: bytes a second of models that are sent over a network, to all others together; None: no limit.
        secret: that all peers of the run share; connections begin with proving it, and every frame has a MAC.
        max_connections: inbound ones at a time; above it the oldest is closed that has not said who it is. By
            default 32 and four a peer (two that it keeps, and two that it uses meanwhile). Of those that have not said
            who they are there are never more than 32, or two a peer.

    Attributes:
        trust: who was turned away.

    Raises:
        UsageError: the manifest is larger than the 16 MiB that can be sent.
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
        room_for: RoomFor = no_room,
        peer_timeout: float,
        transport: Transport = tcp,
        share_memory: bool = True,
        only_memory: bool = False,
        carriers: Carriers | None = None,
        max_rate: float | None = None,
        secret: auth.Secret | None = None,
        max_connections: int | None = None,
    ):
        described = manifest_bytes(manifest)
        self.trust = Trust(len(names) - 1, peer_timeout)
        self._member = Member(
            me=Hello(rank, names[rank], len(names), peers_digest, hashlib.sha256(described).hexdigest(), settings),
            names=names,
            addresses=addresses,
            manifest=described,
            timeout=peer_timeout,
            transport=transport,
            machine=unix.machine() if share_memory else "",
            carriers=carriers,
            secret=secret,
            trust=self.trust,
            links=Links(names[rank], len(names), peer_timeout, None if max_rate is None else Pace(max_rate)),
        )
        most = 32 + 4 * len(names) if max_connections is None else max_connections
        self._listener = Listener(self._member, bind, on_request, room_for, most)
        self._client = Client(self._member, only_memory, self._listener)

    @property
    def address(self) -> Address:
        """Where it listens; RuntimeError before it is started."""
        return self._listener.address

    @property
    def names(self) -> Sequence[str]:
        """Of all peers, by rank."""
        return self._member.names

    @property
    def bytes_sent(self) -> int:
        """Of the whole wire, with models, messages and handshakes."""
        return self._member.links.sent

    @property
    def bytes_received(self) -> int:
        """Of the whole wire, with what was dropped later."""
        return self._member.links.received

    def start(self) -> None:
        """Listen and answer from now on; GossipxError if the address cannot be had."""
        self._listener.start()

    def request(
        self,
        to: int,
        request: Request,
        *,
        deadline: float,
        payload: Sink | SinkFactory | None,
        done: Callable[[Reply | GossipxError], None],
        brought: Source | None = None,
    ) -> Callable[[], None]:
        """Ask peer ``to``, oneself too; never blocks.

        Args:
            brought: what the request brings along, if it is a CarryingRequest; its bytes must not change until ``done``
                is called.
            deadline: absolute, on time.monotonic(), for everything until the last byte.
            payload: takes a ModelReply's bytes in, which must be exactly as many (None: none), until ``done`` is
                called; what it has taken is of worth only if a ModelReply came.
            done: called once, from a thread of the manager's, with the reply or with
                PeerUnreachableError, PeerTimeoutError, ProtocolError, ModelMismatchError or CancelledError.

        Returns:
            What cancels it, from any thread and any number of times. A model that is on its way is not sent any
            further then, and unless ``done`` was called before, it is told CancelledError soon.

        Raises:
            ValueError: the request is not one that a peer would accept.
            RuntimeError: the system has no thread left for it; ``done`` is not called.
        """
        return self._client.request(Job(to, request, deadline, payload, done, brought))

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
            key: as told to ``on_request``.
            payload: a ModelReply's bytes; they must not change until ``done`` is called.
            deadline: absolute; the answer is given up if its last byte has not gone out by then, or a model's receiver
                has not told by then that it has it.
            done: called once, from a thread of the manager's: whether it has arrived, as far as is known.
            begins: absolute; nothing is sent before.

        Raises:
            ValueError: the reply is not one that a peer would accept.
        """
        self._listener.answer(key, Response(reply, payload, deadline, done, begins))

    def close(self) -> None:
        """End everything; what is pending is told an error or False. Any number of times."""
        self._member.links.abort()
        self._listener.end()
        self._client.wake()
        self._member.links.join(_CLOSE)
        self._client.give_up()
