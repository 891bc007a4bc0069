"""Attention over keys and values: whole matrices, blocks, rings, kernels; masks and biases."""
