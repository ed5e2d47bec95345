"""Python processes for tests that are forked from one in which torch and gossipx are loaded.

A newly started peer spends two to three seconds of CPU time on imports, and the tests start hundreds. A fork takes
milliseconds and is as real: it has its own process, sockets, signals and exit code. It does not exercise imports and
the start of the interpreter; tests of these start a new interpreter.

``server`` is the process that forks, one per test process. ``client`` sends it requests. ``process`` is a forked
process, from its parent's and from its own side. ``command`` replaces ``gossipx`` and ``python`` in a shell.
"""
