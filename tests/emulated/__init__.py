"""Emulated networks for tests and benchmarks: a namespace per peer, shaped links, real processes and sockets.

Only rate and delay of the links are emulated: the kernel processes real packets, and programs run unchanged. See
:class:`EmulatedNetwork`.
"""

from emulated.namespaces import NetworkUnavailableError, lacking, sweep
from emulated.network import EmulatedNetwork, Host

__all__ = ["EmulatedNetwork", "Host", "NetworkUnavailableError", "lacking", "sweep"]
