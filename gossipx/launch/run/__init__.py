"""``gossipx run``: the processes of the peers of this machine, and the outcome of the run."""
