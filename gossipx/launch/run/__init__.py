"""``gossipx run``: the processes of the peers of this machine, and what becomes of them."""
