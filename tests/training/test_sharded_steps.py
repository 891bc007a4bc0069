"""Sharded train steps: numbers of one device, and only the recorded collectives."""

import json
import re
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jaxformer import Transformer
from jaxformer import functional as F
from jaxformer.config import EncoderDecoder
from jaxformer.data import Batch, PairBatch
from jaxformer.layers.runtime import RuntimeConfig, apply_dropout
from jaxformer.parallel import MeshConfig, make_mesh, parameter_metadata, put_batch
from jaxformer.training import train_step as step
from jaxformer.training.aot_compile import HloModule
from jaxformer.training.optimizers import AdamW, Muon, OptimizerConfig, make_optimizer
from jaxformer.training.pmap_train_step import make_pmap_train_step
from jaxformer.training.schedules import Constant
from jaxformer.training.skip_step import init_skip_state
from tests.compiled_steps import LENGTH, ROWS, train_step_on
from tests.small_models import model, random_params

RECORD = Path(__file__).parent / "golden" / "messages.json"  # collectives.py there wrote it
STEPS = 4
CASES = [
    (
        "llama-2-70b",
        dict(data=2, tensor=4),
        dict(remat="full", gradient_accumulation_steps=2),
    ),  # shared heads
    ("mixtral-8x7b", dict(fsdp=2, expert=2, tensor=2), {}),
    ("llama-2-70b", dict(fsdp=2, tensor=2, context=2), {}),
    ("gpt-oss-20b", dict(expert=2, tensor=2, context=2), {}),  # sinks, biases of experts
    ("llama-4-maverick", dict(expert=2, tensor=2, context=2), {}),  # chunks, weighed inputs
    ("gemma 4", dict(expert=2, tensor=2, context=2), {}),  # norms of experts, of values
    ("gemma 4 edge", dict(fsdp=2, tensor=2, context=2), dict(remat="dots")),
    ("llama-2-70b", dict(fsdp=2, tensor=4), dict(muon=True)),  # 8 devices, 2 layers
    ("t5-small", dict(data=2, fsdp=2, tensor=2), dict(remat="full", gradient_accumulation_steps=2)),
    ("latent", dict(fsdp=2, context=2, tensor=2), dict(remat="dots")),
    ("olmo-2-7b", dict(data=2, context=2, tensor=2), dict(remat="full")),  # norms over all heads
    ("differential", dict(fsdp=2, context=2, tensor=2), {}),
    ("hybrid", dict(fsdp=2, context=2, tensor=2), dict(remat="dots")),  # states handed along
    ("gopher-280b", dict(context=2, tensor=2), {}),  # terms of all pairs, so keys are gathered
    ("phi-3-small", dict(context=4, tensor=2), dict(remat="full")),  # and here masks of each head
]
SELDOM = [
    ("llama-2-70b", dict(data=8), {}),
    ("gpt-j-6b", dict(fsdp=2, tensor=4), {}),  # parallel branches that share a norm
    ("bloom-560m", dict(data=2, tensor=2), {}),  # slopes of each device's heads
    ("gopher-280b", dict(fsdp=4, tensor=2), {}),  # kernels of distances
    ("mixtral-8x7b", dict(data=2, expert=4), dict(expert_capacity_factor=1.3)),
    ("output gates", dict(fsdp=2, context=2, tensor=2), {}),
    ("shared", dict(fsdp=2, context=2, tensor=2), {}),
    ("hybrid heads", dict(fsdp=2, context=2, tensor=2), {}),  # with one reduction of the sum
    ("falcon-40b", dict(fsdp=2, tensor=4), dict(remat="full")),  # parallel, with a norm each
    (
        "mixtral-8x7b",
        dict(data=2, expert=2, context=2),
        dict(remat="dots", gradient_accumulation_steps=2),
    ),
    ("norms of heads", dict(fsdp=2, tensor=4), dict(remat="dots")),
    ("scaled queries", dict(fsdp=2, context=2, tensor=2), {}),
    ("gated delta", dict(fsdp=2, context=2, tensor=2), dict(remat="dots")),
    ("mamba 2", dict(data=2, context=2, tensor=2), {}),
    ("bamba-9b", dict(context=2, tensor=4), {}),  # one key head, which all devices have
    ("kimi delta", dict(context=2, tensor=4), {}),
    ("lightning", dict(fsdp=2, context=2, tensor=2), {}),
    ("lfm-2.5-1.2b", dict(context=4, tensor=2), {}),  # convolutions
    ("decay", dict(data=2, context=2, tensor=2), dict(remat="full", gradient_accumulation_steps=2)),
    ("mixtral-8x7b", dict(fsdp=2, expert=2), {}),
    ("llama-2-70b", dict(fsdp=2, context=2), {}),
    ("transformer-base", dict(fsdp=2, context=2, tensor=2), {}),
    ("bloom-560m", dict(data=2, context=4), {}),
    ("mixtral-8x7b", dict(fsdp=2, expert=2, tensor=2), dict(muon=True)),
    ("t5-small", dict(data=2, fsdp=2), dict(muon=True)),
    ("latent", dict(fsdp=2, tensor=2), dict(muon=True)),
]
# Some gradients, such as those of key biases, are nothing but rounding, and with the usual epsilon
# of 1e-8 Adam would make whole steps of them.
ADAM = AdamW(eps=1e-6)


@lru_cache
def optimizer(name, muon=False):
    """One that keeps the gradients it was given."""
    kind = Muon() if muon else ADAM
    rule = OptimizerConfig(schedule=Constant(peak=1e-3), optimizer=kind)
    inner = make_optimizer(rule, STEPS, parameter_metadata(model(name)))

    def update(gradients, state, params, **known):
        updates, inner_state = inner.update(gradients, state[1], params, **known)
        return updates, (gradients, inner_state)

    return optax.GradientTransformationExtraArgs(
        lambda params: (jax.tree.map(jnp.zeros_like, params), inner.init(params)), update
    )


@lru_cache
def batches(name):
    """Rows of different lengths and documents, as each step sees them."""
    config, rng = model(name), np.random.default_rng(1)

    def tokens():
        return rng.integers(0, config.vocab_size - 1, (ROWS, LENGTH), np.int32)

    def batch():
        mask = np.arange(LENGTH) < rng.integers(1, LENGTH, (ROWS, 1))
        if isinstance(config.topology, EncoderDecoder):
            lengths = rng.integers(2, LENGTH, (ROWS, 1))
            read = np.int32(np.arange(LENGTH) < lengths)
            return PairBatch(tokens(), read, tokens(), tokens(), mask)
        ends = rng.integers(3, LENGTH - 3, (ROWS, 1))
        places = np.arange(LENGTH)
        positions = np.where(places < ends, places, places - ends).astype(np.int32)
        return Batch(tokens(), tokens(), positions, 1 + np.int32(places >= ends), mask)

    return [batch() for _ in range(STEPS)]


def the_step(name, sizes, how):
    how = dict(how)
    return train_step_on(model(name), sizes, optimizer(name, how.pop("muon", False)), **how)


def train(name, sizes, how):
    """Losses of the steps, gradients of the first, parameters after the last."""
    its, muon = the_step(name, sizes, how), "muon" in how
    rule = optimizer(name, how.get("muon", False))
    params = random_params(model(name), 0.1)
    state = step.TrainState(np.int32(0), {}, params, rule.init(params), init_skip_state())
    state = jax.tree.map(lambda x, to: jax.device_put(np.array(x), to.sharding), state, its.state)
    losses, gradients = [], None
    for batch in batches(name)[: 2 if muon else STEPS]:
        state, metrics = its.compiled(state, put_batch(batch, its.mesh, ROWS))
        gradients = jax.device_get(state.opt_state[0]) if gradients is None else gradients
        losses.append(float(metrics.loss))
    return losses, gradients, jax.device_get(state.params)


@lru_cache
def on_one_device(name, gradient_accumulation_steps=1, muon=False):
    how = dict(muon=True) if muon else {}
    return train(
        name, dict(data=1), how | dict(gradient_accumulation_steps=gradient_accumulation_steps)
    )


def assert_same_training(actual, expected):
    (losses, gradients, params), (true_losses, true_gradients, true_params) = actual, expected
    np.testing.assert_allclose(losses[0], true_losses[0], rtol=1e-5)
    np.testing.assert_allclose(losses, true_losses, rtol=1e-4)
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(true_gradients))

    def close(path, one, other):  # those of key biases are nothing but rounding
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest, err_msg=str(path))

    jax.tree_util.tree_map_with_path(close, gradients, true_gradients)
    worst = jax.tree.map(lambda x, y: np.abs(x - y).max(), params, true_params)
    assert max(jax.tree.leaves(worst)) < 1e-4


def label(case):
    name, sizes, how = case
    return "-".join([name, *(f"{k}{v}" for k, v in {**sizes, **how}.items())])


@pytest.fixture(  # a module's, so that all claims of one go in turn
    scope="module",
    params=[
        *(pytest.param(case, marks=pytest.mark.slow) for case in CASES),
        *(pytest.param(case, marks=pytest.mark.exhaustive) for case in SELDOM),
    ],
    ids=map(label, CASES + SELDOM),
)
def case(request):
    return request.param


def test_a_step_on_many_devices_is_the_step_on_one(case):
    """Loss, every gradient, and the parameters after four updates, or two of Muon.

    With accumulation each part has the same rows on any mesh, since the load of experts is balanced
    within it. Muon must see whole matrices: to orthogonalise shares of one is another update.
    """
    name, _, how = case
    if "expert_capacity_factor" in how:
        pytest.skip("the mesh decides for which tokens there is room")
    alone = {k: x for k, x in how.items() if k in ("gradient_accumulation_steps", "muon")}
    assert_same_training(train(*case), on_one_device(name, **alone))


@pytest.mark.parametrize(
    "name", ["shared expert", "latent experts", "norms of experts", "a norm of the sum"]
)
@pytest.mark.slow
def test_a_shared_expert_is_added_once(name):
    """With the biases of its last layer, which every device has whole."""
    case = name, dict(fsdp=2, expert=2, tensor=2), {}
    assert_same_training(train(*case), on_one_device(name))


@pytest.mark.parametrize("name", ["norms before projections", "tied"])
@pytest.mark.slow
def test_norms_of_sharded_heads_and_hidden_features(name):
    """And of a hidden layer of the head."""
    case = name, dict(fsdp=2, context=2, tensor=2), {}
    assert_same_training(train(*case), on_one_device(name))


def messages(name, sizes, how):
    """Bytes that arrive at a device in one step, by kind of collective."""
    return HloModule(the_step(name, sizes, how).compiled.as_text()).collective_bytes()[0]


def test_a_step_sends_what_is_on_record(case):
    """A kernel gathered once more, or a sum of what was summed, is another number of bytes."""
    recorded = json.loads(RECORD.read_text())
    assert messages(*case) == recorded[label(case)]


@pytest.mark.slow
def test_the_vocabulary_in_chunks_sends_no_more(monkeypatch):
    """64 ids of a device, 24 at a time and 16 left over: the messages of all at once."""
    case = "llama-2-70b", dict(fsdp=2, tensor=2, context=2), {}
    whole = messages(*case)
    for constant, number in dict(
        MAX_UNCHUNKED_LOGITS=0, LOGITS_PER_CHUNK=dict(cpu=1), MIN_CHUNK_SIZE=24
    ).items():
        monkeypatch.setattr(F.linear_losses, constant, number)
    assert F.vocab_chunk_size(32, model("llama-2-70b").vocab_size // 2) == 24
    assert messages(*case[:2], case[2] | dict(remat="none")) == whole  # compiled anew


SAID = re.compile(
    r'"stablehlo\.(all_gather|reduce_scatter|all_reduce|collective_permute|all_to_all)"'
    r".*?-> tensor<(?:[\dx]*x)?(\w+)>",
    re.S,
)


@pytest.mark.parametrize(
    "name, sizes, narrow",
    [
        ("mixtral-8x7b", dict(fsdp=2, expert=2, tensor=2), ["all_gather", "all_to_all"]),
        ("llama-2-70b", dict(fsdp=2, context=2, tensor=2), ["all_gather", "collective_permute"]),
        ("llama-2-70b", dict(data=2, tensor=4), []),
    ],
    ids=["experts", "context", "tensor"],
)
@pytest.mark.slow
def test_kernels_keys_and_tokens_travel_as_bfloat16_and_sums_as_float32(name, sizes, narrow):
    """From the program before a CPU, which has no bfloat16, widens what it says."""
    its = train_step_on(model(name), sizes, optimizer(name), dtype=jnp.bfloat16)
    collectives = SAID.findall(its.lowered.as_text())
    assert {kind for kind, dtype in collectives if dtype == "bf16"} == {*narrow, "all_reduce"}
    # Rows of the embedding: of the devices only one has a row that is not zero.
    assert sum(dtype == "bf16" for kind, dtype in collectives if kind == "all_reduce") == 1
    assert not any(dtype == "bf16" for kind, dtype in collectives if kind == "reduce_scatter")


@pytest.mark.parametrize(
    "name",
    [
        "mixtral-8x7b",
        *(
            pytest.param(x, marks=pytest.mark.exhaustive)
            for x in ("llama-2-70b", "t5-small", "output gates")
        ),
    ],
)
@pytest.mark.slow
def test_pmap_does_as_shard_map(name):
    params = jax.tree.map(jnp.copy, random_params(model(name), 0.1))  # the state is consumed
    opt_state = optimizer(name).init(params)
    state = step.TrainState(jnp.int32(0), {}, params, opt_state, init_skip_state())
    update = make_pmap_train_step(Transformer(model(name)), optimizer(name))
    losses, gradients = [], None
    for batch in batches(name):
        state, metrics = update(state, jax.tree.map(lambda x: x[:, None], batch))
        gradients = jax.device_get(state.opt_state[0]) if gradients is None else gradients
        losses.append(float(metrics.loss))
    assert_same_training((losses, gradients, jax.device_get(state.params)), on_one_device(name))


class Dropping(nn.Module):
    part_of: str | None
    runtime: RuntimeConfig = RuntimeConfig(deterministic=False)

    @nn.compact
    def __call__(self, x):
        return apply_dropout(self, x, 0.5, axis_name=self.part_of)


@pytest.mark.slow
def test_devices_drop_other_parts_of_what_is_shared_out_and_the_same_of_what_all_have():
    mesh = make_mesh(MeshConfig(tensor=4), jax.devices()[:4])
    rngs = {"dropout": jax.random.key(0)}

    def dropped(part_of, spec):
        run = lambda x: Dropping(part_of).apply({}, x, rngs=rngs)  # noqa: E731
        program = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
        return np.asarray(jax.jit(program)(jnp.ones(256)))

    parts = dropped("tensor", P("tensor")).reshape(4, 64) > 0
    assert len(np.unique(parts, axis=0)) == 4 and 0.3 < parts.mean() < 0.7
    same = dropped(None, P())  # its type says that devices do not differ
    np.testing.assert_array_equal(same, Dropping(None).apply({}, jnp.ones(256), rngs=rngs))
