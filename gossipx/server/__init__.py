"""The parameter server: what decides in it, as pure state machines and values."""
