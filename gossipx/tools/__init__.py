"""Commands around a run: doctor, dry run, export, plots, job scripts, certificates."""
