import json
import logging
import re
import tracemalloc
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxformer import zoo
from jaxformer.config import GLU, MultiHead, TransformerConfig
from jaxformer.generation import unroll
from jaxformer.interop import load, load_config, load_pretrained, save_pretrained
from jaxformer.interop import safetensors_files as files
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.load import build_config, read_pretrained
from jaxformer.interop.save import choose_family
from jaxformer.layers.layouts import layout_of, unstack_layers
from tests.interop.golden_files import read_golden
from tests.interop.golden_files import write_folder as write_golden
from tests.interop.numpy_folders import LLAMA, llama_shapes, random_tensors, write_folder
from tests.small_models import random_params


def equal(a, b):
    """Whether two trees have the same arrays, bit for bit."""
    bits = lambda x: (x.dtype, x.shape, np.asarray(x).tobytes())  # noqa: E731
    return jax.tree.map(bits, a) == jax.tree.map(bits, b)


# What a folder holds


def test_every_number_lands_where_it_belongs(loaded, tensors):
    config, params = loaded
    assert config == TransformerConfig(
        vocab_size=13,
        model_dim=12,
        num_layers=3,
        attention=MultiHead(
            num_heads=6, num_kv_heads=2, head_dim=4, positions=(config.attention.positions[0],)
        ),
        feed_forward=(GLU(hidden_dim=11),),
        norm=config.norm,
    )
    assert config.attention.positions[0].base == 500000.0
    assert config.norm.eps == 1e-5
    layers = unstack_layers(params["decoder"])
    assert len(layers) == 3
    for i, layer in enumerate(layers):
        theirs = {k.split(f"layers.{i}.")[1]: v for k, v in tensors.items() if f"rs.{i}." in k}
        query, out = layer["attention"]["query"]["kernel"], layer["attention"]["out"]["kernel"]
        assert query.shape == (12, 6, 4) and out.shape == (6, 4, 12)
        for d, n, h in ((0, 0, 1), (7, 5, 3), (11, 2, 0)):
            assert query[d, n, h] == theirs["self_attn.q_proj.weight"][4 * n + h, d]
            assert out[n, h, d] == theirs["self_attn.o_proj.weight"][d, 4 * n + h]
        for name, theirs_name in (("key", "k"), ("value", "v")):
            kernel = np.asarray(layer["attention"][name]["kernel"])
            expected = theirs[f"self_attn.{theirs_name}_proj.weight"]
            np.testing.assert_array_equal(kernel.reshape(12, 8).T, expected)
        for name in ("gate", "up", "down"):
            kernel = layer["feed_forward"][name]["kernel"]
            np.testing.assert_array_equal(kernel.T, theirs[f"mlp.{name}_proj.weight"])
        for name, theirs_name in (
            ("pre_attention_norm", "input_layernorm"),
            ("pre_feed_forward_norm", "post_attention_layernorm"),
        ):
            np.testing.assert_array_equal(layer[name]["scale"], theirs[f"{theirs_name}.weight"])
    table = params["embedding"]["tokens"]["embedding"]
    np.testing.assert_array_equal(table, tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"]["kernel"].T, tensors["lm_head.weight"])
    np.testing.assert_array_equal(
        params["decoder"]["final_norm"]["scale"], tensors["model.norm.weight"]
    )
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}


@pytest.mark.slow
def test_layers_after_the_last_whole_pattern_stand_in_the_tail(tmp_path):
    """Five layers of Gemma 3, every second with a window: two periods and one layer left over.

    The names are those of a file that also reads images, whose other tensors are left aside.
    """
    text = {
        "model_type": "gemma3_text",
        "vocab_size": 7,
        "hidden_size": 6,
        "intermediate_size": 5,
        "num_hidden_layers": 5,
        "sliding_window_pattern": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "sliding_window": 3,
    }
    names = (
        *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"),
        "post_feedforward_layernorm",
    )
    shapes = {"embed_tokens.weight": (7, 6), "norm.weight": (6,)}
    for i in range(5):
        shapes |= {f"layers.{i}.{name}.weight": (6,) for name in names}
        shapes |= {f"layers.{i}.self_attn.{x}_norm.weight": (4,) for x in "qk"}
        shapes |= {f"layers.{i}.self_attn.q_proj.weight": (8, 6)}
        shapes |= {f"layers.{i}.self_attn.{x}_proj.weight": (4, 6) for x in "kv"}
        shapes |= {f"layers.{i}.self_attn.o_proj.weight": (6, 8)}
        shapes |= {f"layers.{i}.mlp.{x}_proj.weight": (5, 6) for x in ("gate", "up")}
        shapes |= {f"layers.{i}.mlp.down_proj.weight": (6, 5)}
    number = {name: next(iter(re.findall(r"\d+", name)), "99") for name in shapes}
    values = {
        f"language_model.model.{name}": np.full(shape, float(number[name]), np.float32)
        for name, shape in shapes.items()
    }
    values["vision_tower.x.weight"] = np.zeros(3, np.float32)
    values["multi_modal_projector.y"] = np.zeros(3, np.float32)
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 4}}
    folder = write_folder(tmp_path / "g", config, values)
    config, params = read_pretrained(folder, layout="stacked")
    local, full = config.attention.positions
    assert (local.base, full.base) == (1e4, 1e6)
    assert config.attention.windows == (3, None)
    decoder = params["decoder"]
    assert sorted(decoder["layers"]) == ["layer_0", "layer_1"]
    assert list(decoder["tail"]) == ["layer_0"]
    for i in range(2):
        leaves = jax.tree.leaves(decoder["layers"][f"layer_{i}"])
        assert len(leaves) == 13
        for x in leaves:
            assert x.shape[0] == 2 and (x[0] == i).all() and (x[1] == 2 + i).all()
    leaves = jax.tree.leaves(decoder["tail"]["layer_0"])
    assert len(leaves) == 13
    assert all((x == 4).all() for x in leaves)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.slow
def test_qwen_with_images_is_its_text_model(name, tmp_path, caplog):
    """As published: with tensors for images and further tokens, and experts in two tensors."""
    golden = read_golden(name)
    text_config, text = load_pretrained(write_golden(golden, tmp_path / "text"))
    tensors = {
        key.replace("model.", "model.language_model.", 1): x for key, x in golden.tensors.items()
    }
    for i in range(text_config.num_layers if "moe" in name else 0):
        prefix = f"model.language_model.layers.{i}.mlp.experts"
        gate, up, down = (
            np.stack(
                [
                    tensors.pop(f"{prefix}.{expert}.{part}_proj.weight")
                    for expert in range(text_config.feed_forward[0].num_experts)
                ]
            )
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{prefix}.down_proj"] = down
    tensors |= {"model.visual.pos_embed.weight": np.zeros(3, np.float32)}
    tensors |= {"mtp.other.weight": np.zeros(3, np.float32)}
    mtp = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    gates = {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
    values = {
        "model_type": name,
        "text_config": golden.config | gates | mtp,
        "vision_config": {"depth": 1},
        "tie_word_embeddings": golden.config["tie_word_embeddings"],
        "language_model_only": False,
        "image_token_id": 5,
    }
    with caplog.at_level(logging.INFO, logger="jaxformer"):
        config, params = load_pretrained(write_folder(tmp_path / "images", values, tensors))
    assert f"2 of {len(tensors)} tensors have no part in the logits of text" in caplog.text
    assert config == text_config and config.model_type == f"{name}_text"
    jax.tree.map(np.testing.assert_array_equal, params, text)


@pytest.mark.parametrize("length", [300, None])
def test_the_context_length_of_a_loaded_file_is_saved(length, tmp_path, tensors):
    """As the same model type, unless `extra` says otherwise."""
    fields = {} if length is None else {"max_position_embeddings": length}
    config, params = load_pretrained(write_folder(tmp_path / "x", LLAMA | fields, tensors))

    def saved(name, **options):
        save_pretrained(tmp_path / name, config, params, **options)
        return json.loads((tmp_path / name / "config.json").read_text())

    assert saved("same").get("max_position_embeddings") == length
    other = saved("other", extra={"max_position_embeddings": 9})
    assert other["max_position_embeddings"] == 9
    assert "max_position_embeddings" not in saved("mistral", family="mistral")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gptj", "n_positions"),
        ("codegen", "n_positions"),
        ("ctrl", "n_positions"),
        ("mpt", "max_seq_len"),
    ],
)
def test_the_context_length_has_the_name_of_its_family(name, field):
    values = read_golden(name).config | {field: 300}
    config = build_config(FAMILIES[name], values, where="here")
    assert config.max_position_embeddings == 300
    assert choose_family(config, {})[1][field] == 300


@pytest.mark.slow
def test_experts_stand_side_by_side(tmp_path):
    config = LLAMA | {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
    }
    shapes = {n: s for n, s in llama_shapes(config).items() if ".mlp." not in n}
    moe = "model.layers.0.block_sparse_moe"
    shapes[f"{moe}.gate.weight"] = (3, 12)
    for expert in range(3):
        shapes |= {f"{moe}.experts.{expert}.{w}.weight": (11, 12) for w in ("w1", "w3")}
        shapes[f"{moe}.experts.{expert}.w2.weight"] = (12, 11)
    tensors = random_tensors(shapes)
    config, params = load_pretrained(write_folder(tmp_path / "m", config, tensors))
    assert (config.feed_forward[0].num_experts, config.feed_forward[0].top_k) == (3, 2)
    branch = params["decoder"]["layers"]["layer_0"]["feed_forward"]
    np.testing.assert_array_equal(branch["router"]["kernel"][0].T, tensors[f"{moe}.gate.weight"])
    for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        for i in range(3):
            kernel = branch["experts"][name]["kernel"][0, i]
            np.testing.assert_array_equal(kernel.T, tensors[f"{moe}.experts.{i}.{theirs}.weight"])


# Files


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_any_float_of_any_number_of_shards(dtype, tmp_path, tensors):
    stored = {name: x.astype(dtype) for name, x in tensors.items()}
    folder = write_folder(tmp_path / "x", LLAMA, stored, shards=4)
    kernel = load_pretrained(folder).params["head"]["kernel"]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel.T, stored["lm_head.weight"].astype(np.float32))


def test_a_dtype_that_is_asked_for_stays(tmp_path, tensors):
    stored = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    folder = write_folder(tmp_path / "x", LLAMA, stored)
    config, params = load_pretrained(folder, jnp.bfloat16)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    save_pretrained(tmp_path / "y", config, params)
    written = load_file(tmp_path / "y" / "model.safetensors")
    assert json.loads((tmp_path / "y" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, x in stored.items():
        assert written[name].dtype == x.dtype
        assert written[name].tobytes() == x.tobytes()


def test_dtype_must_be_a_float(source):
    message = "^dtype must be a floating-point dtype, such as 'bfloat16'; got"
    with pytest.raises(ValueError, match=f"{message} .*int32"):
        load_pretrained(source, jnp.int32)
    with pytest.raises(ValueError, match=f"{message} 'bf16'"):
        load_pretrained(source, "bf16")


def test_what_is_written_is_what_was_read(tmp_path, loaded, tensors):
    config, params = loaded
    save_pretrained(tmp_path / "out", config, params, extra={"eos_token_id": 2})
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: (x.dtype, x.tobytes()) for n, x in written.items()} == {
        n: (x.dtype, x.tobytes()) for n, x in tensors.items()
    }
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert (settings["model_type"], settings["torch_dtype"]) == ("llama", "float32")
    assert (settings["eos_token_id"], settings["pad_token_id"]) == (2, None)
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"] == 500000.0
    again = load_pretrained(tmp_path / "out")
    assert again.config == config
    assert equal(again.params, params)


def test_shards_and_their_index(tmp_path, loaded, tensors):
    config, params = loaded
    save_pretrained(tmp_path / "out", config, params, max_shard_bytes=2000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    names = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    count = len(names)
    assert count > 3
    assert names == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "whoever may read config.json may read the weights"
    stored = {}
    for name in names:
        part = load_file(tmp_path / "out" / name)
        assert sum(x.nbytes for x in part.values()) <= 2000
        assert all(index["weight_map"][tensor] == name for tensor in part)
        stored |= part
    assert {n: x.tobytes() for n, x in stored.items()} == {
        n: x.tobytes() for n, x in tensors.items()
    }
    assert equal(load_pretrained(tmp_path / "out").params, params)


def test_memory_stays_near_one_copy(tmp_path, monkeypatch):
    """Reading 20 MB: the arrays, a tensor and its transpose, then nothing but the arrays."""
    monkeypatch.setattr(load, "MAX_READING_THREADS", 1)
    config = LLAMA | {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512}
    shapes = llama_shapes(config)
    folder = write_folder(tmp_path / "x", config, random_tensors(shapes), shards=2)
    size = 4 * sum(np.prod(shape) for shape in shapes.values())
    largest = 4 * max(np.prod(shape) for shape in shapes.values())
    loaded_config = load_config(folder)
    ours = load.parameter_shapes(loaded_config)
    table = load.FAMILIES["llama"].mapping
    links = load.expand_mapping(table, loaded_config, ours)
    stored = files.read_folder_headers(folder)
    tracemalloc.start()
    try:
        params = load._load_params(links, stored, ours, np.dtype(np.float32), {})
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(x.nbytes for x in jax.tree.leaves(params)) == size > 19e6
    assert current < 1.02 * size
    assert peak < 1.02 * size + 3 * largest


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "gemma-2-2b", "t5-small"])
@pytest.mark.slow
def test_layers_are_read_apart_as_unroll_splits_them(preset, tmp_path):
    """Experts, windows in turns, an encoder; in bfloat16 each value is rounded once."""
    config = replace(zoo.get(preset).tiny(), num_layers=5)
    save_pretrained(tmp_path / "x", config, random_params(config))
    stacked = read_pretrained(tmp_path / "x", "bfloat16", layout="stacked")
    read = load_pretrained(tmp_path / "x", "bfloat16")
    assert stacked.config == read.config
    assert layout_of(read.params) == "by_layer" != layout_of(stacked.params)
    assert equal(read.params, unroll(*stacked))


def test_arrays_go_to_jax_without_a_copy():
    for shape, dtype in (((3, 5), np.float32), ((7,), jnp.bfloat16)):
        array = load._empty_pages(shape, np.dtype(dtype))
        array[...] = 1
        assert array.dtype == dtype and array.shape == shape
        assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data
    assert load._empty_pages((0, 4), np.dtype(np.float32)).shape == (0, 4)
