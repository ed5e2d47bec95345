"""Starting peers: the hosts file, the peer processes of this machine, and ``gossipx.join`` in each of them."""
