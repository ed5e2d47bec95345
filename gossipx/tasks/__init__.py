"""Tasks: the built-in data sets, how they are dealt out to peers, models, and the settings these are trained with."""

from __future__ import annotations

from gossipx.tasks.data import TASKS, Batches, Dataset, Task, load, read_idx
from gossipx.tasks.models import MODELS, Facts, Model, build_model
from gossipx.tasks.partition import IID, PARTITIONS, Dirichlet, Partition
from gossipx.tasks.partition import parse as parse_partition
from gossipx.tasks.presets import PRESETS, Preset, Schedule, learning_rate

__all__ = [
    "IID",
    "MODELS",
    "PARTITIONS",
    "PRESETS",
    "TASKS",
    "Batches",
    "Dataset",
    "Dirichlet",
    "Facts",
    "Model",
    "Partition",
    "Preset",
    "Schedule",
    "Task",
    "build_model",
    "learning_rate",
    "load",
    "parse_partition",
    "read_idx",
]
