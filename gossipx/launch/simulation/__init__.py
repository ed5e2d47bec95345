"""``gossipx simulate``: a run in virtual time, from a scenario to the directory of the run."""
