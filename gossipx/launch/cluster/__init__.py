"""The peers of a run as a group of processes: who they are, where they listen, how they meet."""
