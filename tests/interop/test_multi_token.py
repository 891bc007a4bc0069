"""Modules of multi-token prediction are read and written with their models."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxformer import Transformer, load_pretrained, save_pretrained, zoo
from jaxformer.layers.layouts import arrange_layers, decoding_layout
from tests.interop.numpy_folders import write_folder
from tests.small_models import random_params

NAMES = {
    "deepseek-v3": ("model.layers.{}.", "enorm hnorm eh_proj shared_head.norm"),
    "glm-4.5": ("model.layers.{}.", "enorm hnorm eh_proj shared_head.norm"),
    "qwen-3-next-80b-a3b": ("mtp.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"),
}


def model(name):
    config = replace(zoo.get(name).tiny(), multi_token_prediction=True)
    return config, arrange_layers(config, random_params(config, 0.3), decoding_layout(config))


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow(but=["deepseek-v3"])
def test_a_folder_has_the_module_under_its_makers_names(name, tmp_path):
    config, params = model(name)
    save_pretrained(tmp_path / "x", config, params)
    values = json.loads((tmp_path / "x" / "config.json").read_text())
    counts = {values.get("num_nextn_predict_layers"), values.get("mtp_num_hidden_layers")}
    assert 1 in counts
    prefix, modules = NAMES[name]
    prefix = prefix.format(config.num_layers)
    stored = tensors_of(tmp_path / "x")
    assert {f"{prefix}{x}.weight" for x in modules.split()} <= set(stored)
    attention = f"{prefix}layers.0." if name.startswith("qwen") else prefix
    assert f"{attention}self_attn.o_proj.weight" in stored
    again, loaded = load_pretrained(tmp_path / "x")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    plain, without = replace(config, multi_token_prediction=False), dict(params)
    del without["multi_token_prediction"]
    save_pretrained(tmp_path / "plain", plain, without)
    assert set(tensors_of(tmp_path / "plain")) == {x for x in stored if not x.startswith(prefix)}


def test_copies_of_tables_are_left_out_and_other_tables_with_the_module(tmp_path):
    config, params = model("deepseek-v3")
    save_pretrained(tmp_path / "x", config, params)
    values = json.loads((tmp_path / "x" / "config.json").read_text())
    tensors, prefix = tensors_of(tmp_path / "x"), f"model.layers.{config.num_layers}."
    copies = {
        f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"],
        f"{prefix}shared_head.head.weight": tensors["lm_head.weight"],
    }
    again, loaded = load_pretrained(write_folder(tmp_path / "copies", values, tensors | copies))
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    copies[f"{prefix}embed_tokens.weight"] = 1 + tensors["model.embed_tokens.weight"]
    own = write_folder(tmp_path / "own", values, tensors | copies)
    assert load_pretrained(own)[0] == replace(config, multi_token_prediction=False)


def test_a_family_without_such_a_module_is_named(tmp_path):
    config = replace(zoo.get("llama-2-7b").tiny(), multi_token_prediction=True)
    with pytest.raises(ValueError, match="llama has no multi-token prediction"):
        save_pretrained(tmp_path / "x", config, random_params(config), family="llama")
    with pytest.raises(ValueError, match="glm4_moe has no multi-token prediction with a dense"):
        save_pretrained(tmp_path / "x", config, random_params(config), family="glm4_moe")


@pytest.mark.parity
def test_it_is_what_its_makers_layer_norms_and_projection_give(tmp_path):
    """By modules of transformers, which has no class of it, joined as the report says."""
    reason = "compares with transformers: pip install 'jaxformer[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    theirs = pytest.importorskip(
        "transformers.models.deepseek_v3.modeling_deepseek_v3", reason=reason
    )

    config, params = model("deepseek-v3")
    save_pretrained(tmp_path / "x", config, params)
    values = json.loads((tmp_path / "x" / "config.json").read_text())
    depth = values["num_hidden_layers"]
    stored, prefix = tensors_of(tmp_path / "x"), f"model.layers.{depth}."
    deeper = write_folder(tmp_path / "deeper", values | {"num_hidden_layers": depth + 1}, stored)
    load = theirs.DeepseekV3ForCausalLM.from_pretrained
    whole = load(deeper, attn_implementation="eager").eval()

    def norm(name, x):
        module = theirs.DeepseekV3RMSNorm(config.model_dim, eps=values["rms_norm_eps"])
        module.weight.data = torch.tensor(stored[f"{prefix}{name}.weight"])
        return module(x)

    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 9))
    following = torch.tensor(np.roll(tokens, -1, axis=-1))
    with torch.no_grad():
        inner = whole.model
        position = torch.arange(9)[None]
        mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]

        def run(x, layers):
            rotations = inner.rotary_emb(x, position)
            for layer in layers:
                x = layer(x, attention_mask=mask, position_embeddings=rotations)
            return x

        hidden = inner.norm(run(inner.embed_tokens(torch.tensor(tokens)), inner.layers[:depth]))
        both = norm("enorm", inner.embed_tokens(following)), norm("hnorm", hidden)
        z = torch.cat(both, dim=-1) @ torch.tensor(stored[f"{prefix}eh_proj.weight"]).T
        y = norm("shared_head.norm", run(z, inner.layers[depth:]))
        expected = whole.lm_head(y).numpy()
    run_ours = Transformer(config).apply
    _, sown = run_ours({"params": params}, tokens, mutable=["hidden"])
    actual = run_ours({"params": params}, following.numpy(), hidden=sown["hidden"]["last"][0])
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())
