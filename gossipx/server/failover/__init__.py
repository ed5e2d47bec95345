"""Changes and failures of servers: the coordinator, migration of tables, replicas, and deadlock detection."""
