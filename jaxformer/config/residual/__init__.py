"""Residual options: what flows through the depth, and how branches read and write it."""
