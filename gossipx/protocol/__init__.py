"""The vocabulary of the protocol: messages between peers, and the events and effects between a role and its driver."""
