import json
import logging
import math
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import save_file

from jaxformer.config import LMHead
from jaxformer.interop import load_pretrained, save_pretrained
from jaxformer.interop import safetensors_files as files
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.load import build_config
from jaxformer.interop.parameter_shapes import parameter_shapes
from jaxformer.parallel import MeshConfig, make_mesh
from tests.interop.golden_files import read_golden
from tests.interop.numpy_folders import LLAMA, write_folder

SINGLE = r"model\.safetensors"

# Heads


@pytest.fixture
def tied(tmp_path, tensors):
    """Write a folder whose config.json ties the head, with these tensors besides the embedding."""

    def write(**more):
        remaining = {name: x for name, x in tensors.items() if name != "lm_head.weight"}
        remaining |= {name.replace("__", "."): x for name, x in more.items()}
        remaining = {name: x for name, x in remaining.items() if x is not None}
        return write_folder(tmp_path / "tied", LLAMA | {"tie_word_embeddings": True}, remaining)

    return write


def test_a_tied_head_may_be_absent_or_alike(tied, tensors):
    table = tensors["model.embed_tokens.weight"]
    for folder in (tied(), tied(lm_head__weight=table)):
        config, params = load_pretrained(folder)
        assert config.head.tied and "head" not in params
        np.testing.assert_array_equal(params["embedding"]["tokens"]["embedding"], table)


def test_a_tied_head_that_differs_is_its_own(tied, tensors):
    other = tensors["lm_head.weight"]
    config, params = load_pretrained(tied(lm_head__weight=other))
    assert not config.head.tied
    np.testing.assert_array_equal(params["head"]["kernel"].T, other)
    table = params["embedding"]["tokens"]["embedding"]
    np.testing.assert_array_equal(table, tensors["model.embed_tokens.weight"])


def test_a_tied_head_may_stand_for_the_embedding(tmp_path, tensors):
    remaining = {n: x for n, x in tensors.items() if n != "model.embed_tokens.weight"}
    folder = write_folder(tmp_path / "x", LLAMA | {"tie_word_embeddings": True}, remaining)
    config, params = load_pretrained(folder)
    assert config.head.tied
    table = params["embedding"]["tokens"]["embedding"]
    np.testing.assert_array_equal(table, tensors["lm_head.weight"])


@pytest.mark.slow
def test_a_head_of_a_t5_may_be_absent(tmp_path):
    """As transformers has it: logits come from the embedding then, without T5's multiplier."""
    sizes = {"d_model": 12, "d_kv": 5, "d_ff": 20, "num_heads": 3, "num_layers": 2}
    values = {"vocab_size": 13, **sizes, "tie_word_embeddings": True}
    config = build_config(FAMILIES["t5"], values, where="here")
    shapes = {p: jnp.zeros(s) for p, s in parameter_shapes(config).items()}
    save_pretrained(tmp_path / "tied", config, unflatten_dict(shapes, sep="/"))
    path = tmp_path / "tied/config.json"
    config_json = json.loads(path.read_text()) | {"tie_word_embeddings": False}
    del config_json["scale_decoder_outputs"]
    path.write_text(json.dumps(config_json), encoding="utf-8-sig")
    loaded = load_pretrained(tmp_path / "tied")
    assert loaded.config.head == LMHead(tied=True) and "head" not in loaded.params


# Bad folders: everything is refused before a weight is read


@pytest.fixture
def refused(monkeypatch):
    """Whether a folder is refused with such a message, and no tensor read."""

    def check(folder, message):
        def read(stored):
            raise AssertionError(f"{stored} was read")

        monkeypatch.setattr(files, "read_tensor", read)
        with pytest.raises(ValueError) as error:
            load_pretrained(folder)
        print(error.value)  # shown where a test fails
        return re.search(message, str(error.value), re.DOTALL)

    return check


def test_no_config(refused, tmp_path):
    assert refused(tmp_path, r"has no config\.json, so it is not a Hugging Face model\.$")
    assert refused(
        tmp_path / "nowhere", r"nowhere is no folder, so it is not a Hugging .* model\.$"
    )
    (tmp_path / "config.json").write_text("{")
    assert refused(tmp_path, r"config\.json is not JSON: Expecting property name")
    (tmp_path / "config.json").write_text("[]")
    assert refused(tmp_path, r"config\.json is a list, not an object\.$")


def test_unknown_model_type(refused, tmp_path, tensors):
    folder = write_folder(tmp_path / "x", LLAMA | {"model_type": "xlstm"}, tensors)
    message = "'xlstm' is not supported: it needs matrix and scalar LSTMs; `jaxformer zoo"
    assert refused(folder, message)
    (folder / "config.json").write_text("{}")
    assert refused(folder, r"model_type None is not supported")


def test_no_weights_or_pickles_only(refused, tmp_path, tensors):
    folder = write_folder(tmp_path / "x", LLAMA, tensors)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert refused(folder, r"has neither .*; consolidated\.safetensors cannot replace them\.$")
    (folder / "consolidated.safetensors").rename(folder / "pytorch_model.bin")
    assert refused(folder, r"only pickle weights \(pytorch_model\.bin\).*Convert them: load")


def test_damaged_files(refused, tmp_path, tensors):
    folder = write_folder(tmp_path / "x", LLAMA, tensors)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for broken in (
        whole[:-100],
        whole + b"abc",
        whole[:7],
        whole[:8] + b"x" * (len(whole) - 8),
        whole.replace(b'"shape":[13,12]', b'"shape":[13,11]', 1),
        whole.replace(b'"data_offsets":[', b'"data_offsets" [', 1),
        whole[:9] + b"\xff" * 50 + whole[59:],
    ):
        path.write_bytes(broken)
        size = len(broken)
        assert refused(folder, rf"{SINGLE}, of {size} bytes, is truncated, damaged or not .*: \S.*")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert refused(folder, r"is a git-lfs pointer; fetch the file with git lfs pull\.$")


def test_a_file_that_becomes_shorter_after_its_header_was_read_is_refused(tmp_path):
    path = tmp_path / files.SINGLE_FILE
    save_file({"a": np.ones((64, 64), np.float32), "b": np.ones((64, 64), np.float32)}, path)
    header = files.read_header(path)
    first, last = sorted(header.values(), key=lambda x: x.offset)
    os.truncate(path, last.offset + last.nbytes - 1)
    with pytest.raises(ValueError, match=rf"{SINGLE} has become shorter while it was read\."):
        files.read_tensor(last)
    assert files.read_tensor(first).sum() == 64 * 64


def test_shards_that_are_absent_or_broken(refused, tmp_path, tensors):
    folder = write_folder(tmp_path / "x", LLAMA, tensors, shards=5)
    index = folder / "model.safetensors.index.json"
    shard = "model-0000{}-of-00005.safetensors".format
    for i in (2, 3):
        (folder / shard(i)).write_bytes(b"12345")
    assert refused(
        folder, rf"{shard(2)}, of 5 bytes, is trunc.*\n.*{shard(3)}, of 5 bytes, is trunc"
    )
    for i in (2, 3):
        (folder / shard(i)).unlink()
    assert refused(folder, rf"names 5 shards, but 2 are absent: {shard(2)}, {shard(3)}\.$")
    index_json = json.loads(index.read_text())
    weight_map = {k: v for k, v in index_json["weight_map"].items() if (folder / v).exists()}
    index.write_text(json.dumps({"weight_map": weight_map | {"a": shard(1), "b": shard(4)}}))
    assert refused(folder, rf"absent: a \(in {shard(1)}\), b \(in {shard(4)}\)\.$")
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    assert refused(folder, r"names files outside its folder: \['\.\./model\.safetensors'\]\.$")
    index.write_text("{}")
    assert refused(folder, r"index\.json lacks weight_map; it has no keys\.$")


def test_tensors_that_do_not_fit_are_all_named(refused, tmp_path, tensors):
    changed = dict(tensors)
    layer = "model.layers.1"
    del changed[f"{layer}.mlp.up_proj.weight"], changed["model.norm.weight"]
    changed["model.layers.3.mlp.up_proj.weight"] = np.zeros((11, 12), np.float32)
    changed[f"{layer}.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    changed[f"{layer}.self_attn.k_proj.weight"] = np.zeros((4, 12), np.float32)
    changed["lm_head.weight"] = np.zeros((12, 13), np.float32)
    changed[f"{layer}.mlp.gate_proj.weight"] = np.zeros((11, 12), np.int8)
    changed[f"{layer}.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)  # a known table
    assert refused(
        write_folder(tmp_path / "x", LLAMA, changed),
        r"x: 2 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight\.\n"
        r"2 tensors do not belong to a llama with this config\.json: model\.layers\.1\.self_attn\."
        r"q_proj\.bias, model\.layers\.3\.mlp\.up_proj\.weight\.\n"
        r"2 tensors have the wrong shape: .*lm_head\.weight is \[12, 13\], not \[13, 12\].*\n"
        r"1 tensors have no floating-point .*: model\.layers\.1\.mlp\.gate_proj\.weight is I8\.$",
    )


def with_further_layers(count):
    """Config.json and tensors of DeepSeek V3 with copies of its last layer after the last one."""
    golden = read_golden("deepseek_v3")
    num_layers, tensors = golden.config["num_hidden_layers"], dict(golden.tensors)
    last = {name: x for name, x in tensors.items() if f"layers.{num_layers - 1}." in name}
    for i in range(num_layers, num_layers + count):
        tensors |= {name.replace(f".{num_layers - 1}.", f".{i}.", 1): x for name, x in last.items()}
    return golden.config, tensors, len(last)


def test_layers_beyond_those_that_predict_further_tokens(refused, tmp_path):
    """One of them by default; a file with more has another num_hidden_layers."""
    values, tensors, added = with_further_layers(2)
    values = {key: x for key, x in values.items() if key != "num_nextn_predict_layers"}
    more = rf"{added} tensors do not belong to a deepseek_v3 .*: model\.layers\.3\."
    assert refused(write_folder(tmp_path / "default", values, tensors), more)
    values |= {"num_nextn_predict_layers": 1}
    assert refused(write_folder(tmp_path / "one", values, tensors), more)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, caplog):
    values, tensors, added = with_further_layers(2)
    values |= {"num_nextn_predict_layers": 2}
    with caplog.at_level(logging.INFO, logger="jaxformer"):
        load_pretrained(write_folder(tmp_path / "x", values, tensors))
    assert f"{2 * added} of {len(tensors)} tensors have no part in the logits" in caplog.text


def test_a_tensor_under_two_names(refused, tmp_path):
    folder = tmp_path / "x"
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 1}}
    twice = {f"{p}model.norm.weight": np.zeros(3, np.float32) for p in ("", "language_model.")}
    assert refused(write_folder(folder, config, twice), r"two names: .*model\.norm\.weight\)\.$")


# Weights and numbers that no model can have


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("mesh", [None, {"fsdp": 2}])
def test_weights_that_are_not_finite_are_refused(tmp_path, tensors, dtype, mesh):
    name = "model.layers.1.mlp.up_proj.weight"
    changed = {n: x.astype(dtype) for n, x in tensors.items()}
    changed[name][0, :3] = math.nan
    changed[name][2, 1] = -math.inf
    folder = write_folder(tmp_path / "x", LLAMA, changed, shards=3)
    shard = json.loads((folder / files.INDEX_FILE).read_text())["weight_map"][name]
    size = changed[name].size
    message = rf"{name} in .*/x/{shard}: 4 of {size} values are not finite \(NaN, infinity\)\.$"
    sizes = None if mesh is None else make_mesh(MeshConfig(data=1, **mesh), jax.devices()[:2])
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder, mesh=sizes)


def test_weights_that_the_dtype_cannot_hold_are_refused(tmp_path, tensors):
    changed = dict(tensors)
    changed["model.norm.weight"] = np.full(12, 70_000, np.float32)
    folder = write_folder(tmp_path / "x", LLAMA, changed)
    assert load_pretrained(folder).params["decoder"]["final_norm"]["scale"][0] == 70_000
    message = r"model\.norm\.weight in .*: 12 of 12 values are too large for float16; pass a wider"
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder, jnp.float16)


NUMBERS = {
    "rope_theta": [
        (0, r"Rope\.base must be above 1; got 0\.0\. The file has rope_theta = 0\.$"),
        (-2.5, r"must be above 1; got -2\.5\. The file has rope_theta = -2\.5\.$"),
        (1e39, r"rope_theta = 1e\+39: expected a value of type float"),
        (True, r"rope_theta = True: expected a value of type float"),
        ("10000", r"rope_theta = '10000': expected a value of type float"),
    ],
    "rope_parameters": [
        ({"rope_theta": 0}, r"got 0\.0\. The file has rope_parameters\.rope_theta = 0\.$")
    ],
    "rms_norm_eps": [
        (0, r"RMSNorm\.eps must be positive; got 0\.0\. The file has rms_norm_eps = 0\.$"),
        (10**400, r"rms_norm_eps = 1000.*: expected a value of type float"),
    ],
    "num_attention_heads": [(0, r"got 0\. The file has num_attention_heads = 0\.$")],
    "num_hidden_layers": [
        (0, r"got 0\. The file has num_hidden_layers = 0\.$"),
        (2.5, r"num_hidden_layers = 2\.5: expected a value of type int"),
        (10**8, r"num_hidden_layers = 100000000; models have at most 10000 layers\.$"),
    ],
    "vocab_size": [
        (2**40, r"vocab_size must be at most 2147483647; got 1099511627776\. The file has vocab_"),
        (10**9, r"config\.json describes \d+ parameters, but the safetensors files have \d+ val"),
    ],
}
CASES = [(name, value, message) for name, them in NUMBERS.items() for value, message in them]


@pytest.mark.parametrize("name, value, message", CASES, ids=[f"{n}={v!s:.12}" for n, v, _ in CASES])
def test_numbers_no_model_has_name_the_file_and_its_field(
    refused, tmp_path, tensors, name, value, message
):
    folder = write_folder(tmp_path / "x", LLAMA | {name: value}, tensors)
    assert refused(folder, r"^.*/x(/config\.json)?: .*" + message)


def test_untrusted_json_in_a_folder_is_one_sentence_that_names_the_file(refused, tmp_path, tensors):
    folder = write_folder(tmp_path / "x", LLAMA, tensors)
    config, whole = folder / "config.json", (folder / "config.json").read_text()
    config.write_text(whole.replace("500000.0", "Infinity"))
    assert refused(
        folder, r"config\.json: .*\n  rope_theta = inf: expected a value of type float\."
    )
    config.write_text(whole.replace("{", '{"rope_theta": NaN, ', 1))
    assert refused(folder, r"^\S*config\.json is not JSON: NaN is not a finite number\.$")
    config.write_text("[" * 100_000)
    assert refused(folder, r"^\S*config\.json is nested too deeply\.$")
    config.write_text(whole)
    path = folder / "model.safetensors"
    path.rename(folder / "model-1.safetensors")
    index = folder / files.INDEX_FILE
    index.write_text('{"weight_map": ["a"]}')
    assert refused(folder, r"^\S*index\.json: weight_map is a list, not an object\.$")
    index.write_text('{"weight_map": {"a": 7}}')
    assert refused(folder, r"^\S*index\.json: a is an integer, not a string\.$")
