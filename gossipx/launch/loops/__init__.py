"""Training loops of a peer: ``gossipx.join``, ``attach``, ``initialize``, and the built-in loops."""
