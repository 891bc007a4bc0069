"""Low-rank adapters: their formula, merging, what training changes, and meshes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer import config as c
from jaxformer import costs, parallel, zoo
from jaxformer.data import Batch
from jaxformer.layers import Transformer, merge_lora
from jaxformer.layers.lora import is_adapter, join_parameters
from jaxformer.layers.parameter_metadata import parameter_metadata
from jaxformer.parallel import MeshConfig, make_mesh, put_batch, split_parameters
from jaxformer.parallel.memory import estimate_memory
from jaxformer.training import train_step as step
from jaxformer.training.optimizers import AdamW, Muon, OptimizerConfig, make_optimizer
from jaxformer.training.pmap_train_step import make_pmap_train_step
from jaxformer.training.schedules import Constant
from tests.small_models import jitted_forward, random_params

BASE = c.TransformerConfig(
    vocab_size=32,
    model_dim=16,
    num_layers=2,
    attention=c.MultiHead(num_heads=4, num_kv_heads=2, head_dim=6),
    feed_forward=(c.GLU(hidden_dim=12),),
)
EXPERTS = replace(BASE, feed_forward=(c.MoE(expert=c.GLU(hidden_dim=12), num_experts=4, top_k=2),))
LATENT = c.Latent(num_heads=4, latent_dim=6, nope_dim=3, rope_dim=4, value_dim=5)
LORA = c.LoRA(rank=2, alpha=3.0)
EVERY_MAP = replace(LORA, targets=("query", "out", "experts", "router", "embedding", "head"))
ADAPTED = {
    "all-linear": replace(BASE, adapter=LORA),
    "dora": replace(BASE, adapter=replace(LORA, dora=True, trained=("final_norm",))),
    "experts": replace(EXPERTS, adapter=EVERY_MAP),
    "latent": replace(
        BASE, attention=LATENT, adapter=replace(LORA, dora=True, targets=("key", "value"))
    ),
}
TOKENS = np.arange(24).reshape(2, 12)
DATA = MeshConfig(data=1)


def logits(config, params):
    return np.asarray(jitted_forward(config)(params, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_a_new_adapter_changes_nothing(name):
    config = ADAPTED[name]
    params = jax.jit(Transformer(config).init)(jax.random.key(0), TOKENS)["params"]
    leaves = flatten_dict(params, sep="/")
    frozen = {path: x for path, x in leaves.items() if not is_adapter(path)}
    base = logits(replace(config, adapter=None), unflatten_dict(frozen, sep="/"))
    np.testing.assert_allclose(logits(config, params), base, atol=1e-5)


@pytest.mark.slow(but=["dora"])
@pytest.mark.parametrize("name", ADAPTED)
def test_merged_equals_adapted(name):
    config, params = ADAPTED[name], random_params(ADAPTED[name])
    merged_config, merged = merge_lora(config, params)
    assert merged_config == replace(config, adapter=None)
    base = unflatten_dict(
        {k: x for k, x in flatten_dict(params, sep="/").items() if not is_adapter(k)}, sep="/"
    )
    expected = logits(config, params)
    assert np.abs(expected - logits(merged_config, base)).max() > 0.1
    np.testing.assert_allclose(logits(merged_config, merged), expected, atol=1e-5)


def test_adapters_of_another_configuration_are_not_merged():
    config = ADAPTED["dora"]
    wider = replace(config, adapter=replace(config.adapter, rank=4))
    with pytest.raises(ValueError, match=r"query/lora_a is \[.*2\], not \[.*4\]"):
        merge_lora(wider, random_params(config))


def test_the_formula_in_float64():
    config = ADAPTED["dora"]
    params = random_params(config)
    kernel, a, b, magnitude = (
        np.asarray(params["decoder"]["layers"]["layer_0"]["attention"]["out"][name][1], np.float64)
        for name in ("kernel", "lora_a", "lora_b", "lora_magnitude")
    )
    total = kernel + 3.0 / 2 * np.einsum("nhr,rd->nhd", a, b)
    total *= magnitude / np.sqrt(np.square(total).sum((0, 1)))
    merged = merge_lora(config, params)[1]["decoder"]["layers"]["layer_0"]["attention"]["out"]
    np.testing.assert_allclose(merged["kernel"][1], total, atol=1e-6)
    assert c.LoRA(rank=4, alpha=6.0, rslora=True).scale == 3.0


def batch_of(rows, mesh):
    tokens = np.random.default_rng(0).integers(0, 32, (rows, 9), dtype=np.int32)
    positions = np.tile(np.arange(8, dtype=np.int32), (rows, 1))
    segments = np.ones_like(positions)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], positions, segments, segments > 0)
    return put_batch(batch, mesh, rows)


def optimizer_of(config, rule=AdamW()):  # noqa: B008
    metadata = split_parameters(config.adapter, parameter_metadata(config)).trained
    options = OptimizerConfig(schedule=Constant(peak=1e-2), optimizer=rule)
    return make_optimizer(options, 10, metadata)


def train(config, sizes, *, steps=2):
    """Parameters before and after training on a mesh, and the state after it."""
    mesh = make_mesh(sizes, jax.devices()[: np.prod(list(vars(sizes).values()))])
    model, optimizer = Transformer(config), optimizer_of(config)
    state = step.init_train_state(model, optimizer, jax.random.key(0), mesh)
    before = flatten_dict(jax.device_get(state.params), sep="/")
    update, batch = step.make_train_step(model, optimizer, mesh), batch_of(8, mesh)
    for _ in range(steps):
        state, _ = update(state, batch)
    return before, flatten_dict(jax.device_get(state.params), sep="/"), state


@pytest.mark.slow(but=["dora"])
@pytest.mark.parametrize("name", ADAPTED)
def test_training_changes_adapters_alone(name):
    config = ADAPTED[name]
    before, after, state = train(config, DATA)
    trained = flatten_dict(state.trained, sep="/")
    for path, x in before.items():
        is_trained = is_adapter(path) or (name == "dora" and path == "decoder/final_norm/scale")
        assert is_trained == (not np.array_equal(x, after[path])), path
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(x.size for x in trained.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize(
    "sizes",
    [MeshConfig(data=1, fsdp=2, tensor=2, context=2), MeshConfig(data=2, tensor=4)],
    ids=str,
)
def test_a_mesh_trains_what_one_device_trains(name, sizes):
    _, expected, _ = train(ADAPTED[name], DATA)
    _, after, _ = train(ADAPTED[name], sizes)
    for path, x in expected.items():
        np.testing.assert_allclose(after[path], x, atol=2e-5, err_msg=path)


@pytest.mark.slow
def test_pmap_trains_what_a_mesh_trains():
    config = ADAPTED["all-linear"]
    _, expected, _ = train(config, DATA, steps=1)
    mesh, optimizer = make_mesh(DATA, jax.devices()[:1]), optimizer_of(config)
    model = Transformer(config)
    state = step.init_train_state(model, optimizer, jax.random.key(0), mesh)
    batch = jax.tree.map(lambda x: jax.device_get(x)[None], batch_of(8, mesh))
    devices = jax.device_count()
    if devices > 1:
        batch = jax.tree.map(lambda x: x.reshape(devices, -1, x.shape[-1]), batch)
        state = parallel.put_replicated(state, make_mesh(MeshConfig(), jax.devices()))
    state, _ = make_pmap_train_step(model, optimizer)(state, batch)
    for path, x in flatten_dict(jax.device_get(state.params), sep="/").items():
        np.testing.assert_allclose(x, expected[path], atol=2e-5, err_msg=path)


@pytest.mark.slow
def test_adapters_begin_on_the_parameters_that_are_passed():
    config = replace(BASE, adapter=replace(LORA, dora=True, base_dtype="bfloat16"))
    base = random_params(BASE)
    expected = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16), np.float32), base)
    kernel = expected["decoder"]["layers"]["layer_0"]["attention"]["query"]["kernel"]
    mesh = make_mesh(DATA, jax.devices()[:1])
    state = step.init_train_state(
        Transformer(config), optimizer_of(config), jax.random.key(0), mesh, params=base
    )
    leaves = flatten_dict(state.params, sep="/")
    for path, x in flatten_dict(expected, sep="/").items():
        np.testing.assert_array_equal(np.asarray(leaves[path], np.float32), x)
        assert leaves[path].dtype == jnp.bfloat16
    query = state.params["decoder"]["layers"]["layer_0"]["attention"]["query"]
    lengths = np.sqrt(np.square(kernel).sum(1))
    np.testing.assert_allclose(query["lora_magnitude"], lengths, rtol=1e-2)
    assert query["lora_a"].dtype == query["lora_magnitude"].dtype == jnp.float32
    assert float(jnp.abs(query["lora_a"]).max()) <= 0.25 and not query["lora_b"].any()


def test_memory_counts_what_is_trained():
    config = replace(BASE, adapter=replace(LORA, base_dtype="bfloat16"))
    adapters, base = costs.num_parameters(config), costs.num_parameters(BASE)
    estimate = estimate_memory(config, {}, batch_size=1, length=8)
    assert estimate.parameters == 2 * base + 4 * (adapters - base)
    assert estimate.optimizer == 8 * (adapters - base)
    assert estimate.gradients == 4 * (adapters - base)


def test_muon_leaves_adapters_to_adam_unless_asked():
    config = ADAPTED["all-linear"]
    shapes = split_parameters(LORA, parallel.abstract_parameters(config, None)).trained
    for roles, count in ((("kernel",), 2), (("kernel", "adapter"), 1)):
        state = jax.eval_shape(optimizer_of(config, Muon(roles=roles)).init, shapes)
        sizes = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
        assert sizes == count * sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.slow
def test_dropout_is_on_in_training_only():
    config = replace(BASE, adapter=replace(LORA, dropout=0.5))
    params = random_params(config)
    expected = logits(replace(BASE, adapter=LORA), params)
    np.testing.assert_array_equal(logits(config, params), expected)
    options = {"deterministic": False, "rngs": {"dropout": jax.random.key(0)}}
    assert not np.allclose(jitted_forward(config)(params, TOKENS, **options), expected)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen-3-next-80b-a3b", "t5-small"])
@pytest.mark.slow(but=["t5-small"])
def test_models_of_other_kinds_have_adapters(name):
    config = zoo.get(name).tiny()
    adapted = replace(config, adapter=LORA)
    paths = [path for path in flatten_dict(parameter_metadata(adapted), sep="/")]
    adapters = {path.split("/")[-2] for path in paths if path.endswith("lora_a")}
    assert {"query", "key", "value", "out", "down"} <= adapters and not {
        "router",
        "tokens",
        "head",
    } & adapters


def test_targets_that_the_model_does_not_have():
    message = (
        "no linear map named q_proj for LoRA.targets; it has down, embedding, gate, head, key, "
        "out, query, up, value"
    )
    config = replace(BASE, adapter=replace(LORA, targets=("q_proj",)))
    with pytest.raises(ValueError, match=message):
        Transformer(config).init(jax.random.key(0), TOKENS)


@pytest.mark.slow
def test_a_rank_above_the_width_of_a_map():
    """The gate of a shared expert has one output; PEFT adapts it at any rank, all-linear not."""
    shared = c.SharedExpert(expert=c.GLU(hidden_dim=12), gated=True)
    experts = replace(EXPERTS.feed_forward[0], shared=shared)
    adapter = c.LoRA(rank=3, targets=("shared_gate",))
    config = replace(EXPERTS, feed_forward=(experts,), num_layers=1, adapter=adapter)
    params = random_params(config)
    gate = params["decoder"]["layers"]["layer_0"]["feed_forward"]["shared_gate"]
    assert gate["lora_a"].shape == (1, 16, 3) and gate["lora_b"].shape == (1, 3, 1)
    expected = logits(*merge_lora(config, params))
    np.testing.assert_allclose(logits(config, params), expected, atol=1e-5)
    everywhere = replace(config, adapter=c.LoRA(rank=13))
    paths = flatten_dict(parameter_metadata(everywhere), sep="/")
    assert {path.split("/")[-2] for path in paths if path.endswith("lora_a")} == {"query", "out"}


@pytest.mark.parametrize("name", ["plain", *ADAPTED])
@pytest.mark.slow(but=["plain", "all-linear", "dora"])
def test_two_trees_are_the_parameters(name):
    config = ADAPTED.get(name, BASE)
    metadata = parameter_metadata(config)
    frozen, trained = split_parameters(config.adapter, metadata)
    assert join_parameters(frozen, trained) == metadata
    assert not flatten_dict(frozen).keys() & flatten_dict(trained).keys()
    base = parameter_metadata(replace(config, adapter=None))
    if name == "dora":
        del base["decoder"]["final_norm"]
    assert frozen == ({} if name == "plain" else base)


@pytest.mark.slow
def test_a_step_hands_the_frozen_arrays_on():
    config = ADAPTED["dora"]
    mesh, model, optimizer = make_mesh(DATA, jax.devices()[:1]), Transformer(config), optax.sgd(1)
    state = step.abstract_train_state(model, optimizer, mesh)
    update = step.make_train_step(model, optimizer, mesh).trace(state, batch_of(8, mesh))
    program, frozen = update.jaxpr.jaxpr, slice(1, 1 + len(jax.tree.leaves(state.frozen)))
    assert program.outvars[frozen] == program.invars[frozen]  # no operation, so no copy
    assert all(x.donated for x in jax.tree.leaves(update.args_info[0][0]))


def test_trained_parameters_that_are_not_there():
    adapter = replace(LORA, trained=("norms", "head"))
    with pytest.raises(ValueError, match="No parameter has norms of LoRA.trained in its path"):
        split_parameters(adapter, parameter_metadata(replace(BASE, adapter=adapter)))


@pytest.mark.parametrize("name", ["attention/query", "decoder/layers/layer_0/attention/query"])
def test_trained_parameters_of_a_tree_by_layer(name):
    """A part of a path is the same in both layouts; a stacked path is of the stacked one."""
    config = replace(BASE, adapter=replace(LORA, trained=(name,)))
    stacked, by_layer = (parameter_metadata(config, x) for x in ("stacked", "by_layer"))
    kernels = [x for x in flatten_dict(split_parameters(config.adapter, stacked).trained, sep="/")]
    assert "decoder/layers/layer_0/attention/query/kernel" in kernels
    if name.startswith("decoder"):
        with pytest.raises(ValueError, match="each layer has its own; layers.layouts"):
            split_parameters(config.adapter, by_layer)
        return
    trained = flatten_dict(split_parameters(config.adapter, by_layer).trained, sep="/")
    kernels = {path for path in trained if path.endswith("kernel")}
    assert kernels == {f"decoder/first_layers/layer_{i}/attention/query/kernel" for i in range(2)}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rank": 0}, "rank must be positive; got 0"),
        ({"alpha": 0.0}, "alpha must be positive; got 0.0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\); got 1.0"),
        ({"targets": ()}, r"targets must have at least one entry; got \(\)"),
        ({"dora": True, "targets": ("query", "head")}, r"dora .* the targets \['head'\]"),
    ],
)
def test_options_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        c.LoRA(**fields)


@pytest.mark.parametrize("adapter", [c.LoRA(), LORA, EVERY_MAP], ids=["default", "lora", "names"])
def test_adapters_are_read_back_from_json(adapter):
    config = replace(BASE, adapter=adapter)
    assert c.from_json(c.TransformerConfig, c.to_json(config)) == config
    with pytest.raises(ValueError, match="adapter.targets: expected a list, got 'query'"):
        text = c.to_json(replace(BASE, adapter=c.LoRA())).replace("all-linear", "query")
        c.from_json(c.TransformerConfig, text)
