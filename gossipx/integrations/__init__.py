"""gossipx in loops that others run: DDP groups, Lightning, the Hugging Face Trainer, Accelerate.

Each module needs its own package, and none is imported before it is asked for.
"""
