"""The server: the parts of a parameter server that decide, as pure state machines and values."""
