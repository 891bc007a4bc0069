"""Train steps on simulated meshes, lowered and compiled once per process."""

import math
from functools import cached_property, lru_cache

import jax

from jaxformer import Transformer
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.training import step
from jaxformer.training.compiled import abstract_batch

ROWS, LENGTH = 8, 16


class Step:
    """The step of a model with an optimizer on a mesh."""

    def __init__(self, config, sizes, optimizer, rows, length, accumulation, devices, how):
        devices = (devices or jax.devices())[: math.prod(sizes.values())]
        self.mesh = make_mesh(MeshConfig(**sizes), devices)
        self.model = Transformer(config, **how)
        self.state = step.abstract_state(self.model, optimizer, self.mesh)
        batch = abstract_batch(config, self.mesh, rows, length, length)
        update = step.make_update(self.model, optimizer, self.mesh, accumulation=accumulation)
        self.lowered = update.lower(self.state, batch)

    @cached_property
    def compiled(self):
        return self.lowered.compile()


@lru_cache(32)
def _step(config, sizes, optimizer, rows, length, accumulation, devices, how):
    return Step(config, dict(sizes), optimizer, rows, length, accumulation, devices, dict(how))


def step_on(
    config, sizes, optimizer, *, rows=ROWS, length=LENGTH, accumulation=1, devices=None, **how
):
    """The step on a mesh of these sizes; `how` are options of Transformer."""
    keys = tuple(sizes.items()), tuple(sorted(how.items()))
    return _step(config, keys[0], optimizer, rows, length, accumulation, devices, keys[1])
