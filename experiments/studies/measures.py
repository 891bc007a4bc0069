"""Extra metrics of ablations: loss on longer texts, gradient norm by depth."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from experiments.pretrain import Text
from experiments.studies.results import Numbers
from experiments.studies.seeds import Arm, Training, held_out_nats
from experiments.studies.study import Measure, finite_or_none
from jaxformer import Transformer, data
from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.inspect import layers_of
from jaxformer.training.gradient import total_loss

TIMES = (1, 2, 4, 8)
CHARACTERS = 6000  # of a document, where longer rows are read
DEPTH = 24  # layers of the model whose gradients are looked at


def nothing_more(arm: Arm, params: Any, text: Text, training: Training) -> Numbers:
    """No metric beside the loss."""
    return {}


def at_lengths(arm: Arm, params: Any, text: Text, training: Training) -> Numbers:
    """Loss of the same held-out tokens in rows of 1, 2, 4 and 8 times the training length.

    Where the arm is rotary, also with each way of stretching its positions so many times. They are
    the first `CHARACTERS` of each document, so that no long one speaks for all.
    """
    length, losses = training.rows.row_length, {}
    ways: dict[str, Mapping[int, c.TransformerConfig]] = {
        "as trained": {times: arm.model for times in TIMES}
    }
    kinds = set(arm.model.attention.positions) - {None}
    if kinds and all(isinstance(kind, c.Rope) and kind.scaling is None for kind in kinds):
        stretched = {times: scalings(arm.model, length, times) for times in TIMES[1:]}
        for name in stretched[TIMES[1]]:
            ways[name] = {
                times: arm.model.with_rope_scaling(stretched[times][name]) for times in TIMES[1:]
            }
    for name, models in ways.items():
        losses[name] = {
            str(times): finite_or_none(
                held_out_nats(model, params, packed(text, times * length), training)
            )
            for times, model in models.items()
            if model.max_length is None or times * length <= model.max_length
        }
    return {"at_lengths": losses}


def packed(text: Text, length: int) -> data.AnyRows:
    """The held-out documents packed into rows of another length."""
    starts = [d._replace(text=d.text[:CHARACTERS]) for d in text.documents]
    return data.pack(starts, text.tokenizer, row_length=length, folder=text.cache)


def scalings(model: c.TransformerConfig, length: int, times: int) -> dict[str, c.RopeScaling]:
    """Every RoPE scaling for a context extended by this factor.

    NTK keeps the fastest pair and slows the slowest: not among them where one pair is both.
    """
    pairs = len(wavelengths(model))
    factor = float(times)
    by_base: dict[str, c.RopeScaling] = {
        "NTK": c.NTKScaling(factor=factor),
        # It follows the length of the text by itself: of a row's longest document.
        "dynamic NTK": c.DynamicNTK(factor=1.0, original_max_length=length),
    }
    return {
        "linear": c.LinearScaling(factor=factor),
        **(by_base if pairs > 1 else {}),
        "Llama 3": c.Llama3Scaling(factor=factor, original_max_length=length),
        "YaRN": c.Yarn(factor=factor, original_max_length=length),
        # The paper searches its factors. Here a pair that turns often in the length of training
        # keeps its pace, and one whose wavelength is longer is stretched by as much, at most.
        "LongRoPE, by wavelength": c.LongRope(
            short=(1.0,) * pairs,
            long=tuple(min(max(1.0, wave / length), factor) for wave in wavelengths(model)),
            original_max_length=length,
            max_length=times * length,
        ),
    }


def wavelengths(model: c.TransformerConfig) -> list[float]:
    """Wavelength in tokens of each rotary frequency of the first RoPE layer."""
    rope = next(kind for kind in model.attention.positions if isinstance(kind, c.Rope))
    frequencies = F.rope_frequencies(rope.width(model.kind.rotary_dim), base=rope.base)
    return [2 * math.pi / float(x) for x in frequencies]


def by_depth(arm: Arm, params: Any, text: Text, training: Training) -> Numbers:
    """Gradient norm of each layer's kernels before the first step, in a deep model.

    All projections begin alike: to begin those into the residual stream smaller, by depth, would
    divide what some placements add and not what others do, whose norms undo it. An arm without
    warm-up is the same as with it before the first update.
    """
    if arm.optimizer.schedule.warmup_steps == 0:
        return {}
    plain = replace(arm.model.initialisation, residual="plain")
    depth = max(DEPTH, arm.model.num_layers)
    model = Transformer(replace(arm.model, num_layers=depth, initialisation=plain))
    batch = next(data.evaluation_batches(text.held_out, batch_size=training.batch_size))

    def norms(key: Any) -> Any:
        start = model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]

        def loss(params: Any) -> Any:
            loss_total = total_loss(model, arm.objective, params, batch, key, over=())
            return loss_total / float(np.sum(batch.mask))

        return jax.grad(loss)(start)

    keys = [jax.random.key(seed) for seed in training.seeds]
    norms_by_seed = [layer_norms(gradient) for gradient in map(jax.jit(norms), keys)]
    return {"gradient_by_depth": [finite_or_none(norm) for norm in norms_by_seed]}


def layer_norms(gradient: Any) -> np.ndarray:
    """Norm over all kernels of each decoder layer, first layer first."""

    def norm(layer: Any) -> float:
        leaves = tree_leaves_with_path(layer)
        kernels = [np.asarray(leaf) for path, leaf in leaves if path[-1].key == "kernel"]
        return math.sqrt(sum(float(np.sum(np.square(kernel))) for kernel in kernels))

    return np.asarray([norm(layer) for layer in layers_of(gradient["decoder"])])


MEASURES: dict[str, Measure] = {"position": at_lengths, "placement": by_depth}
