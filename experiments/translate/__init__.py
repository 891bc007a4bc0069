"""An encoder-decoder that reads dates: `python -m experiments.translate`."""
