"""Parameters that stay float32 in a model of bfloat16: read, saved and adapted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

from jaxformer import config as c
from jaxformer import load_pretrained, save_pretrained, zoo
from jaxformer.layers import Transformer
from jaxformer.layers.layouts import arrange_layers
from jaxformer.layers.lora import cast_frozen
from jaxformer.layers.parameter_metadata import parameter_metadata
from jaxformer.layers.parameters import storage_dtype
from jaxformer.layers.transformer import annotated_parameters
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.parallel.memory import estimate_memory
from jaxformer.training.train_step import init_train_state
from tests.small_models import jitted_forward, random_params

ROUNDED = (  # read in float32, but of bfloat16 in the files of released models
    *("norm/scale", "norm/bias", "convolution/kernel", "convolution/bias"),
    *("query/bias", "key/bias", "value/bias", "out/bias", "gate/bias", "up/bias", "down/bias"),
    *("head/bias", "relative_bias/embedding", "content_bias/bias", "position_bias/bias"),
    *("shift/key", "shift/value", "shift/receptance"),
    *("relative/kernel", "feed_forward/alpha_n", "feed_forward/alpha_p"),
)
LLAMA = zoo.get("llama-2-7b").tiny()
WITHOUT_FAMILY = {
    "fire": replace(LLAMA, attention=replace(LLAMA.attention, positions=(c.Fire(),))),
    "hyper-connections": replace(LLAMA, residual=c.HyperConnections()),
}
GLM = zoo.get("glm-4.5").tiny()
BIAS = "decoder/layers/layer_0/feed_forward/selection_bias"


@pytest.fixture(scope="module")
def params():
    """GLM 4.5's parameters, exact in bfloat16 but for a selection bias as in its release."""
    leaves = flatten_dict(jax.tree.map(np.asarray, random_params(GLM)), sep="/")
    leaves = {k: x.astype(ml_dtypes.bfloat16).astype(np.float32) for k, x in leaves.items()}
    noise = np.random.default_rng(0).uniform(-0.12, 0.12, leaves[BIAS].shape)
    leaves[BIAS] = (6.94 + noise).astype(np.float32)
    return leaves


@pytest.mark.parametrize(
    "name",
    [
        *("gpt-oss-20b", "deepseek-v3", "gemma-4-26b-a4b", "bamba-9b", "bloom-176b", "gopher-280b"),
        *("apertus-8b", "rwkv-4-169m", *WITHOUT_FAMILY),
    ],
)
@pytest.mark.slow(but=["hyper-connections"])
def test_a_parameter_that_is_read_in_float32_stays_so_or_is_known_to_be_rounded(name):
    config = WITHOUT_FAMILY.get(name) or zoo.get(name).tiny()
    boxes = annotated_parameters(config, jnp.dtype(jnp.bfloat16))
    for path, box in boxes.items():
        is_wide = storage_dtype(path, jnp.bfloat16) == jnp.float32
        assert is_wide != path.endswith(ROUNDED) or box.dtype == jnp.bfloat16, path
        assert not is_wide or box.dtype == jnp.float32, path


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_FAMILY)
def test_a_frozen_base_computes_as_its_float32_parameters(name):
    """Of what is not a kernel nothing is rounded, so that it changes no logit."""
    config = WITHOUT_FAMILY[name]
    leaves = flatten_dict(jax.tree.map(np.asarray, random_params(config)), sep="/")
    exact = {
        path: x.astype(ml_dtypes.bfloat16).astype(np.float32)
        if path.endswith(("kernel", "embedding", "scale")) and "relative_bias" not in path
        else x
        for path, x in leaves.items()
    }
    frozen = cast_frozen(c.LoRA(rank=2, base_dtype="bfloat16"), unflatten_dict(exact, sep="/"))
    tokens = np.arange(12)[None]
    of_frozen, expected = (
        jitted_forward(config)(params, tokens)
        for params in (frozen, unflatten_dict(exact, sep="/"))
    )
    np.testing.assert_array_equal(of_frozen, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.slow(but=["bfloat16"])
def test_a_folder_keeps_the_selection_bias(params, dtype, tmp_path):
    save_pretrained(tmp_path / "saved", GLM, unflatten_dict(params, sep="/"), dtype=dtype)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    wide = {name for name, x in stored.items() if x.dtype == np.float32}
    assert {name.partition(".mlp.")[2] for name in wide} == {
        "gate.weight",
        "gate.e_score_correction_bias",
    }
    _, read = load_pretrained(tmp_path / "saved", dtype)
    read = flatten_dict(arrange_layers(GLM, read, "stacked"), sep="/")
    assert read[BIAS].dtype == np.float32
    np.testing.assert_array_equal(read[BIAS], params[BIAS])
    assert read["head/kernel"].dtype == dtype
    save_pretrained(tmp_path / "again", GLM, unflatten_dict(read, sep="/"))
    for file in ("model.safetensors", "config.json"):
        first, second = (tmp_path / folder / file for folder in ("saved", "again"))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_a_frozen_base_keeps_the_selection_bias_and_memory_counts_it(params):
    config = replace(GLM, adapter=c.LoRA(rank=2, base_dtype="bfloat16"))
    base = jax.tree.map(jnp.array, unflatten_dict(params, sep="/"))  # which is donated
    model, mesh = Transformer(config), make_mesh(MeshConfig(), jax.devices()[:1])
    state = init_train_state(model, optax.sgd(1.0), jax.random.key(0), mesh, params=base)
    frozen = flatten_dict(state.frozen, sep="/")
    assert frozen.keys() == params.keys()
    np.testing.assert_array_equal(frozen[BIAS], params[BIAS])
    assert frozen["head/kernel"].dtype == jnp.bfloat16
    adapters = [x.shape for x in flatten_dict(parameter_metadata(config)).values()]
    sizes = sum(map(np.prod, adapters)) - sum(x.size for x in params.values())
    expected = sum(x.nbytes for x in frozen.values()) + 4 * sizes
    assert estimate_memory(config, {}, batch_size=1, length=8).parameters == expected
