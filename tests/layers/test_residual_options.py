"""What holds of every residual option: a row of `CONFIGS` for each, with those of one's own."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer import Transformer, costs, inspect
from jaxformer import config as c
from jaxformer.config import TransformerConfig, from_json, to_json
from jaxformer.generation import unroll
from jaxformer.inspect import At, Replace
from jaxformer.layers import empty_cache
from jaxformer.parallel import abstract_parameters
from tests.small_models import jitted_forward, random_params, rounding_error
from tests.test_custom_options import after_a_step, texts
from tests.test_custom_residual import LLAMA, DenseFormer, Highway, LayerScale, TwoStreams


def of(option, **fields):
    return replace(LLAMA, **{"residual": option, "num_layers": 3, **fields})


CONFIGS = {
    "own, serial": of(LayerScale()),
    "own, sandwich": of(Highway(), norm_placement="sandwich"),
    "own, parallel": of(LayerScale(), block="parallel"),
    "own, norm after the sum": of(Highway(), block="parallel", norm_placement="post"),
    "own, one norm": of(LayerScale(), block="parallel_shared_norm"),
    "own, streams": of(TwoStreams()),
    "own, streams, parallel": of(TwoStreams(), block="parallel"),
    "own, history": of(DenseFormer()),
    "hyper-connections": of(c.HyperConnections()),
    "hyper-connections, fixed": of(c.HyperConnections(num_streams=3, dynamic=False)),
    "manifold": of(c.ManifoldHyperConnections(num_streams=3, iterations=5)),
    "manifold, mean": of(c.ManifoldHyperConnections(num_streams=2, output="mean")),
    "manifold, in a loop": of(c.ManifoldHyperConnections(), loop=c.Loop(passes=2, start=1)),
    "identity": of(c.IdentityHyperConnections(num_streams=3, magnitude=2.0)),
    "gated streams": of(c.GatedStreams(num_streams=3, rank=5), final_norm=False),
    "embedding skip": of(c.EmbeddingSkip()),
    "dense": of(c.DepthWeightedAverage(num_layers=3)),
    "skips": of(c.UNetSkips(num_layers=4), num_layers=4),
    "skips, odd": of(c.UNetSkips(num_layers=3)),
    "attention": of(c.AttentionResiduals(num_layers=3, block_layers=2)),
    "attention, parallel": of(
        c.AttentionResiduals(num_layers=3, block_layers=1), block="parallel_shared_norm"
    ),
    "value residual": of(
        None, attention=(LLAMA.attention, *(replace(LLAMA.attention, value_residual=True),) * 2)
    ),
    "altup": of(c.AltUp(num_streams=3)),
    "altup, laurel": of(c.AltUp(num_streams=2, branches=c.Laurel(rank=5))),
    "altup, embeddings of layers": of(
        c.AltUp(num_streams=3, branches=c.Laurel(rank=5), layer_embedding=c.OtherStreams()),
        layer_embedding=c.LayerEmbedding(dim=4, vocab_size=20),
        feed_forward=(c.GLU(hidden_dim=8, sparsity=0.6), c.GLU(hidden_dim=8), c.MLP(hidden_dim=8)),
    ),
    "layer scale": of(c.BranchScale(start=0.5)),
    "rezero": of(c.BranchScale(over="branch"), block="parallel_shared_norm"),
    "gate": of(c.ResidualGate(), norm_placement="sandwich"),
    "scaling": of(c.ResidualScaling()),
    "interpolation": of(c.SphericalInterpolation(), final_norm=False),
    "laurel": of(c.Laurel(rank=5)),
}
SELDOM = (  # another like each is among the slow tests
    *("own, sandwich", "own, norm after the sum", "own, streams, parallel"),
    *("hyper-connections, fixed", "manifold, mean", "skips, odd", "attention, parallel"),
    *("altup", "layer scale", "rezero", "scaling", "laurel"),
)
by_option = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=pytest.mark.exhaustive if name in SELDOM else ())
        for name, config in CONFIGS.items()
    ],
)


@by_option
@pytest.mark.slow(but=["identity"])
def test_in_a_loop_unrolled_with_a_cache_and_packed(config):
    """Also recomputed in the backward pass, and without stacked parameters."""
    batch, params, run = texts(), random_params(config), jitted_forward(config)
    tokens, segments, positions = (x[:2] for x in (batch.tokens, batch.segments, batch.positions))
    packed = np.asarray(run(params, tokens, positions=positions, segments=segments))
    whole = run(params, tokens)
    bound = 3 * rounding_error(run, params, tokens)

    def close(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)

    close(jitted_forward(config, scan=False)(params, tokens), whole)
    close(run(unroll(config, params), tokens), whole)
    length, cache = tokens.shape[1], empty_cache(config, (2,), tokens.shape[1])
    for split in (slice(0, length - 5), slice(length - 5, length)):
        logits, cache = run(params, tokens[:, split], cache=cache)
        close(logits, whole[:, split])
    for row in range(2):
        start = int((segments[row] == 1).sum())
        alone = run(params, np.roll(tokens[row : row + 1], -start, axis=1))
        close(packed[row, start:], np.asarray(alone)[0, : length - start])


@by_option
@pytest.mark.slow
def test_it_trains_on_eight_devices_as_on_one(config):
    actual = after_a_step(config, (("fsdp", 2), ("tensor", 2), ("context", 2)))
    expected = after_a_step(config, (("data", 1),))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    # Of hyper-connections, parameters moved by half of their last place move the step by 2e-4.
    bound = 2e-4 if config.residual and config.residual.in_float32 else 2e-5
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=bound), actual[1], expected[1])


@by_option
@pytest.mark.slow(but=["manifold", "dense", "value residual"])
def test_it_is_counted_and_printed(config):
    params = random_params(config)
    assert costs.num_parameters(config) == sum(x.size for x in jax.tree.leaves(params))
    assert from_json(TransformerConfig, to_json(config)) == config
    own = {x.__name__: x for x in (LayerScale, Highway, TwoStreams, DenseFormer)}
    assert eval(repr(config), {**vars(c), **own}) == config


AS_A_SUM = "hyper-connections", "hyper-connections, fixed", "manifold", "manifold, mean", "identity"


@pytest.mark.parametrize("name", AS_A_SUM)
@pytest.mark.slow
def test_streams_begin_as_the_sum(name):
    """All streams are alike at first, and the final norm does not see how many there are."""
    config, tokens = CONFIGS[name], texts().tokens[:2, :9]
    plain, its = (
        jax.jit(Transformer(x).init)(jax.random.key(0), tokens)["params"]
        for x in (of(None), config)
    )
    # Random kernels, which streams alike need to become different, move them by a hundredth.
    kernels = [k for k in flatten_dict(its) if k[-1] == "kernel" and "residual" in k[-2]]
    its = flatten_dict(its) | {k: 0 * flatten_dict(its)[k] for k in kernels}
    expected = jitted_forward(of(None))(plain, tokens)
    actual = jitted_forward(config)(unflatten_dict(its), tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.slow
def test_a_lens_reads_what_the_end_makes_of_streams_and_each_stream_has_a_name():
    config, tokens = CONFIGS["own, streams"], texts().tokens[:1, :7]
    params = random_params(config)
    logits = inspect.logit_lens(config, params, tokens)
    np.testing.assert_allclose(logits[-1], jitted_forward(config)(params, tokens), atol=1e-5)
    run = inspect.run(config, params, tokens)
    for i in range(2):
        np.testing.assert_array_equal(
            run.values[f"stream_{i}"][1], run.values["stream"][1][..., i, :]
        )
    other = inspect.run(config, random_params(config, 0.5), tokens)
    by_name = {At("stream_1", layer=1): Replace(other)}
    by_axis = {At("stream", layer=1, head=1): Replace(other)}
    one, two = (inspect.run(config, params, tokens, patches=x).logits for x in (by_name, by_axis))
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - run.logits).max() > 1e-3


def gradient_bytes(option, remat):
    """Temporary memory of a gradient, in streams of a layer: rows x tokens x width numbers."""
    config = of(option, num_layers=16)
    model, rows, length = Transformer(config, remat=remat), 4, 128
    loss = lambda params, tokens: model.apply({"params": params}, tokens).var()  # noqa: E731
    tokens = jax.ShapeDtypeStruct((rows, length), "int32")
    compiled = jax.jit(jax.grad(loss)).lower(abstract_parameters(config, None), tokens).compile()
    bytes_of_a_stream = 4 * rows * length * config.model_dim
    return compiled.memory_analysis().temp_size_in_bytes / bytes_of_a_stream


ONCE = {  # and what it may add: where each layer kept its history, 16 * 16 or 2 * 16 * 8 at least
    "embedding skip": (c.EmbeddingSkip(), 5),
    "dense": (c.DepthWeightedAverage(num_layers=16), 3.5 * 16),
    "attention": (c.AttentionResiduals(num_layers=16, block_layers=2), 2 * 16 + 14 * 8),
}


@pytest.mark.parametrize("option, most", ONCE.values(), ids=ONCE)
@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.slow
def test_memory_has_the_history_once(option, most, remat):
    assert gradient_bytes(option, remat) - gradient_bytes(None, remat) < most


def test_costs_of_a_history():
    plain, tokens, width = of(None, num_layers=4), 10, LLAMA.model_dim
    work = {  # multiplications and additions, and numbers that are saved, of a token and feature
        c.EmbeddingSkip(): (0, 0),
        c.DepthWeightedAverage(num_layers=4): (4 * 2 * 4, 2 * 4),
        c.AttentionResiduals(num_layers=4, block_layers=2): (4 * 2 * 4 * 3, 4 * 2 + 7 * 2),
    }
    for option, (flops, saved) in work.items():
        config = replace(plain, residual=option)
        added = costs.forward_flops(config, tokens) - costs.forward_flops(plain, tokens)
        assert added == flops * tokens * width, option
        kept = (costs.activation_bytes(x, 1, tokens, bytes_per_number=1) for x in (config, plain))
        assert int.__sub__(*kept) == saved * tokens * width, option
    altup = replace(plain, residual=c.AltUp(num_streams=3))
    added = costs.forward_flops(altup, tokens) - costs.forward_flops(plain, tokens)
    assert added == 2 * tokens * (4 * width**2 + 4 * (3 * width + 27 + 9))
