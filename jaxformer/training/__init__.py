"""State, optimizer, step, loop, checkpoints, metrics: what turns a model into a trained one."""
