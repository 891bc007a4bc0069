"""Encoder-decoder example that reads dates: `python -m experiments.translate`."""
