"""The driver of a peer role in a real process: it owns the threads, clocks and sockets, and makes no decisions."""
