"""Python processes that are forked from one that has torch and gossipx loaded, for the tests.

A peer that is started afresh spends two to three seconds of a core on imports, and the tests start hundreds. A fork
takes milliseconds and is as real: its own process, sockets, signals and exit code. Only the imports and the start of
the interpreter are not shown by it; tests of these start a new interpreter.

``server`` is the process that forks, one for each process of tests. ``client`` asks it to. ``process`` is a forked
process, as its parent and as itself sees it. ``command`` stands for ``gossipx`` and ``python`` in a shell.
"""
