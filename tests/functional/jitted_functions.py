"""`F` with every function under jax.jit: faster than executing single operations.

What they give is numpy's, so that a test's own operations on it are not compiled either.

Tests of what happens outside `jax.jit`, such as refusing wrong ids, import `jaxformer.functional`.
"""

import functools
import inspect

import jax
import numpy as np

from jaxformer import functional

ARRAY = jax.Array | np.ndarray


@functools.cache
def jitted(function, tree, kinds, rest):
    """From the arrays among the arguments, all else being what it is."""

    def run(arrays):
        values = iter(arrays), iter(rest)
        leaves = [next(values[kind is not None]) for kind in kinds]
        args, options = jax.tree.unflatten(tree, leaves)
        return function(*args, **options)

    return jax.jit(run)


class JittedFunctions:
    def __getattr__(self, name):
        function = getattr(functional, name)
        if not inspect.isfunction(function):
            return function

        @functools.wraps(function)
        def call(*args, **options):
            leaves, tree = jax.tree.flatten((args, options))
            kinds = tuple(None if isinstance(x, ARRAY) else type(x) for x in leaves)
            arrays = [x for x in leaves if isinstance(x, ARRAY)]
            rest = tuple(x for x in leaves if not isinstance(x, ARRAY))
            if not arrays:
                return function(*args, **options)
            output = jitted(function, tree, kinds, rest)(arrays)
            traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(output))
            return output if traced else jax.device_get(output)

        return call


F = JittedFunctions()
