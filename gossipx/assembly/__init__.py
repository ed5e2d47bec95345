"""The composition root: it checks the settings of a run and builds a peer from them.

This is the only package that names the concrete classes of the others. ``peer`` builds a peer from the graph, the hub
and the server parts that the other modules make. ``settings`` refuses settings that exclude each other, and ``devices``
checks that this machine has the hardware. Nothing is imported here, so that ``gossipx run`` can check settings without
loading torch.
"""
