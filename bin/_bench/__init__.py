"""The library of benchmarks and papers: the command line, tables, processes and peers, tasks, runs and results."""
