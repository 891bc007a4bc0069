"""Our logits are those of the released implementations, from golden files; no torch is needed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

from jaxformer import Transformer
from jaxformer.generation.steps import decode_step, prefill
from jaxformer.interop import load_pretrained, save_pretrained
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.parameter_shapes import parameter_shapes
from jaxformer.layers.layouts import layout_of, unstack_layers
from jaxformer.layers.parameter_metadata import parameter_metadata
from tests.interop.golden_files import NAMES, read_golden, tolerance, write_folder
from tests.interop.mutations import MUTATIONS
from tests.interop.references import (
    specs_from_2023,
    specs_of_chunks,
    specs_of_coverage,
    specs_of_coverage_2,
    specs_of_recurrent,
    specs_of_small_options,
    specs_to_2022,
)
from tests.interop.references_without_family import REFERENCES_WITHOUT_FAMILY

NOTICED = 1e-4
# Only how fast it compiles: the tests run each model once or twice.
COMPILER = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}
OFTEN = {"rope fraction", "softcap of scores", "top k"}  # of what only tells of the references
FOLDERS = [name for name in NAMES if name not in REFERENCES_WITHOUT_FAMILY]


@pytest.fixture(scope="module", autouse=True)
def one_trace_per_config():
    """Reading and writing ask for the same shapes again and again."""
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(parameter_shapes)
        patch.setattr("jaxformer.interop.load.parameter_shapes", cached)
        patch.setattr("jaxformer.interop.save.parameter_shapes", cached)
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Golden file, configuration and parameters of a reference, by name."""
    references = {}

    def load(name):
        if name not in references:
            golden = read_golden(name)
            if name in REFERENCES_WITHOUT_FAMILY:
                references[name] = (
                    golden,
                    *REFERENCES_WITHOUT_FAMILY[name](golden.config, golden.tensors),
                )
            else:
                folder = write_folder(golden, tmp_path_factory.mktemp("golden") / name)
                references[name] = golden, *load_pretrained(folder)
        return references[name]

    return load


def test_every_kind_of_reference_has_a_golden_file():
    specs = {*specs_to_2022.SPECS, *specs_from_2023.SPECS}
    specs |= {*specs_of_coverage.SPECS, *specs_of_coverage_2.SPECS, *specs_of_chunks.SPECS}
    specs |= {*specs_of_small_options.SPECS, *specs_of_recurrent.SPECS}
    assert specs | set(REFERENCES_WITHOUT_FAMILY) <= set(NAMES)


def run(config, params, example):
    """Logits of one example."""
    source = {} if example.source is None else {"source": jnp.asarray(example.source)}
    forward = jax.jit(Transformer(config).apply, compiler_options=COMPILER)
    return forward({"params": params}, jnp.asarray(example.tokens), **source)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow(
    but=[*("gpt2", "t5_v1_1", "bloom", "llama", "gptj", "phi3", "qwen3", "mixtral", "xlnet_uni")]
)
def test_logits(loaded, name):
    golden, config, params = loaded(name)
    for example in golden.examples:
        logits = run(config, params, example)
        np.testing.assert_allclose(
            logits, example.logits, rtol=0, atol=tolerance(name, example.logits)
        )


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param(axis, marks=() if axis in OFTEN else pytest.mark.exhaustive)
        for axis in MUTATIONS
    ],
)
@pytest.mark.slow
def test_another_choice_gives_other_logits(loaded, axis):
    name, change, renamed = MUTATIONS[axis]
    golden, config, params = loaded(name)
    other = change(config)
    assert other != config
    named = flatten_dict(params, sep="/")
    for old, new in renamed:
        named |= {path.replace(old, new): x for path, x in named.items()}
    paths = flatten_dict(parameter_metadata(other, layout_of(params)), sep="/")
    params = unflatten_dict({path: x for path, x in named.items() if path in paths}, sep="/")
    example = golden.examples[-1]
    moved = np.abs(run(other, params, example) - example.logits).max()
    assert moved > NOTICED


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.slow(but=["llama", "gpt2", "bloom", "t5", "mixtral", "marian", "deepseek_v2"])
def test_what_is_written_is_read_as_it_was(loaded, name, tmp_path):
    _, config, params = loaded(name)
    save_pretrained(tmp_path / "out", config, params)
    again = load_pretrained(tmp_path / "out")
    assert again.config == config
    assert jax.tree.structure(again.params) == jax.tree.structure(params)
    for here, there in zip(jax.tree.leaves(params), jax.tree.leaves(again.params), strict=True):
        assert here.dtype == there.dtype == jnp.float32
        assert np.array_equal(here, there)


@pytest.mark.slow
def test_multipliers_that_weights_absorb_are_written_again(loaded, tmp_path):
    """With them as `extra` the tensors are those that were read, up to rounding."""
    golden, config, params = loaded("falcon_h1")
    extra = FAMILIES["falcon_h1"].absorbed_fields(golden.config)
    assert set(extra) == {
        *("attention_in_multiplier", "attention_out_multiplier", "mlp_multipliers"),
        *("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers"),
    }
    save_pretrained(tmp_path / "out", config, params, extra=extra)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(golden.tensors)
    for name, tensor in written.items():
        np.testing.assert_allclose(tensor, golden.tensors[name], rtol=3e-7, err_msg=name)


@pytest.mark.slow
def test_a_released_olmo_hybrid_has_true_parts_and_other_names(loaded, tmp_path):
    """Transformers writes the convolutions as thirds, here 17, 17 and 16 rows."""
    golden, config, params = loaded("olmo_hybrid")
    tensors = dict(golden.tensors)
    for i in (0, 1, 3):
        names = [f"model.layers.{i}.linear_attn.{x}_conv1d.weight" for x in "qkv"]
        assert [len(tensors[name]) for name in names] == [17, 17, 16]
        rows = np.concatenate([tensors[name] for name in names])
        tensors |= dict(zip(names, np.split(rows, [16, 32]), strict=True))
    released = {
        name.replace("feedforward_layer_norm", "post_attention_layernorm")
        if name.startswith(("model.layers.2.", "model.layers.4."))
        else name: x
        for name, x in tensors.items()
    }
    assert released.keys() - tensors.keys()
    again = load_pretrained(write_folder(golden._replace(tensors=released), tmp_path / "out"))
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    del released["model.layers.1.linear_attn.k_conv1d.weight"]
    with pytest.raises(ValueError, match="1 tensors are missing: .*1.linear_attn.k_conv1d.weight"):
        load_pretrained(write_folder(golden._replace(tensors=released), tmp_path / "less"))


RECURRENT = (
    *("falcon_h1", "falcon_h1_without_norm", "olmo_hybrid", "olmo_hybrid_nope"),
    *("bamba", "mamba2", "granitemoehybrid", "granitemoehybrid_dense", "nemotron_h"),
    *("nemotron_h_latent", "rwkv"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe", "lfm3", "lara_mini"),
)


@pytest.mark.parametrize("name", [*RECURRENT, "gemma4", "gemma4_moe", "gemma4_edge"])
@pytest.mark.slow
def test_token_by_token_gives_the_same_logits(loaded, name):
    golden, config, params = loaded(name)
    (example,) = golden.examples
    tokens = jnp.asarray(example.tokens)
    prompt, length = 5, tokens.shape[-1]
    _, context = prefill(
        config, params, tokens[:, :prompt], jnp.full(len(tokens), prompt), capacity=length
    )
    step = jax.jit(decode_step, static_argnums=0)
    for i in range(prompt, length):
        logits, context = step(config, params, tokens[:, i], context)
        np.testing.assert_allclose(
            logits, example.logits[:, i], rtol=0, atol=tolerance(name, example.logits)
        )


def key_bias_gpt2(tensors, at, heads):
    return tensors[f"{at}.attn.c_attn.bias"].reshape(3, heads, -1)[1]


def key_bias_by_head(tensors, at, heads):
    return tensors[f"{at}.self_attention.query_key_value.bias"].reshape(heads, 3, -1)[:, 1]


def key_bias_of_one_head(tensors, at, heads):
    bias = tensors[f"{at}.attn.c_attn.bias"].reshape(heads + 2, -1)
    return bias[heads:-1]


def key_bias_of_each_head(tensors, at, heads):
    return tensors[f"{at}.attn.c_attn.bias"].reshape(heads, 3, -1)[:, 1]


def key_bias(branch, name="k_proj"):
    return lambda tensors, at, heads: tensors[f"{at}.{branch}.{name}.bias"]


KEY_BIASES = [  # the softmax cancels them where nothing in the scores depends on the position
    ("gpt2", "decoder", "attention", "transformer.h", key_bias_gpt2),
    ("openai_gpt", "decoder", "attention", "transformer.h", key_bias_gpt2),
    ("bloom", "decoder", "attention", "transformer.h", key_bias_by_head),
    ("falcon_rw", "decoder", "attention", "transformer.h", key_bias_by_head),
    ("gpt_bigcode", "decoder", "attention", "transformer.h", key_bias_of_one_head),
    ("gpt_bigcode_mha", "decoder", "attention", "transformer.h", key_bias_of_each_head),
    ("ctrl", "decoder", "attention", "transformer.h", key_bias("multi_head_attention", "Wk")),
    ("opt", "decoder", "attention", "model.decoder.layers", key_bias("self_attn")),
    ("biogpt", "decoder", "attention", "biogpt.layers", key_bias("self_attn")),
    ("xglm", "decoder", "attention", "model.layers", key_bias("self_attn")),
]
for translator in ("marian", "fsmt", "m2m_100", "pegasus"):
    KEY_BIASES += [
        (translator, "encoder", "attention", "model.encoder.layers", key_bias("self_attn")),
        (translator, "decoder", "attention", "model.decoder.layers", key_bias("self_attn")),
        (
            translator,
            "decoder",
            "cross_attention",
            "model.decoder.layers",
            key_bias("encoder_attn"),
        ),
    ]


@pytest.mark.parametrize("name, stack, branch, at, theirs", KEY_BIASES)
def test_key_biases_that_no_logit_shows(loaded, name, stack, branch, at, theirs):
    golden, config, params = loaded(name)
    for i, layer in enumerate(unstack_layers(params[stack])):
        expected = theirs(golden.tensors, f"{at}.{i}", config.attention.num_heads)
        assert np.array_equal(np.ravel(layer[branch]["key"]["bias"]), np.ravel(expected))
