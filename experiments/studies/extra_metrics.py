"""Extra metrics of ablations: loss on longer texts, gradient norm by depth."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from experiments.studies.recall import recall_by_length
from experiments.studies.results import ResultDict
from experiments.studies.study import ExtraMetric, finite_or_none
from experiments.studies.train_seeds import StudyTraining, Variant, held_out_losses
from jaxformer import Transformer, data
from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.inspect import unstack_layers
from jaxformer.run.pretraining import PackedCorpus
from jaxformer.training.gradient import summed_loss

LENGTH_FACTORS = (1, 2, 4, 8)
MAX_DOCUMENT_CHARACTERS = 6000  # of each document in `loss_by_length`
MIN_DEPTH = 24  # layers of the model in `gradient_by_depth`


def no_extra_metrics(
    variant: Variant, params: Any, corpus: PackedCorpus, training: StudyTraining
) -> ResultDict:
    """No extra metrics."""
    return {}


def loss_by_length(
    variant: Variant, params: Any, corpus: PackedCorpus, training: StudyTraining
) -> ResultDict:
    """Loss of the same held-out tokens in rows of 1, 2, 4 and 8 times the training length.

    A variant with RoPE is also evaluated with each RoPE scaling. Only the first
    `MAX_DOCUMENT_CHARACTERS` of each document are used, so that no long document dominates.
    """
    length, losses = training.rows.row_length, {}
    ways: dict[str, Mapping[int, c.TransformerConfig]] = {
        "as trained": {times: variant.model for times in LENGTH_FACTORS}
    }
    kinds = {layer.positions for layer in variant.model.layers} - {None}
    if kinds and all(isinstance(kind, c.Rope) and kind.scaling is None for kind in kinds):
        stretched = {
            times: rope_scalings(variant.model, length, times) for times in LENGTH_FACTORS[1:]
        }
        for name in stretched[LENGTH_FACTORS[1]]:
            ways[name] = {
                times: variant.model.with_rope_scaling(stretched[times][name])
                for times in LENGTH_FACTORS[1:]
            }
    for name, models in ways.items():
        losses[name] = {
            str(times): finite_or_none(
                held_out_losses(model, params, pack_held_out(corpus, times * length), training)
            )
            for times, model in models.items()
            if model.max_length is None or times * length <= model.max_length
        }
    return {"at_lengths": losses}


def pack_held_out(corpus: PackedCorpus, length: int) -> data.AnyRows:
    """The held-out documents packed into rows of another length."""
    starts = [d._replace(text=d.text[:MAX_DOCUMENT_CHARACTERS]) for d in corpus.held_out_documents]
    return data.pack(starts, corpus.tokenizer, row_length=length, folder=corpus.cache)


def rope_scalings(model: c.TransformerConfig, length: int, times: int) -> dict[str, c.RopeScaling]:
    """Every RoPE scaling for a context extended by this factor.

    NTK scalings keep the fastest pair and slow the slowest, so they need at least two pairs.
    """
    pairs = len(rope_wavelengths(model))
    factor = float(times)
    by_base: dict[str, c.RopeScaling] = {
        "NTK": c.NTKScaling(factor=factor),
        # Its factor follows from the longest document of a row.
        "dynamic NTK": c.DynamicNTK(factor=1.0, original_max_length=length),
    }
    return {
        "linear": c.LinearScaling(factor=factor),
        **(by_base if pairs > 1 else {}),
        "Llama 3": c.Llama3Scaling(factor=factor, original_max_length=length),
        "YaRN": c.Yarn(factor=factor, original_max_length=length),
        # The paper searches the factors. Here a pair keeps its frequency if its wavelength is at
        # most the training length, and else is slowed by their ratio, at most by `factor`.
        "LongRoPE, by wavelength": c.LongRope(
            short_factors=(1.0,) * pairs,
            long_factors=tuple(
                min(max(1.0, wave / length), factor) for wave in rope_wavelengths(model)
            ),
            original_max_length=length,
            max_length=times * length,
        ),
    }


def rope_wavelengths(model: c.TransformerConfig) -> list[float]:
    """Wavelength in tokens of each rotary frequency of the first RoPE layer."""
    attention, rope = next(
        (layer.attention.main, layer.positions)
        for layer in model.layers
        if isinstance(layer.positions, c.Rope)
    )
    frequencies = F.rope_frequencies(rope.rotary_dim(attention.rope_head_dim), base=rope.base)
    return [2 * math.pi / float(x) for x in frequencies]


def gradient_by_depth(
    variant: Variant, params: Any, corpus: PackedCorpus, training: StudyTraining
) -> ResultDict:
    """Gradient norm of each layer's kernels before the first step, in a deep model.

    All projections are initialized alike. An output projection scaled down by depth would make the
    branches of some placements smaller and not of others, whose norms undo it. Variants without
    warm-up are left out, as warm-up has no effect before the first step.
    """
    if variant.optimizer.schedule.warmup_steps == 0:
        return {}
    plain = replace(variant.model.initialisation, residual="plain")
    depth = max(MIN_DEPTH, variant.model.num_layers)
    model = Transformer(replace(variant.model, num_layers=depth, initialisation=plain))
    batch = next(data.evaluation_batches(corpus.held_out, batch_size=training.run.batch_size))

    def norms(key: Any) -> Any:
        start = model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]

        def loss(params: Any) -> Any:
            loss_total = summed_loss(model, variant.objective, params, batch, key, axis_names=())
            return loss_total / float(np.sum(batch.loss_mask))

        return jax.grad(loss)(start)

    keys = [jax.random.key(seed) for seed in training.seeds]
    norms_by_seed = [layer_gradient_norms(gradient) for gradient in map(jax.jit(norms), keys)]
    return {"gradient_by_depth": [finite_or_none(norm) for norm in norms_by_seed]}


def layer_gradient_norms(gradient: Any) -> np.ndarray:
    """Norm over all kernels of each decoder layer, first layer first."""

    def norm(layer: Any) -> float:
        leaves = tree_leaves_with_path(layer)
        kernels = [np.asarray(leaf) for path, leaf in leaves if path[-1].key == "kernel"]
        return math.sqrt(sum(float(np.sum(np.square(kernel))) for kernel in kernels))

    return np.asarray([norm(layer) for layer in unstack_layers(gradient["decoder"])])


EXTRA_METRICS: dict[str, ExtraMetric] = {
    "position": loss_by_length,
    "placement": gradient_by_depth,
    "mixer": recall_by_length,
}
