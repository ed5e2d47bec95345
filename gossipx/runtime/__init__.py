"""Roles in real processes: threads, clocks and sockets stand here and below, decisions do not."""
