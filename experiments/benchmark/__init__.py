"""Who is faster: `python -m experiments.benchmark`."""
