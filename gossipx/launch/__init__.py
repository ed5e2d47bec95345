"""Starting peers: the hosts file, the processes of this machine, and ``gossipx.join`` in each of them."""
