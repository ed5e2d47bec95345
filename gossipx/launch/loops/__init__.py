"""Training loops around a peer: ``gossipx.join``, ``attach``, ``initialize``, and the built-in ones."""
