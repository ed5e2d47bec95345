"""Caffe's solver: its files, formulas, order of a step, lines and snapshots, over a torch module."""
