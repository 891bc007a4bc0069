"""Training: state, optimizers, train step, loop, checkpoints, metrics."""
