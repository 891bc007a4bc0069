"""Variants of the axis "mixer": attention, recurrent layers, and hybrids of both."""

from collections.abc import Iterator
from dataclasses import replace

from experiments.studies.train_seeds import Variant
from jaxformer import config as c
from jaxformer import costs
from jaxformer.run.pretraining import Pretrain


def mixer_variants(baseline: Variant, run: Pretrain) -> Iterator[Variant]:
    """Attention, three recurrent layers, and hybrids, with equal parameter counts.

    Decay is RetNet's kind (a constant per head, no convolution). A hybrid has one layer of
    attention after three others, as Qwen 3 Next, or as the last layer if there are fewer than four.

    Raises:
        ValueError: The run has another attention than `MultiHead`, or rows of another length than
            a multiple of 8, which the recall tasks need.
    """
    attention = run.model.attention
    if not isinstance(attention, c.MultiHead):
        raise ValueError(f"The axis mixer needs a run with MultiHead; got {attention}.")
    if run.length % 8 != 0:
        raise ValueError(
            f"The axis mixer needs a length that is a multiple of 8; got {run.length}."
        )
    yield replace(baseline, name="attention")
    heads, width = attention.num_heads, attention.head_dim
    delta = c.LinearAttention(
        num_heads=heads, num_key_heads=heads, key_dim=3 * width // 4, value_dim=width
    )
    decay = replace(
        delta,
        decay=c.SlopeDecay(),
        delta_rule=False,
        beta="one",
        unit_vectors=False,
        convolution_width=None,
    )
    mamba = replace(
        delta,
        num_key_heads=1,
        key_dim=width,
        delta_rule=False,
        beta="step",
        unit_vectors=False,
        scale=1.0,
        skip=True,
        output=c.GatedNorm(over="group", placement="before_norm"),
        biases=("convolution",),
    )
    kinds = {"decay": decay, "gated delta": delta, "Mamba 2": mamba}
    kinds = {name: with_equal_parameters(run.model, kind) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        yield replace(baseline, name=name, model=replace(run.model, attention=kind))
    num_recurrent = min(3, run.model.num_layers - 1)
    for name in ("gated delta", "Mamba 2") if num_recurrent else ():
        model = replace(run.model, attention=(kinds[name],) * num_recurrent + (attention,))
        yield replace(baseline, name=f"{name}, attention {num_recurrent}:1", model=model)


def with_equal_parameters(model: c.TransformerConfig, kind: c.LinearAttention) -> c.LinearAttention:
    """The layer with the value_dim for which the model's parameter count changes least."""

    def num_parameters(value_dim: int) -> int:
        return costs.num_parameters(replace(model, attention=replace(kind, value_dim=value_dim)))

    one, two = num_parameters(1), num_parameters(2)
    extra = (costs.num_parameters(model) - one) / (two - one)
    return replace(kind, value_dim=1 + max(0, round(extra)))
