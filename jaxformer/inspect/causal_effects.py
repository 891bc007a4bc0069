"""What single values do to a metric of the logits: activation patching, ablation, path patching."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Integer

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.inspect.bound_patches import BoundPatch, bind_patches, perturbations
from jaxformer.inspect.lens import next_token_targets
from jaxformer.inspect.model_trace import (
    Arrays,
    Params,
    apply_with_intermediates,
    as_id_array,
    check_inputs,
    head_stack,
)
from jaxformer.inspect.named_values import (
    BRANCHES,
    ENCODER,
    ModelRun,
    names_with_heads,
    shapes_of,
    value_shapes,
)
from jaxformer.inspect.patched_run import run_bound
from jaxformer.inspect.patches import At, Change, Mean, Replace, Zero
from jaxformer.layers import Transformer
from jaxformer.layers.layouts import layout_of

Metric = Callable[[Float[Array, "*batch T V"]], Float[Array, ""]]


def logit_difference(
    right: int | Integer[Array, "*batch"],
    wrong: int | Integer[Array, "*batch"] | None = None,
    *,
    position: int = -1,
) -> Metric:
    """A metric of logits: logit of the right minus logit of a wrong token, mean over the rows.

    Args:
        right: Token id, one for all rows or one for each.
        wrong: Token id; None is the logit of the right token alone.
        position: Position in the row.

    Returns:
        A function of logits, as `activation_patching` takes it. Other ids and positions are not
        compiled again.
    """
    return Partial(_logit_difference, right, wrong, position)


def _logit_difference(
    right: Any, wrong: Any, position: Any, logits: Float[Array, "*batch T V"]
) -> Float[Array, ""]:
    scores = jnp.take(logits, jnp.asarray(position), axis=-2)

    def of(ids: Any) -> Float[Array, "*batch"]:
        each = jnp.broadcast_to(jnp.asarray(ids), scores.shape[:-1])
        return jnp.take_along_axis(scores, each[..., None], axis=-1)[..., 0]

    return jnp.mean(of(right) if wrong is None else of(right) - of(wrong))


def activation_patching(
    config: c.TransformerConfig,
    params: Params,
    clean: Int[Array, "*batch T"],
    corrupted: Int[Array, "*batch T"],
    metric: Metric,
    *,
    name: str = "stream",
    by: Literal["position", "head"] = "position",
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> Float32[np.ndarray, "layers columns"]:
    """How much of a metric returns to a corrupted run with one value of the clean run.

        effect[l, i] = (metric(patched[l, i]) - metric(corrupted))
                       / (metric(clean) - metric(corrupted))

    It is 1 where the value has all that tells the runs apart, and 0 where it has nothing. It exists
    for every configuration; a layer without the value, such as a custom mixer without `heads`, is
    NaN.

    Args:
        config: The model.
        params: The parameters.
        clean: Token ids that the model answers right.
        corrupted: The same rows with other tokens, which change the answer.
        metric: A function of logits, such as `logit_difference`.
        name: The value of the clean run that is put in, from `names`.
        by: Columns: positions (with all heads), or heads (at all positions).
        dtype: Dtype of the computation.
        **inputs: As in `trace`, for both runs.

    Returns:
        An effect for each layer and each position or head.

    Raises:
        ValueError: The name does not exist or has no layers or heads, the two token arrays have
            different shapes, or the metric does not tell them apart.

    References:
        Meng et al., Locating and Editing Factual Associations in GPT, 2022. arXiv:2202.05262,
        section 2; Heimersheim and Nanda, How to Use and Interpret Activation Patching, 2024.
        arXiv:2404.15255 (denoising)
    """
    base = _Base(config, params, corrupted, metric, dtype, inputs)
    clean_run, scale = base.run_clean(clean, (name,))
    return base.effects(name, Replace(clean_run), by) / scale


def path_patching(
    config: c.TransformerConfig,
    params: Params,
    clean: Int[Array, "*batch T"],
    corrupted: Int[Array, "*batch T"],
    metric: Metric,
    *,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> Float32[np.ndarray, "layers N"]:
    """The effect of each head on the logits by its direct path: past all later layers.

    As `activation_patching` of `heads`, but all other branches of all layers keep what they add in
    the corrupted run. The difference between the two is what later layers make of the head. It
    exists for every configuration with `heads`; layers without, such as custom mixers, are NaN.

    Args:
        config: The model.
        params: The parameters.
        clean: Token ids that the model answers right.
        corrupted: The same rows with other tokens.
        metric: A function of logits, such as `logit_difference`.
        dtype: Dtype of the computation.
        **inputs: As in `trace`, for both runs.

    Returns:
        An effect for each layer and head.

    Raises:
        ValueError: As in `activation_patching`.

    References:
        Wang et al., Interpretability in the Wild: a Circuit for Indirect Object Identification in
        GPT-2 Small, 2022. arXiv:2211.00593, section 3 (path patching)
    """
    branches = [name for name in BRANCHES if name in value_shapes(config)]
    base = _Base(config, params, corrupted, metric, dtype, inputs)
    clean_run, scale = base.run_clean(clean, ("heads",))
    corrupted_run, _ = base.run(base.arrays, tuple(branches))

    def freeze_branches(layer: int) -> dict[At | str, Change]:
        patches: dict[At | str, Change] = {}
        for branch in branches:
            own = layer if branch in ("attention", "parallel_branches") else None
            numbers = (i for i in shapes_of(config, branch) if i is not None and i != own)
            if layers := tuple(numbers):
                patches[At(branch, layer=layers)] = Replace(corrupted_run)
        return patches

    return base.effects("heads", Replace(clean_run), "head", freeze_branches) / scale


def ablate_heads(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    metric: Metric | None = None,
    *,
    by: Literal["zero", "mean"] = "zero",
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> Float32[np.ndarray, "layers N"]:
    """Change of a metric, by default of the loss, when one head is silent at all positions.

        effect[l, n] = metric(without head n of layer l) - metric(tokens)

    It exists for every configuration with `heads`; layers without, such as custom mixers, are NaN.

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids.
        metric: A function of logits; None is the mean cross-entropy of the next token, in nats.
        by: Whether a silent head is zero, or its mean over rows and tokens.
        dtype: Dtype of the computation.
        **inputs: As in `trace`.

    Returns:
        A change for each layer and head.

    Raises:
        ValueError: No layer has heads, or the model is an encoder and has no metric.
    """
    changes: dict[str, Change] = {"zero": Zero(), "mean": Mean()}
    change = changes.get(by)
    if change is None:
        raise ValueError(f"by must be 'zero' or 'mean'; got {by!r}.")
    return _Base(config, params, tokens, metric, dtype, inputs).effects("heads", change, "head")


def _mean_loss(targets: Array, has_loss: Array, logits: Array) -> Float[Array, ""]:
    return F.cross_entropy(logits, targets, mask=has_loss)


class _Base:
    """The run whose values are changed, and its metric."""

    def __init__(
        self,
        config: c.TransformerConfig,
        params: Params,
        tokens: Any,
        metric: Metric | None,
        dtype: DTypeLike,
        inputs: dict[str, Array],
    ):
        self.model, self.params = Transformer(config, dtype=dtype), params
        self.arrays = check_inputs(config, tokens, inputs)
        if metric is None:
            metric = Partial(_mean_loss, *next_token_targets(config, self.arrays, None))
        self.metric = metric if isinstance(metric, Partial) else Partial(metric)
        self.score = self.run(self.arrays, ())[1]

    def run(self, arrays: Arrays, record: tuple[str, ...]) -> tuple[ModelRun, float]:
        """A run without patches, and its metric, which must be a number."""
        result = run_bound(self.model, record, self.params, arrays, ())
        score = jnp.asarray(self.metric(result.logits))
        if score.shape:
            raise ValueError(f"metric(logits) must be one number; got shape {score.shape}.")
        return result, float(score)

    def run_clean(self, clean: Any, record: tuple[str, ...]) -> tuple[ModelRun, float]:
        """The clean run, and how much its metric is larger."""
        clean, corrupted = as_id_array("clean", clean), self.arrays["tokens"]
        if clean.shape != corrupted.shape:
            raise ValueError(
                f"clean and corrupted must have one shape; got {clean.shape} and {corrupted.shape}."
            )
        for name in record:
            shapes_of(self.model.config, name)
        inputs = {name: x for name, x in self.arrays.items() if name != "tokens"}
        result, score = self.run(check_inputs(self.model.config, clean, inputs), record)
        if not abs(score - self.score) > 1e-6 * max(abs(score), abs(self.score)):
            raise ValueError(
                f"The metric must tell clean and corrupted apart; it is {score} and {self.score}."
            )
        return result, score - self.score

    def effects(
        self,
        name: str,
        change: Change,
        by: Literal["position", "head"],
        layer_patches: Callable[[int], dict[At | str, Change]] = lambda _: {},
    ) -> Float32[np.ndarray, "layers columns"]:
        """Change of the metric for each layer and column; NaN where there is no value."""
        config = self.model.config
        rows: dict[int, np.ndarray] = {}
        for layer in value_layers(config, name, by):
            (patch,) = bind_patches(config, {At(name, layer=layer): change}, self.arrays)
            rest = bind_patches(config, layer_patches(layer), self.arrays)
            of_run = self.params, self.arrays, patch, rest, self.metric
            rows[layer] = np.asarray(_scores(self.model, by, *of_run), np.float32) - self.score
        stack = config.stacks["encoder" if name.startswith(ENCODER) else head_stack(config)]
        effects = np.full((len(stack), max(map(len, rows.values()))), np.nan, np.float32)
        for layer, row in rows.items():
            effects[layer, : len(row)] = row
        return effects


def value_layers(
    config: c.TransformerConfig, name: str, by: Literal["position", "head"]
) -> tuple[int, ...]:
    """Layers that have the value, which must have heads if columns are heads."""
    shapes = shapes_of(config, name)
    layers = tuple(i for i in shapes if i is not None)
    if by not in ("position", "head"):
        raise ValueError(f"by must be 'position' or 'head'; got {by!r}.")
    if not layers or (by == "head" and len(shapes[layers[0]]) == 1):
        raise ValueError(
            f"{name!r} has no {'heads' if layers else 'layers'}; heads have "
            f"{', '.join(names_with_heads(config))}."
        )
    return layers


@partial(jax.jit, static_argnums=(0, 1))
def _scores(
    model: Transformer,
    by: Literal["position", "head"],
    params: Params,
    arrays: Arrays,
    patch: BoundPatch,
    fixed_patches: tuple[BoundPatch, ...],
    metric: Any,
) -> Float32[Array, " columns"]:
    """The metric with the patch in each column, one after the other."""

    def score(i: Array) -> Float32[Array, ""]:
        one = replace(patch, positions=i[None])
        if by == "head":
            one = replace(patch, heads=i[None])
        changes = perturbations(model.config, (one, *fixed_patches), layout_of(params))
        logits, _ = apply_with_intermediates(model, params, arrays, changes)
        return jnp.asarray(metric(logits), jnp.float32)

    columns = patch.positions if by == "position" else patch.heads
    return jax.lax.map(score, jnp.asarray(columns))
