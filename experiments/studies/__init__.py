"""Shared code of `python -m experiments.ablate` and `python -m experiments.rope_placement`."""
