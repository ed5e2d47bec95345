"""Servers that come, go and fail: the coordinator, migration of tables, replicas."""
