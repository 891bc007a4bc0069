"""Attention options: a frozen dataclass for each kind, with its costs, cache and test size."""
