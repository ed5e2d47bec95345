"""Built-in tasks: data sets, their partition among peers, models, and training settings.

``presets`` and ``partition`` do not import torch, so that commands that only read settings start quickly.
"""
