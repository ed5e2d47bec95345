"""What peers say to each other, and the events and effects by which a role talks to its driver."""
