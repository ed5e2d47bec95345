"""The one place that names concrete classes and puts a run together.

``peer`` makes a peer of what the other files make of its settings: the graph, a hub, a server's part. ``settings`` says
which settings go together, and ``devices`` whether this machine has what they need. Nothing is imported here: the
process of ``gossipx run`` checks settings and needs no torch for it.
"""
