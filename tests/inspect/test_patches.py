"""Patched runs: against other runs, changed parameters and the arithmetic of each change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import inspect
from jaxformer.config import (
    RGLRU,
    ChannelMixing,
    Decay,
    Encoder,
    EncoderDecoder,
    Latent,
    LinearAttention,
    SelectiveScan,
    SharedKV,
    ShortConvolution,
    SlopeDecay,
    TimeMixing,
)
from jaxformer.inspect import Add, At, Mean, Replace, Zero
from jaxformer.inspect.patched_run import run_bound
from tests.small_models import random_params
from tests.test_layer_patterns import MIXED, ONE_BRANCH

LATENT = Latent(num_heads=4, latent_dim=9, nope_dim=6, rope_dim=4, value_dim=5)
LINEAR = LinearAttention(num_heads=4, num_key_heads=2, key_dim=6, value_dim=5, decay=SlopeDecay())
MODELS = {
    "multi_head": {},
    "one_norm": {"block": "parallel_shared_norm", "norm_placement": "sandwich"},
    "decay": {"attention": Decay(num_heads=4, head_dim=6)},
    "shared_kv": {"attention": SharedKV(num_heads=4, num_kv_heads=2, head_dim=6)},
    "latent": {"attention": LATENT},
    "linear": {"attention": LINEAR},
    "scan": {"attention": SelectiveScan(width=12, step_rank=3, state_dim=5)},
    "rwkv": {"attention": (TimeMixing(width=12), ChannelMixing(hidden_dim=9)), "num_layers": 4},
    "rg_lru": {"attention": RGLRU(num_heads=4, head_dim=5)},
    "convolution": {"attention": ShortConvolution(num_heads=4, head_dim=5, width=3)},
    "encoder": {"topology": Encoder()},
    "encoder_decoder": {"topology": EncoderDecoder(num_encoder_layers=2)},
}
DEEP = {"mixed": MIXED, "one_branch": ONE_BRANCH}  # layers before, in and after the scan


@pytest.fixture(params=[*MODELS, *DEEP])
def model(request, build):
    if request.param in MODELS:
        return build(**MODELS[request.param])
    config = DEEP[request.param]
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 128, (2, 7)))
    return config, random_params(config), tokens, {}


def other_tokens(config, tokens):
    return (tokens + 5) % config.vocab_size


@pytest.mark.slow
def test_values_of_the_run_itself_change_no_bit(model):
    config, params, tokens, inputs = model
    run = inspect.run(config, params, tokens, **inputs)
    assert list(run.values) == sorted({name.name for name in inspect.names(config)})
    patches = {name: Replace(run) for name in run.values}
    same = inspect.run(config, params, tokens, patches=patches, **inputs)
    jax.tree.map(np.testing.assert_array_equal, same, run)
    plain = inspect.trace(config, params, tokens, **inputs).logits
    np.testing.assert_allclose(run.logits, plain, atol=5e-5)  # another program rounds otherwise


@pytest.mark.slow
def test_the_stream_of_another_run_gives_its_logits(model):
    config, params, tokens, inputs = model
    other = inspect.run(config, params, other_tokens(config, tokens), **inputs)
    layers = other.values["stream"]
    for layer in (0, len(layers) - 1):
        for value in (other, layers[layer]):
            patches = {At("stream", layer=layer): Replace(value)}
            run = inspect.run(config, params, tokens, patches=patches, **inputs)
            np.testing.assert_allclose(run.logits, other.logits, atol=2e-6)
    own = inspect.trace(config, params, tokens, **inputs).logits
    assert float(jnp.abs(own - other.logits).max()) > 0.1


@pytest.mark.slow
def test_a_silent_head_has_no_rows_in_the_output_projection(model):
    config, params, tokens, inputs = model
    layers = inspect.run(config, params, tokens, **inputs).values["heads"]
    for layer in {min(layers), max(layers)}:
        patches = {At("heads", layer=layer, head=1): Zero()}
        run = inspect.run(config, params, tokens, patches=patches, record=(), **inputs)
        silent = without_rows(config, params, layer, head=1)
        logits = inspect.trace(config, silent, tokens, **inputs).logits
        np.testing.assert_allclose(run.logits, logits, atol=1e-5)
        own = inspect.trace(config, params, tokens, **inputs).logits
        assert float(jnp.abs(own - logits).max()) > 1e-3


def without_rows(config, params, layer, head):
    """Parameters whose output projection does not read a head of a layer."""
    stack = next(reversed(config.stacks))
    block, repeat = config.segments(stack).locate(layer)
    rows = (*repeat, head)

    def changed(path, x):
        here = jax.tree_util.keystr(path, simple=True, separator="/")
        return x.at[rows].set(0) if here == f"{stack}/{block}/attention/out/kernel" else x

    return jax.tree_util.tree_map_with_path(changed, params)


def test_a_value_is_changed_at_its_place_alone(build):
    config, params, tokens, _ = build()
    run = inspect.run(config, params, tokens, record=["heads", "stream"])
    heads, stream = np.asarray(run.values["heads"][1]), np.asarray(run.values["stream"][2])
    ones, rows = np.ones((2, 3, 6), np.float32), np.arange(2.0)[:, None] * np.ones((2, 6))
    direction = np.linspace(-1, 1, 14)
    cases = [
        (At("heads", layer=1, position=(0, -1, 3), head=2), Replace(ones), (heads, 1.0)),
        (At("heads", layer=1, position=4, head=(3, 0)), Zero(), (heads, 0.0)),
        (At("heads", layer=1, position=4, head=3), Replace(rows), (heads, rows)),
        (At("heads", layer=1, head=0), Mean(), (heads, np.mean(heads[:, :, 0], axis=(0, 1)))),
        (At("stream", layer=2, position=5), Add(direction), (stream, stream[:, 5] + direction)),
        (At("stream", layer=2), Mean(), (stream, np.mean(stream, axis=(0, 1)))),
    ]
    for at, change, (before, after) in cases:
        patched = inspect.run(config, params, tokens, patches={at: change}).values[at.name]
        expected = np.array(before)
        for position in np.atleast_1d(np.arange(7) if at.position is None else at.position):
            if at.name == "heads":
                for head in np.atleast_1d(at.head):
                    expected[:, position, head] = after
            else:
                expected[:, position] = after
        np.testing.assert_allclose(patched[at.layer], expected, atol=1e-6)
        np.testing.assert_array_equal(patched[0], run.values[at.name][0])


@pytest.mark.slow
def test_places_and_values_are_not_compiled_again(build):
    config, params, tokens, _ = build(num_layers=5)
    other = inspect.run(config, params, tokens, record=["heads"])
    run_bound.clear_cache()
    for layer, head, number in ((0, 1, 0.0), (4, 3, 1.0), (2, 0, -7.5)):
        patches = {
            At("heads", layer=layer, head=head): Replace(np.full(6, number, np.float32)),
            At("stream", layer=layer, position=head): Add(np.full(14, number, np.float32)),
            At("query", layer=layer): Replace(number),
        }
        inspect.run(config, params, tokens, patches=patches, record=())
    assert run_bound._cache_size() == 1
    for head in range(2):
        inspect.run(config, params, tokens, patches={At("heads", head=head): Replace(other)})
    assert run_bound._cache_size() == 2


@pytest.mark.slow
def test_a_direction_has_a_gradient(build):
    config, params, tokens, _ = build()

    @jax.jit
    @jax.grad
    def gradient(size):
        direction = size * jnp.ones(14)
        run = inspect.run(config, params, tokens, patches={At("stream", layer=0): Add(direction)})
        return jnp.sum(run.logits**2)

    def loss(size):
        patches = {At("stream", layer=0): Add(np.full(14, size, np.float32))}
        return np.sum(np.float64(inspect.run(config, params, tokens, patches=patches).logits) ** 2)

    np.testing.assert_allclose(gradient(0.3), (loss(0.303) - loss(0.297)) / 0.006, rtol=1e-3)


@pytest.mark.slow
def test_names_have_layers_and_shapes(build):
    config, *_ = build(topology=EncoderDecoder(num_encoder_layers=2))
    rows = {row.name: row[1:] for row in inspect.names(config)}
    assert rows["embeddings"] == (None, ("T", 14)) and rows["stream"] == ((0, 1, 2), ("T", 14))
    assert rows["heads"] == ((0, 1, 2), ("T", 4, 6)) and rows["hidden"] == ((0, 1, 2), ("T", 11))
    assert rows["cross_key"] == ((0, 1, 2), ("S", 2, 6))
    assert rows["encoder/query"] == ((0, 1), ("S", 4, 6))
    ragged = [row[1:] for row in inspect.names(MIXED) if row.name == "heads"]
    assert ragged == [((0,), ("T", 2, 8)), ((1, 2, 3, 4, 5), ("T", 4, 4))]


@pytest.mark.slow
def test_patches_that_do_not_fit_are_refused(build):
    config, params, tokens, _ = build()
    short = inspect.run(config, params, tokens[:, :3])
    bare = inspect.run(config, params, tokens, record=["stream"])
    wrong = [
        ({"thoughts": Zero()}, r"no value 'thoughts'; it has embeddings, stream, .*final_normed"),
        (
            {At("stream", layer=3): Zero()},
            r"At.* layers that have 'stream', of \[0, 1, 2\]; got \[3\]",
        ),
        ({At("embeddings", layer=0): Zero()}, r"outside the layers: leave out layer; got \[0\]"),
        ({At("stream", layer=()): Zero()}, r"'stream', of \[0, 1, 2\]; got \[\]"),
        ({At("stream", position=(2, 7)): Zero()}, r"position of .* in \[-7, 6\]; got \(2, 7\)"),
        ({At("heads", head=4): Zero()}, r"head of .* in \[0, 3\]; got \(4,\)"),
        ({At("key", head=()): Zero()}, r"head of .* in \[0, 1\]; got \(\)"),
        ({At("hidden", head=1): Zero()}, "'hidden' has no heads.*: query, key, value, heads"),
        ({At("stream", layer=1.5): Zero()}, "layer must be an integer or .*; got 1.5"),
        (
            {At("heads", layer=1): Zero(), At("heads", head=2, position=-1): Mean()},
            r"Two patches change one place: At.*layer=1.* and At.*head=2",
        ),
        (
            {At("heads", layer=1, head=0): Replace(np.ones((7, 2)))},
            r"Replace must broadcast to \(2, 7, 6\), the shape of At.*; got \(7, 2\)",
        ),
        ({At("stream", position=0): Add(np.ones((1, 1, 1, 14)))}, r"\(2, 14\), the shape of"),
        ({"heads": Replace(bare)}, r"has recorded stream; .*record=\['heads'\]"),
        ({"heads": Replace(short)}, r"has shape \(2, 7, 4, 6\), in the run .* \(2, 3, 4, 6\)"),
        ({"heads": Add(bare)}, "Add takes an array; got a ModelRun"),
        ({"heads": 0.0}, "Replace, Zero, Mean or Add; got 0.0 at At"),
    ]
    for patches, message in wrong:
        with pytest.raises(ValueError, match=message):
            inspect.run(config, params, tokens, patches=patches)
    with pytest.raises(ValueError, match="no value 'logits'; it has embeddings"):
        inspect.run(config, params, tokens, record=["logits"])
    apart = {At("heads", layer=1): Zero(), At("heads", layer=0, head=2): Mean()}
    inspect.run(config, params, tokens, patches=apart, record=())
