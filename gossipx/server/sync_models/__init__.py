"""Sync models of the parameter server: when a shard answers a pull and applies a gradient."""
