"""The parameter server's pure parts: where the tables of a model lie."""
