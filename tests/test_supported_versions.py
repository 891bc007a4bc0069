"""What must work on every supported JAX, Flax and Python; `.ci/run` asks the oldest and newest."""

import importlib
import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from jaxformer import Transformer, config, functional, generate, inspect, zoo
from jaxformer.parallel import abstract_parameters

ROOT = Path(jaxformer.__file__).parents[1]
TEXT = jnp.array([[5, 93, 17, 61, 2, 29, 44]])
SOURCE = jnp.array([[8, 71, 30, 12, 99]])
LATENT = config.Latent(num_heads=4, latent_dim=8, nope_dim=6, rope_dim=4, value_dim=6)
KINDS = {  # a decoder of each kind of attention and feed-forward, an encoder with a decoder
    "learned positions": zoo.get("gpt-2-small").tiny(),
    "rotary, grouped heads": zoo.get("llama-3.1-8b").tiny(),
    "windows, soft caps": zoo.get("gemma-2-2b").tiny(),
    "experts": zoo.get("mixtral-8x7b").tiny(),
    "latent": replace(zoo.get("llama-3.1-8b").tiny(), attention=LATENT),
    "encoder and decoder": zoo.get("t5-small").tiny(),
}
pytestmark = pytest.mark.versions


def parameters(choice):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype),
        abstract_parameters(choice, None),
    )


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def model(request):
    two = isinstance(request.param.topology, config.EncoderDecoder)
    return request.param, parameters(request.param), {"source": SOURCE} if two else {}


def test_every_module_is_imported():
    names = [m.name for m in pkgutil.walk_packages(jaxformer.__path__, "jaxformer.")]
    others = ("__main__", "lm_eval_harness")  # programs; the extra eval
    modules = [importlib.import_module(n) for n in names if not n.endswith(others)]
    assert functional in modules and len(modules) > 100


def test_each_kind_of_model_has_finite_losses_and_gradients(model):
    choice, params, more = model

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        logits = Transformer(choice).apply({"params": params}, TEXT[:, :-1], **more)
        return functional.cross_entropy(logits, TEXT[:, 1:])

    value, slopes = loss(params)
    assert 0.0 < value < 100.0
    slopes = jax.tree.leaves(slopes)
    assert all(bool(np.all(np.isfinite(x))) for x in slopes)
    assert sum(bool(np.any(x != 0)) for x in slopes) > 0.8 * len(slopes)


def test_each_kind_of_model_generates_from_its_cache_what_it_says_of_the_whole_text(model):
    choice, params, more = model
    actual = generate(choice, params, TEXT, max_new_tokens=3, **more)
    logits = Transformer(choice).apply({"params": params}, actual[:, :-1], **more)
    best = jnp.argmax(logits[..., : choice.vocab_size], axis=-1)
    np.testing.assert_array_equal(actual[:, 7:], best[:, 6:])


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_narrow_numbers_are_attended_to_with_grouped_heads(name):
    rng = np.random.default_rng(0)
    query, key = (np.float32(rng.normal(size=(2, 9, n, 8))) for n in (6, 2))
    exact = functional.dot_product_attention(query, key, key)
    actual = functional.dot_product_attention(
        query.astype(name), key.astype(name), key.astype(name)
    )
    assert actual.dtype == name
    np.testing.assert_allclose(actual.astype(jnp.float32), exact, atol=0.03)


def test_attention_maps_are_seen():
    llama = KINDS["rotary, grouped heads"]
    maps = inspect.attention_maps(llama, parameters(llama), TEXT).decoder
    np.testing.assert_allclose(np.sum(maps, axis=-1), 1.0, atol=1e-5)


def test_a_saved_model_is_read_again(tmp_path):
    llama = KINDS["rotary, grouped heads"]
    params = parameters(llama)
    jaxformer.save_pretrained(tmp_path / "out", llama, params)
    again = jaxformer.load_pretrained(tmp_path / "out")
    pair = (jaxformer.generation.unroll(llama, x) for x in (params, again.params))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool(np.all(x == y)), *pair))


def test_the_command_line_trains_saves_and_goes_on(tmp_path):
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    command = [sys.executable, "-W", "error::DeprecationWarning:jaxformer"]
    command += ["-m", "experiments.pretrain", "tiny", "--batch-size", "2", "--devices", "1"]
    command += ["--corpus", "TextFiles(path='corpus.txt')", "--length", "16", "--output", "out"]
    command += ["--cache", "cache", "--sample-tokens", "2", "--scan"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # it compiles far more than it runs
    output = ""
    for more in (["--steps", "3"], ["--steps", "5", "--resume"]):
        done = subprocess.run(
            [*command, *more], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        output += done.stdout
    assert "Sample:" in output
    assert {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()} >= {"3", "5"}
