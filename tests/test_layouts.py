"""Whatever takes parameters gives the same with layers stacked and each by itself."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer import Transformer, generate, inspect, load_pretrained, save_pretrained, zoo
from jaxformer.config import GLU, LoRA, MoE, Router
from jaxformer.generation import (
    Beam,
    Conversation,
    decode_step,
    log_likelihoods,
    prefill,
    stream,
    unroll,
)
from jaxformer.interop import load_adapter, save_adapter
from jaxformer.interop.load import read_pretrained
from jaxformer.layers import empty_cache, layouts, merge_lora
from jaxformer.layers.cache import arrange_cache
from jaxformer.layers.layouts import arrange_layers, layout_of
from jaxformer.layers.lora import is_adapter
from jaxformer.layers.parameter_metadata import cast_parameters, check_parameters
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.training import train_step
from jaxformer.training.gradient import Objective, make_value_and_grad
from tests.small_models import BASE, jitted_forward, random_params
from tests.test_custom_options import texts

CONFIG = replace(zoo.get("gemma-2-2b").tiny(), num_layers=5)  # windows in turns, with a tail
TRAINED = ("decoder/layers/layer_1/feed_forward/down",)
ADAPTED = replace(CONFIG, adapter=LoRA(rank=2, targets=("query", "up"), dora=True, trained=TRAINED))
EXPERTS = MoE(expert=GLU(hidden_dim=6), num_experts=4, top_k=2, router=Router(selection_bias=True))
WITH_EXPERTS = replace(
    BASE, vocab_size=128, num_layers=4, feed_forward=(GLU(hidden_dim=10), *(EXPERTS,) * 3)
)  # after a dense layer
TOKENS = np.asarray([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]])
ROWS = [[3, 1, 4], [1, 5]]
MESH = make_mesh(MeshConfig(tensor=2), jax.devices()[:2])


def metric(logits):
    return jnp.mean(logits[..., -1, 3] - logits[..., -1, 5])


def cached(config, params):
    """Logits of tokens one by one, from a cache of the other layout at first."""
    other = {"stacked": "by_layer", "by_layer": "stacked"}[layout_of(params)]
    cache, logits = arrange_cache(config, empty_cache(config, (2,), 7), other), []
    apply = jax.jit(Transformer(config).apply)
    for part in (TOKENS[:, :3], TOKENS[:, 3:4], TOKENS[:, 4:5]):
        more, cache = apply({"params": params}, part, cache=cache)
        assert cache.layout == layout_of(params)
        logits.append(more)
    return logits


def prefilled_and_stepped(config, params):
    lengths = jnp.asarray([7, 4])
    logits, context = prefill(config, params, jnp.asarray(TOKENS), lengths, capacity=9, chunk=3)
    assert context.cache.layout == layout_of(params)
    return logits, decode_step(config, params, jnp.asarray([1, 2]), context)[0]


def answers(config, params):
    talk = Conversation(config, params, max_new_tokens=3)
    first = list(talk.answer([1, 2, 3]))
    return first, list(talk.answer([1, 2, 3, *first, 4]))


def scores(config, params, **options):
    requests = [([1, 2], [3, 4, 5]), ([7], [8])]
    return list(log_likelihoods(config, params, requests, max_length=8, **options))


def train_steps(config, params):
    model, batch = Transformer(config), jax.tree.map(jnp.asarray, texts())
    losses = train_step.make_eval_step(model, MESH)(params, batch)
    likelihoods = train_step.make_log_likelihood_step(model, MESH)(params, batch)
    params = jax.tree.map(jnp.copy, params)
    state = train_step.init_train_state(
        model, optax.sgd(0.1), jax.random.key(0), MESH, params=params
    )
    assert layout_of(state.params) == "stacked"
    check_parameters(config, state.params)
    return losses, likelihoods, state.params


def gradients(config, params):
    batch = jax.tree.map(jnp.asarray, texts())
    objective = Objective(load_balance=0.1, router_z_loss=0.1)
    gradient = make_value_and_grad(Transformer(config), MESH, objective=objective)
    loss, by_params = jax.jit(gradient)(params, {}, jnp.int32(0), batch)
    return loss, arrange_layers(config, by_params, "stacked")


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def saved(config, params, folder):
    save_pretrained(folder, config, params, max_shard_bytes=100_000)
    return bytes_of(folder)


def saved_adapter(config, params, folder):
    save_adapter(folder, config, params, base="base")
    return bytes_of(folder)


def read_adapter(config, params, folder):
    save_adapter(folder, config, random_params(config), base="base")
    base = {path: x for path, x in flatten_dict(params, sep="/").items() if not is_adapter(path)}
    adapted, read = load_adapter(
        folder, replace(config, adapter=None), unflatten_dict(base, sep="/")
    )
    assert adapted.adapter.trained == TRAINED and layout_of(read) == layout_of(params)
    return arrange_layers(adapted, read, "stacked")


def merged(config, params):
    plain, params = merge_lora(config, params)
    return arrange_layers(plain, params, "stacked")


def half(config, params):
    return arrange_layers(config, cast_parameters(config, params, jnp.bfloat16), "stacked")


def patched(config, params):
    patches = {
        inspect.At("heads", layer=(1, 4), head=2): inspect.Zero(),
        inspect.At("stream", layer=2, position=-1): inspect.Add(jnp.ones(config.model_dim)),
    }
    return inspect.run(config, params, TOKENS, patches=patches)


def lens(config, params):
    tuned, losses = inspect.train_tuned_lens(config, params, [TOKENS])
    return tuned, losses, inspect.logit_lens(config, params, TOKENS, tuned=tuned)


WRITERS = {"save_pretrained": saved, "save_adapter": saved_adapter, "load_adapter": read_adapter}
TAKING = {
    "apply": lambda config, params: jitted_forward(config)(params, TOKENS),
    "apply with a cache": cached,
    "cast_parameters": half,
    "merge_lora": merged,
    "generate": lambda *model: generate(*model, ROWS, max_new_tokens=4),
    "generate on a mesh": lambda *model: generate(*model, ROWS, max_new_tokens=4, mesh=MESH),
    "beams": lambda *model: generate(*model, ROWS, max_new_tokens=4, sampler=Beam(num_beams=2)),
    "stream": lambda *model: list(stream(*model, ROWS, max_new_tokens=4)),
    "Conversation": answers,
    "prefill and decode_step": prefilled_and_stepped,
    "log_likelihoods": scores,
    "log_likelihoods on a mesh": lambda *model: scores(*model, mesh=MESH),
    "training": train_steps,
    "gradients": gradients,
    "run": patched,
    "trace": lambda *model: inspect.trace(*model, TOKENS),
    "token_losses": lambda *model: inspect.token_losses(*model, TOKENS),
    "attention_maps": lambda *model: inspect.attention_maps(*model, TOKENS),
    "activation_patching": lambda *model: inspect.activation_patching(
        *model, TOKENS[:1], TOKENS[1:], metric
    ),
    "path_patching": lambda *model: inspect.path_patching(*model, TOKENS[:1], TOKENS[1:], metric),
    "ablate_heads": lambda *model: inspect.ablate_heads(*model, TOKENS, metric),
    "composition_scores": inspect.composition_scores,
    "lens": lens,
    "logit_attribution": lambda *model: inspect.logit_attribution(*model, TOKENS[0], 3),
    "activation_statistics": lambda *model: inspect.activation_statistics(*model, TOKENS),
    "residual_contributions": lambda *model: inspect.residual_contributions(*model, TOKENS),
    "gradient_statistics": lambda *model: inspect.gradient_statistics(*model, TOKENS),
}


@pytest.mark.parametrize("taking", TAKING)
@pytest.mark.slow(but=["apply", "cast_parameters"])
def test_either_layout_gives_the_same(taking, monkeypatch):
    monkeypatch.setattr(layouts, "MAX_COMPILED_LAYERS", 0)  # stacked parameters decode so
    config = {"merge_lora": ADAPTED, "gradients": WITH_EXPERTS}.get(taking, CONFIG)
    params = random_params(config)
    expected, result = (TAKING[taking](config, x) for x in (params, unroll(config, params)))
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5 * max(1, np.nanmax(np.abs(y))))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.slow
def test_either_layout_is_written_and_read_alike(writer, tmp_path):
    config = CONFIG if writer == "save_pretrained" else ADAPTED
    params = random_params(config)
    expected = WRITERS[writer](config, params, tmp_path / "stacked")
    result = WRITERS[writer](config, unroll(config, params), tmp_path / "by_layer")
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.slow
def test_a_folder_is_read_in_the_layout_that_decodes_faster(tmp_path, monkeypatch):
    """On a mesh as well; a program of training reads it stacked."""
    params = random_params(CONFIG)
    save_pretrained(tmp_path / "x", CONFIG, params)
    for options in ({}, {"mesh": MESH}):
        read = load_pretrained(tmp_path / "x", **options).params
        assert layout_of(read) == "by_layer"
        stacked = read_pretrained(tmp_path / "x", layout="stacked", **options).params
        for tree in (stacked, arrange_layers(CONFIG, read, "stacked")):
            jax.tree.map(np.testing.assert_array_equal, tree, params)
    monkeypatch.setattr(layouts, "target_platform", lambda: "tpu")
    assert layout_of(load_pretrained(tmp_path / "x").params) == "stacked"


def test_no_second_copy_is_made():
    """Each array is deleted once what is made of it is complete, an array at two places once."""
    params = random_params(CONFIG)
    given = unroll(CONFIG, params)
    layers = given["decoder"]["first_layers"]
    layers["layer_1"]["attention"] = layers["layer_0"]["attention"]  # of another block
    expected = arrange_layers(CONFIG, given, "stacked")
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))
    result = arrange_layers(CONFIG, given, "stacked", donate=True)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    alone = layers.pop("layer_4")  # the tail, which is passed on
    assert all(x.is_deleted() for x in jax.tree.leaves(layers))
    assert not any(x.is_deleted() for x in jax.tree.leaves(alone))


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [4, 6])
def test_layers_that_are_too_few_or_too_many_are_counted(num_layers):
    params = unroll(
        replace(CONFIG, num_layers=num_layers),
        random_params(replace(CONFIG, num_layers=num_layers)),
    )
    message = (
        rf"have {num_layers} layers \({num_layers} first layers, pattern of 0\), but .* 5 \(5 "
    )
    with pytest.raises(ValueError, match=message):
        Transformer(CONFIG).apply({"params": params}, TOKENS)
    with pytest.raises(ValueError, match="decoder/first_layers/layer_[45]/"):
        generate(CONFIG, params, ROWS, max_new_tokens=1)
