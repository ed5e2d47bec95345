"""Settings of a run: what there are, how they are read and written, and who may talk to its peers."""
