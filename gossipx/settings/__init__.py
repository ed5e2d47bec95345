"""The settings of a run: their declarations, how they are read and written, and who may connect to the peers."""
