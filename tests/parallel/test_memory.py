import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxformer import Transformer, costs
from jaxformer.config import GLU, Alibi, EncoderDecoder, MoE, MultiHead, TransformerConfig
from jaxformer.parallel import MeshConfig, make_mesh, parameter_metadata
from jaxformer.parallel.memory import estimate_memory
from jaxformer.training import train_step as step
from jaxformer.training.optimizers import (
    SGD,
    Adafactor,
    AdamW,
    Lion,
    Muon,
    OptimizerConfig,
    make_optimizer,
)
from jaxformer.training.schedules import Constant
from tests.compiled_steps import train_step_on

ROWS, LENGTH = 16, 64
RULE = OptimizerConfig(schedule=Constant(peak=1e-3))
WIDE = TransformerConfig(
    vocab_size=512,
    model_dim=128,
    num_layers=6,
    attention=MultiHead(num_heads=4, num_kv_heads=2, head_dim=48),
    feed_forward=(GLU(hidden_dim=384),),
)
MIXED = replace(WIDE, feed_forward=(MoE(expert=GLU(hidden_dim=192), num_experts=4, top_k=2),))
TRANSLATING = replace(WIDE, num_layers=4, topology=EncoderDecoder(num_encoder_layers=4))
MANY = replace(WIDE, vocab_size=32_768, num_layers=2)  # logits would be half of all
CONFIGS = {"many": MANY, "wide": WIDE, "mixed": MIXED, "translating": TRANSLATING}


def program(config, sizes, *, rows=ROWS, length=LENGTH, dtype="float32", **how):
    optimizer = make_optimizer(RULE, 1, parameter_metadata(config))
    step = train_step_on(
        config, sizes, optimizer, rows=rows, length=length, dtype=jnp.dtype(dtype), **how
    )
    return step.compiled


def estimate(config, sizes, **how):
    reads = isinstance(config.topology, EncoderDecoder)
    source = LENGTH if reads else 0
    return estimate_memory(
        config, sizes, batch_size=ROWS, length=LENGTH, source_length=source, **how
    )


CASES = [
    ("wide", dict(fsdp=8), dict(remat="full", gradient_accumulation_steps=2)),
    ("wide", dict(tensor=4), {}),
    ("wide", dict(context=4), {}),
    ("wide", dict(fsdp=4, tensor=2), dict(remat="dots", dtype="bfloat16")),
    ("many", {}, {}),
    ("mixed", dict(expert=4), dict(remat="full")),
    ("translating", dict(fsdp=4, tensor=2), dict(remat="full")),
]
SELDOM = [
    ("wide", dict(data=8), {}),
    ("wide", dict(fsdp=8), dict(remat="dots")),
    ("wide", dict(fsdp=2, context=2, tensor=2), {}),
    ("many", dict(tensor=2), dict(dtype="bfloat16")),
    ("mixed", dict(fsdp=2, expert=2, tensor=2), {}),
]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in SELDOM)]


def label(part):
    if isinstance(part, dict):
        return "-".join(f"{name}{value}" for name, value in part.items()) or "plain"
    return part


LONG = 4096
DISTANT = replace(WIDE, attention=replace(WIDE.attention, positions=(Alibi(),)))


@pytest.mark.parametrize("context", [pytest.param(2, marks=pytest.mark.exhaustive), 8])
@pytest.mark.parametrize(
    "config, remat",
    [
        pytest.param(WIDE, "none", id="rotary-none"),
        pytest.param(DISTANT, "full", id="biases-full"),
        pytest.param(WIDE, "full", id="rotary-full", marks=pytest.mark.exhaustive),
        pytest.param(DISTANT, "none", id="biases-none", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_long_rows_that_devices_share(config, remat, context):
    """No array of all pairs is anywhere, with a bias or without."""
    sizes = dict(context=context)
    memory = program(config, sizes, remat=remat, rows=1, length=LONG).memory_analysis()
    expected = estimate_memory(config, sizes, batch_size=1, length=LONG, remat=remat)
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert 1 / 1.5 < expected.total / total < 1.5


@pytest.mark.parametrize("name, sizes, how", ALL, ids=label)
@pytest.mark.slow
def test_the_total_is_near_the_compilers(name, sizes, how):
    """Within a factor of 1.5; what lasts from update to update within a hundredth."""
    memory = program(CONFIGS[name], sizes, **how).memory_analysis()
    expected = estimate(CONFIGS[name], sizes, **how)
    lasting = expected.parameters + expected.optimizer
    assert 0.99 < lasting / memory.argument_size_in_bytes < 1
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert 1 / 1.5 < expected.total / total < 1.5


OPTIMIZERS = {"adamw": AdamW(), "lion": Lion(), "sgd": SGD(), "muon": Muon()}
KINDS = [*OPTIMIZERS, "adafactor"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_optimizers_keep(kind):
    """To the byte, but for counters; Adafactor keeps little, and is taken to keep less."""
    sizes = dict(fsdp=2, tensor=2)
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[:4])
    config = OptimizerConfig(
        schedule=Constant(peak=1e-3), optimizer=OPTIMIZERS.get(kind, Adafactor())
    )
    state = step.abstract_train_state(
        Transformer(WIDE), make_optimizer(config, 1, parameter_metadata(WIDE)), mesh
    )

    def device_bytes(tree):
        arrays = [x for x in jax.tree.leaves(tree) if x.ndim]
        return sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in arrays)

    expected = estimate(WIDE, sizes, optimizer=kind)
    assert expected.parameters == device_bytes(state.params)
    if kind == "adafactor":
        assert expected.optimizer <= device_bytes(state.opt_state) < 0.04 * expected.parameters
    else:
        assert expected.optimizer == device_bytes(state.opt_state) > 0


def test_what_each_part_is():
    one = estimate(WIDE, {})
    assert one.parameters == one.gradients == 4 * costs.num_parameters(WIDE)
    assert one.optimizer == 2 * one.parameters and one.gathered_kernels == 0
    assert one.logits == 2 * 4 * ROWS * LENGTH * 512
    assert one.activations + one.logits == costs.activation_bytes(WIDE, ROWS, LENGTH)
    assert one.total == sum(one)
    parts = estimate(WIDE, {}, gradient_accumulation_steps=4)
    assert parts.gradients == 2 * one.gradients and 4 * parts.activations == one.activations


def test_logits_of_a_large_vocabulary_are_there_in_part():
    """Of 2 ** 25 those of 4,096 ids; half as many are kept."""
    tokens = ROWS * LENGTH
    assert estimate(MANY, {}).logits == 2 * 4 * tokens * 4096
    assert estimate(MANY, dict(tensor=2)).logits == 2 * 4 * tokens * 16_384
    assert estimate(MANY, {}, gradient_accumulation_steps=2).logits == 2 * 4 * tokens // 2 * 32_768


def test_kernels_put_together():
    """Of one layer at a time, but all of them where casts are kept for the backward pass."""
    ends = 2 * 512 * 128 + 128
    layer = 128 * (4 + 2 * 2) * 48 + 4 * 48 * 128 + 3 * 128 * 384 + 2 * 128
    assert estimate(WIDE, dict(fsdp=2)).gathered_kernels == 4 * (ends + layer)
    assert estimate(WIDE, dict(fsdp=2), dtype="bfloat16").gathered_kernels == 2 * (ends + layer)
    assert estimate(WIDE, {}, dtype="bfloat16", remat="full").gathered_kernels == 2 * (ends + layer)
    assert estimate(WIDE, {}, dtype="bfloat16").gathered_kernels == 2 * (ends + 6 * layer)


def test_each_axis_divides_what_it_should():
    one, full = estimate(WIDE, {}), dict(remat="full")
    assert estimate(WIDE, dict(data=8)).parameters == one.parameters
    assert estimate(WIDE, dict(data=8)).activations == one.activations // 8
    assert estimate(WIDE, dict(tensor=2)).logits == one.logits // 2
    assert estimate(WIDE, dict(context=2)).logits == one.logits // 2
    assert estimate(WIDE, dict(fsdp=2)).parameters < 0.51 * one.parameters
    # A block's input, which "full" keeps, is whole on each device along `tensor`.
    assert estimate(WIDE, dict(tensor=2), **full).activations > 6 * ROWS * LENGTH * 128 * 4
    assert estimate(MIXED, dict(expert=4)).activations > estimate(MIXED, {}).activations / 4


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match=r"optimizer must be one of \('adamw', .*; got 'adam'"):
        estimate(WIDE, {}, optimizer="adam")
    with pytest.raises(ValueError, match="batch_size 16 must be a multiple of data 3"):
        estimate(WIDE, dict(data=3))
    with pytest.raises(ValueError, match=r"remat must be one of .*; got 'some'"):
        estimate(WIDE, {}, remat="some")
