"""Integrations with training frameworks: DDP groups, Lightning, the Hugging Face Trainer and Accelerate.

Each module needs the package of its framework, so import the one that you use.
"""
