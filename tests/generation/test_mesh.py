"""Text that many devices continue together is that of one."""

import functools
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from jaxformer import zoo
from jaxformer.config import Differential, EncoderDecoder, Latent, SharedKV
from jaxformer.generation import Beam, Greedy, Sample, decode, decode_inputs, stream
from jaxformer.parallel import MeshConfig, abstract_parameters, make_mesh, shardings
from tests.small_models import LLAMA_VARIANTS, random_params

PROMPT = [[5, 1, 9, 3], [7], [2, 8, 6, 4, 5, 3]]
SOURCE = [[3, 9, 4], [1, 2, 3, 4, 5, 6], [8]]
KINDS = {
    "shared": SharedKV(num_heads=4, head_dim=16, windows=(6, None)),
    "differential": Differential(num_heads=8, num_kv_heads=4, head_dim=8, windows=(6, None)),
    "latent": Latent(
        num_heads=4, latent_dim=24, nope_dim=8, rope_dim=6, value_dim=10, windows=(6, None)
    ),
    "hybrid heads": LLAMA_VARIANTS["hybrid heads"].attention,
}
SAMPLERS = {
    "greedy": Greedy(),
    "sample": Sample(temperature=1.5, top_p=0.99, repetition_penalty=1.1),
    "beam": Beam(num_beams=3),
}


@functools.cache
def model(name):
    config = zoo.get("llama-2-70b" if name in KINDS else name).tiny()
    if name in KINDS:  # two rounds of two layers, and one more
        config = replace(config, num_layers=5, attention=KINDS[name])
    size = 0.7 if name == "t5-small" else 0.2  # so that they say more than one word again and again
    return config, random_params(config, size)


def mesh_of(devices=8, **sizes):
    return make_mesh(MeshConfig(**sizes), jax.devices()[:devices])


def request(config, sampler, new=7):
    rows = {"prompt": PROMPT}
    if isinstance(config.topology, EncoderDecoder):
        rows = {"prompt": [[1], [1], [1]], "source": SOURCE}
    return {**rows, "sampler": SAMPLERS[sampler], "key": jax.random.key(4), "max_new_tokens": new}


@functools.cache
def on_one_device(name, sampler):
    config, params = model(name)
    text = np.asarray(jaxformer.generate(config, params, **request(config, sampler)))
    assert len(np.unique(text[:, -7:])) > 5, "the text says nothing"
    return text


CASES = [
    ("llama-2-70b", "greedy", dict(tensor=4, data=2)),  # more devices than key-value heads
    ("mixtral-8x7b", "sample", dict(expert=2, tensor=2, data=2)),
    ("llama-4-scout", "greedy", dict(expert=2, tensor=2, data=2)),
    ("t5-small", "beam", dict(tensor=2, fsdp=2, data=2)),
    ("shared", "sample", dict(tensor=4, data=2)),
    ("differential", "greedy", dict(tensor=2, fsdp=2, data=2)),
    ("latent", "beam", dict(tensor=2, fsdp=2, data=2)),
    ("bamba-9b", "greedy", dict(tensor=4, data=2)),  # more devices than key heads
    ("hybrid heads", "beam", dict(tensor=2, fsdp=2, data=2)),
    ("rwkv-4-169m", "beam", dict(tensor=4, data=2)),
]
MORE = [
    ("llama-2-70b", "sample", dict(fsdp=2, tensor=2, data=2)),
    ("llama-2-70b", "beam", dict(tensor=2, data=4)),
    ("gemma-2-2b", "sample", dict(tensor=2, fsdp=4)),
    ("bloom-560m", "sample", dict(tensor=4, data=2)),
    ("transformer-base", "sample", dict(tensor=4, data=2)),
    ("llama-2-70b", "greedy", dict(context=4, tensor=2)),  # context does the same work again
]
LOOP, APART = "a loop", "layers of their own"
OFTEN = [(CASES[0], LOOP), *((case, APART) for case in CASES)]
SELDOM = [*((case, LOOP) for case in CASES[1:]), *product(MORE, (LOOP, APART))]
ALL = [*OFTEN, *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in SELDOM)]


def label(part):
    return part if isinstance(part, str) else "-".join((*part[:2], *part[2]))


@pytest.mark.parametrize("case, form", ALL, ids=label, indirect=["form"])
@pytest.mark.slow
def test_tokens_are_those_of_one_device(case, form):
    name, sampler, sizes = case
    config, params = model(name)
    actual = jaxformer.generate(config, params, mesh=mesh_of(**sizes), **request(config, sampler))
    np.testing.assert_array_equal(actual, on_one_device(name, sampler))


@pytest.mark.slow
def test_tokens_stream_from_a_mesh_and_prompts_are_read_in_chunks(form):
    config, params = model("llama-2-70b")
    expected = on_one_device("llama-2-70b", "greedy")
    options = request(config, "greedy") | {"mesh": mesh_of(tensor=2, data=4), "prefill_chunk": 2}
    tokens = np.stack(list(stream(config, params, **options)), axis=-1)
    for row, prompt, whole in zip(tokens, PROMPT, expected, strict=True):
        np.testing.assert_array_equal(row, whole[len(prompt) : len(prompt) + 7])
    alone = np.asarray(
        jaxformer.generate(config, params, PROMPT[0], mesh=options["mesh"], max_new_tokens=7)
    )
    np.testing.assert_array_equal(alone, expected[0, : len(PROMPT[0]) + 7])


@pytest.mark.slow
def test_no_device_needs_room_for_the_whole_model():
    """Parameters, caches and everything between them, as the compiler counts it."""
    config = zoo.get("llama-2-70b").tiny()
    heads = replace(config.attention, num_kv_heads=config.attention.num_heads)
    config = replace(config, num_layers=24, attention=heads)
    mesh = mesh_of(tensor=4, fsdp=2)
    shapes = abstract_parameters(config, mesh)
    blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    params = jax.device_put(blank, shardings(shapes))
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    for device in mesh.devices.flat:
        held = sum(
            shard.data.nbytes
            for x in jax.tree.leaves(params)
            for shard in x.addressable_shards
            if shard.device == device
        )
        assert held < whole / 6
    plan = decode.DecodeConfig(config, 4, None, jnp.dtype(jnp.float32), mesh)
    prompts = decode.make_request(config, [[1, 2]] * 2, max_new_tokens=4)
    key = jax.random.key(0)
    lowered = decode.decode_tokens.lower(
        plan, *decode_inputs.shard_inputs(mesh, config, params, prompts, key)
    )
    memory = lowered.compile().memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < whole / 3


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_is_refused():
    config, params = model("llama-2-70b")
    with pytest.raises(ValueError, match=r"num_heads 4 is not divisible by tensor 8"):
        jaxformer.generate(config, params, PROMPT, max_new_tokens=2, mesh=mesh_of(tensor=8))
