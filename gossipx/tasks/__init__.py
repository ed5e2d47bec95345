"""Tasks: the built-in data sets, how they are dealt out to peers, models, and the settings these are trained with.

``presets`` and ``partition`` import no torch, so that a command line that only reads settings starts at once.
"""
