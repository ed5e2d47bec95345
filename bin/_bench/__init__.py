"""What benchmarks and papers' tables share: the command line, tables, processes and peers, runs and their results."""
