"""Caffe's solver for torch modules: its files, formulas, order of a step, log lines and snapshots."""
