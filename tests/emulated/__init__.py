"""Emulated networks for tests and benchmarks: a namespace a peer, shaped links, real processes and sockets.

Nothing in it is simulated but the wire's length: packets are the kernel's, programs run as they are. See
:class:`EmulatedNetwork`.
"""

from emulated.namespaces import NetworkUnavailableError, lacking, sweep
from emulated.network import Counters, EmulatedNetwork, Host

__all__ = ["Counters", "EmulatedNetwork", "Host", "NetworkUnavailableError", "lacking", "sweep"]
