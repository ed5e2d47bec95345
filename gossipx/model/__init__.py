"""A model in memory: one flat buffer over its parameters, and what is measured, copied and mixed in it."""
