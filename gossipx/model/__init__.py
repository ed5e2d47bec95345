"""The model in memory: flat buffers over its parameters, snapshots of it, and the arithmetic of mixing models."""
