"""The variants of each ablation axis; the baseline comes first."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args, get_origin

from experiments.studies.mixers import mixer_variants
from experiments.studies.train_seeds import Variant
from jaxformer import config as c
from jaxformer.checks import field_types
from jaxformer.config import from_python
from jaxformer.config.layer import NormPlacement
from jaxformer.functional.activations import ACTIVATIONS
from jaxformer.run.command_line import dataclasses_by_name, with_field
from jaxformer.run.pretraining import Pretrain
from jaxformer.training.optimizers import SGD, Adafactor, AdamW, Lion, Muon

SINGLE_FIELD_AXES: Mapping[
    str, tuple[str, Mapping[str, Any]]
] = {  # axes that are one field of a run
    "norm": (
        "model.norm",
        {
            "RMSNorm, epsilon inside the root": c.RMSNorm(),
            "RMSNorm, epsilon outside": c.RMSNorm(eps_position="outside"),
            "RMSNorm, epsilon 1e-2 inside": c.RMSNorm(eps=1e-2),
            "RMSNorm, epsilon 1e-2 outside": c.RMSNorm(eps=1e-2, eps_position="outside"),
            "RMSNorm without scale": c.RMSNorm(parameters="none"),
            "LayerNorm": c.LayerNorm(),
            "LayerNorm without bias": c.LayerNorm(parameters="scale"),
            "LayerNorm without parameters": c.LayerNorm(parameters="none"),
        },
    ),
    "block": (
        "model.block",
        {
            "serial": "serial",
            "parallel, a norm each": "parallel",
            "parallel, one norm": "parallel_shared_norm",
        },
    ),
    "qk_norm": (
        "model.attention.qk_norm",
        {
            "none": None,
            "each head, one gain": c.QKNorm(over="head"),
            "each head, its gain": c.QKNorm(over="each_head"),
            "all heads together": c.QKNorm(over="width"),
        },
    ),
    "z_loss": ("objective.z_loss", {f"{weight:g}": weight for weight in (0.0, 1e-4, 1e-3, 1e-2)}),
}


def make_variants(axis: str, run: Pretrain, names: Collection[str] = ()) -> list[Variant]:
    """Variants of one axis of a run; the first is the run itself.

    Args:
        axis: What differs between the variants: a name of `AXES`, or a field such as "model.norm".
        run: The baseline, which is the first variant.
        names: Names of the other variants; empty means all. For a field and for the axis
            "position", values as Python expressions; for the axis "activation" also an imported
            activation, with or without ", gated" appended.

    Returns:
        The variants.

    Raises:
        ValueError: There is no such axis, field or variant, or the baseline has the name.
    """
    axis = axis.replace("-", "_")  # as in flags
    base_variant = Variant(
        name="baseline", model=run.model, optimizer=run.optimizer, objective=run.objective
    )
    if "." in axis and not names:
        raise ValueError(
            f"The axis {axis} is a field: pass the values to compare with the baseline, as "
            "--variants VALUE VALUE ..."
        )
    if "." in axis:
        return [base_variant, *(with_parsed_field(base_variant, axis, x) for x in names)]
    if axis not in AXES:
        raise ValueError(
            f"There is no axis {axis!r}. Axes: {', '.join(AXES)}, or a field, such as model.norm."
        )
    if axis in SINGLE_FIELD_AXES:
        path, values = SINGLE_FIELD_AXES[axis]
        variants = [named_variant(base_variant, path, x, name) for name, x in values.items()]
    else:
        variants = list(VARIANT_MAKERS[axis](base_variant, run))
    equal_to_base = (x for x in variants if replace(x, name=base_variant.name) == base_variant)
    baseline = next(equal_to_base, base_variant)
    by_name = {variant.name: variant for variant in variants if variant != baseline}
    for name in names:
        if name == baseline.name:
            raise ValueError(f"{name!r} is the baseline, which is always trained.")
        if name not in by_name:
            unlisted = unlisted_variants(axis, name, base_variant, run)
            by_name |= {variant.name: variant for variant in unlisted}
        if name not in by_name:
            raise ValueError(
                f"Axis {axis} has no variant {name!r}. Variants: {'; '.join(by_name)}."
            )
    return [baseline, *(x for name, x in by_name.items() if not names or name in names)]


def unlisted_variants(axis: str, name: str, baseline: Variant, run: Pretrain) -> Iterator[Variant]:
    """Variants by an imported activation, or by a position encoding as a Python expression."""
    word = name.removesuffix(", gated")
    if axis == "activation" and word in ACTIVATIONS:
        yield from activation_variants(baseline, run, [word], [word])
    elif axis == "position" and name.endswith(")"):
        without_added = replace(baseline, model=without_positions(run))
        yield with_parsed_field(without_added, "model.attention.positions", name)


def with_model_changes(variant: Variant, name: str, **changes: Any) -> Variant:
    """Variant whose model configuration differs in these fields."""
    return replace(variant, name=name, model=replace(variant.model, **changes))


def named_variant(variant: Variant, path: str, value: Any, name: str) -> Variant:
    """Variant that differs in one field, for example model.attention.qk_norm."""
    field_type(variant, path)
    return replace(with_field(variant, path, value), name=name)


def with_parsed_field(variant: Variant, path: str, text: str) -> Variant:
    """Variant whose field is a Python literal, an option's repr, or one of its strings."""
    hint = field_type(variant, path)
    value = text if text in get_args(hint) else from_python(text, dataclasses_by_name([hint]))
    if get_origin(hint) is tuple and not isinstance(value, tuple):
        value = (value,)
    return named_variant(variant, path, value, text)


def field_type(config: Any, path: str) -> Any:
    """Type annotation of the field at a dotted path.

    Raises:
        ValueError: There is no such field.
    """
    for field in path.split("."):
        hints = field_types(config.__class__)
        if field not in hints:
            raise ValueError(f"{type(config).__name__} has no field {field!r}.")
        config, hint = getattr(config, field), hints[field]
    return hint


WITHOUT_WARM_UP = ", no warm-up"  # suffix of a variant's name


def placement_variants(baseline: Variant, run: Pretrain) -> Iterator[Variant]:
    """Every norm placement, each with the run's warm-up and without warm-up."""
    has_warmup = run.optimizer.schedule.warmup_steps > 0
    schedule = replace(run.optimizer.schedule, warmup_steps=0)
    for placement in get_args(NormPlacement):
        # Post-norm needs no final norm, all others do.
        is_baseline = placement == run.model.norm_placement
        final = run.model.final_norm if is_baseline else placement != "post"
        variant = with_model_changes(
            baseline, placement, norm_placement=placement, final_norm=final
        )
        yield variant
        if not has_warmup:
            continue
        at_once = replace(run.optimizer, schedule=schedule)
        yield replace(variant, name=f"{placement}{WITHOUT_WARM_UP}", optimizer=at_once)


# The feed-forward branch


def activation_variants(
    baseline: Variant,
    run: Pretrain,
    gated_names: Iterable[str] = ("silu", "gelu", "relu", "sigmoid", "identity"),
    ungated_names: Iterable[str] = ("silu", "gelu", "relu", "relu_squared"),
) -> Iterator[Variant]:
    """Activations with and without a gate, at equal parameter counts."""
    width, gated, bias = feed_forward_width(run.model)
    plain = width * 3 // 2 if gated else width
    for activation in gated_names:
        choice = c.GLU(hidden_dim=plain * 2 // 3, activation=activation, bias=bias)
        yield with_model_changes(baseline, f"{activation}, gated", feed_forward=(choice,))
    for activation in ungated_names:
        branch = c.MLP(hidden_dim=plain, activation=activation, bias=bias)
        yield with_model_changes(baseline, activation, feed_forward=(branch,))


def feed_forward_width(model: c.TransformerConfig) -> tuple[int, bool, bool]:
    """Hidden width of the first feed-forward, whether it is gated, and whether it has biases.

    Raises:
        ValueError: It is a mixture of experts, or a custom type.
    """
    branch = model.feed_forward[0]
    if not isinstance(branch, c.MLP | c.GLU | c.ClampedGEGLU):
        raise ValueError(f"The axis activation needs an MLP or a GLU; got {branch}.")
    return branch.hidden_dim, not isinstance(branch, c.MLP), branch.bias


# Positions


def without_positions(run: Pretrain) -> c.TransformerConfig:
    """The model of the run, without positions added to its embedding."""
    return replace(run.model, embedding=replace(run.model.embedding, positions=None))


def position_variants(baseline: Variant, run: Pretrain) -> Iterator[Variant]:
    """Every position encoding: inside attention, and added to the embedding."""
    model = without_positions(run)
    table, bare = model.embedding, model.with_positions(None)
    kinds: dict[str, c.Positions] = {
        "RoPE": c.Rope(),
        "RoPE on a quarter": c.Rope(fraction=0.25),
        "RoPE, base 500,000": c.Rope(base=5e5),
        "ALiBi": c.Alibi(),
        "T5 bias": c.T5Bias(),
        "Transformer-XL": c.TransformerXL(),
    }
    for name, kind in kinds.items():
        yield replace(baseline, name=name, model=model.with_positions(kind))
    mixed = model.with_positions(c.Rope(), None)
    yield replace(baseline, name="RoPE in every other layer", model=mixed)
    yield replace(baseline, name="none", model=bare)
    added: dict[str, c.Learned | c.Sinusoid] = {
        "learned": c.Learned(max_length=run.length),
        "sinusoid": c.Sinusoid(),
    }
    for name, where in added.items():
        embedding = replace(table, positions=where)
        yield replace(baseline, name=name, model=replace(bare, embedding=embedding))


# The rest


def softcap_variants(baseline: Variant, run: Pretrain) -> Iterator[Variant]:
    """Soft caps on attention scores, on logits, and on both."""
    for scores, logits in ((None, None), (50.0, None), (None, 30.0), (50.0, 30.0), (5.0, None)):
        name = f"scores {scores}, logits {logits}"
        variant = named_variant(baseline, "model.attention.logit_softcap", scores, name)
        yield named_variant(variant, "model.head.softcap", logits, name)


def optimizer_variants(baseline: Variant, run: Pretrain) -> Iterator[Variant]:
    """Every optimizer, with the learning rate of the run scaled by the usual ratio between the two.

    Weight decay is each optimizer's default: 0.1 of AdamW and Muon, 0.5 of Lion, 0 of the others.
    """
    kinds: dict[str, tuple[Any, float]] = {
        "AdamW": (AdamW(), 1.0),
        "Muon": (Muon(adamw_rate=0.25), 4.0),
        "Adafactor": (Adafactor(), 4.0),
        "Lion": (Lion(), 0.1),
        "SGD with momentum": (SGD(), 20.0),
    }
    own_type, schedule = type(run.optimizer.optimizer), run.optimizer.schedule
    unit = schedule.peak / next(x for kind, x in kinds.values() if type(kind) is own_type)
    for name, (kind, times) in kinds.items():
        rate, optimizer = times * unit, run.optimizer
        if type(kind) is not own_type:
            changed = replace(schedule, peak=rate)
            optimizer = replace(optimizer, optimizer=kind, schedule=changed)
        yield replace(baseline, name=f"{name}, {rate:g}", optimizer=optimizer)


VARIANT_MAKERS: Mapping[str, Callable[[Variant, Pretrain], Iterator[Variant]]] = {
    "placement": placement_variants,
    "activation": activation_variants,
    "position": position_variants,
    "mixer": mixer_variants,
    "softcap": softcap_variants,
    "optimizer": optimizer_variants,
}
AXES = (*SINGLE_FIELD_AXES, *VARIANT_MAKERS)
