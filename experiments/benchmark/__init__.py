"""Speed benchmark against other libraries: `python -m experiments.benchmark`."""
