"""The peers of a run as a group of processes: ranks, addresses and rendezvous."""
