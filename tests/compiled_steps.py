"""Train steps on simulated meshes, lowered and compiled once per process."""

import math
from functools import cached_property, lru_cache

import jax

from jaxformer import Transformer
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.training import train_step as step
from jaxformer.training.aot_compile import abstract_batch

ROWS, LENGTH = 8, 16


class CompiledTrainStep:
    """The step of a model with an optimizer on a mesh."""

    def __init__(
        self,
        config,
        sizes,
        optimizer,
        rows,
        length,
        gradient_accumulation_steps,
        devices,
        model_options,
    ):
        devices = (devices or jax.devices())[: math.prod(sizes.values())]
        self.mesh = make_mesh(MeshConfig(**sizes), devices)
        self.model = Transformer(config, **model_options)
        self.state = step.abstract_train_state(self.model, optimizer, self.mesh)
        batch = abstract_batch(config, self.mesh, rows, length, length)
        update = step.make_train_step(
            self.model,
            optimizer,
            self.mesh,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        self.lowered = update.lower(self.state, batch)

    @cached_property
    def compiled(self):
        return self.lowered.compile()


@lru_cache(32)
def _step(
    config, sizes, optimizer, rows, length, gradient_accumulation_steps, devices, model_options
):
    return CompiledTrainStep(
        config,
        dict(sizes),
        optimizer,
        rows,
        length,
        gradient_accumulation_steps,
        devices,
        dict(model_options),
    )


def train_step_on(
    config,
    sizes,
    optimizer,
    *,
    rows=ROWS,
    length=LENGTH,
    gradient_accumulation_steps=1,
    devices=None,
    **model_options,
):
    """The step on a mesh of these sizes; `model_options` are options of Transformer."""
    keys = tuple(sizes.items()), tuple(sorted(model_options.items()))
    return _step(
        config, keys[0], optimizer, rows, length, gradient_accumulation_steps, devices, keys[1]
    )
