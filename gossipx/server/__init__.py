"""The parameter server's decisions, as pure state machines and values."""
