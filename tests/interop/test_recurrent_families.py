"""What files of Mamba, Falcon Mamba, Jamba, RecurrentGemma and RWKV say: layers, refusals."""

from dataclasses import replace

import pytest

from jaxformer import config as c
from jaxformer import zoo
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.load import build_config
from jaxformer.interop.save import choose_family

SIZES = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 10}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 14}


def read(model_type, **fields):
    """The configuration of a file with these fields; what is written of it reads the same."""
    heads = {} if "mamba" in model_type or model_type == "rwkv" else HEADS
    values = {"model_type": model_type, **SIZES, **heads, **fields}
    config = build_config(FAMILIES[model_type], values, where="here")
    family, written = choose_family(config, {}, model_type)
    assert build_config(family, written, where="") == config
    return config


def test_sizes_of_mamba():
    """The rank is a sixteenth of the width, rounded up; a width of its own takes precedence."""
    assert read("mamba").attention == c.SelectiveScan(width=64, step_rank=2)
    assert read("mamba", expand=3, time_step_rank="auto").attention.width == 96
    wide = read("mamba", expand=16, intermediate_size=50, time_step_rank=7, use_bias=True)
    biases = ("in", "out", "convolution")
    assert wide.attention == c.SelectiveScan(width=50, step_rank=7, biases=biases)
    assert wide.feed_forward == (c.NoFeedForward(),) and wide.head.tied
    falcon = read("falcon_mamba", tie_word_embeddings=False)
    assert falcon.attention.norm == c.RMSNorm(eps=1e-6, parameters="none")
    assert falcon.norm == c.RMSNorm(eps=1e-5) and not falcon.head.tied
    with pytest.raises(ValueError, match="hidden_act = 'gelu': .* must be 'silu'"):
        read("mamba", hidden_act="gelu")


def test_layers_of_jamba():
    config = read("jamba", num_experts=3)
    attending = [type(layer.attention) is c.MultiHead for layer in config.layers]
    assert attending == [i == 4 for i in range(10)]
    assert [layer.feed_forward.is_moe for layer in config.layers] == [False, True] * 5
    assert config.layers[4].attention.positions == (None,)
    assert config.attention[0].norm == c.RMSNorm() == config.norm
    periods = {"attn_layer_period": 3, "attn_layer_offset": 0, "expert_layer_period": 4}
    config = read("jamba", **periods)
    assert [type(x.attention) is c.MultiHead for x in config.layers] == [
        i % 3 == 0 for i in range(10)
    ]
    assert [i for i, x in enumerate(config.layers) if x.feed_forward.is_moe] == [1, 5, 9]
    assert {layer.feed_forward for layer in read("jamba", num_experts=1).layers} == {
        c.GLU(hidden_dim=14)
    }
    kinds = [layer.attention for layer in config.layers]
    kinds[1] = kinds[0]
    with pytest.raises(ValueError, match="The family jamba cannot represent"):
        choose_family(replace(config, attention=tuple(kinds)), {}, "jamba")
    with pytest.raises(ValueError, match="mamba_inner_layernorms = False: .* it must be"):
        read("jamba", mamba_inner_layernorms=False)
    with pytest.raises(ValueError, match="attn_layer_offset = 9: expected 0 to 7"):
        read("jamba", attn_layer_offset=9)


MAMBA = {"vocab_size": 50_280, "ssm_cfg": {}, "rms_norm": True, "pad_vocab_size_multiple": 8}
JAMBA = {"num_logits_to_keep": 1, "use_mamba_kernels": True, "mamba_inner_layernorms": True}
GRIFFIN = {"vocab_size": 256_000, "head_dim": 256, "num_key_value_heads": 1, "rope_theta": 1e4}
RWKV = {"vocab_size": 50_277, "attention_hidden_size": 768, "intermediate_size": 3072}
RELEASED = {  # sizes as the model pages on Hugging Face show them, and fields of odd names
    "mamba-130m": ("mamba", 24, 768, MAMBA | {"time_step_rank": 48}),
    "mamba-2.8b": ("mamba", 64, 2560, MAMBA | {"time_step_rank": 160, "dt_rank": 160}),
    "falcon-mamba-7b": ("falcon_mamba", 64, 4096, {"vocab_size": 65_024, "time_step_rank": 256})
    + ({"expand": 16, "intermediate_size": 8192, "tie_word_embeddings": False},),
    "jamba-v0.1": ("jamba", 32, 4096, JAMBA | {"vocab_size": 65_536, "mamba_dt_rank": 256})
    + ({"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336},),
    "rwkv-4-169m": ("rwkv", 12, 768, RWKV | {"context_length": 1024, "rescale_every": 6}),
    "recurrentgemma-2b": ("recurrent_gemma", 26, 2560, GRIFFIN | {"lru_width": 2560})
    + ({"num_attention_heads": 10, "intermediate_size": 15_360, "_block_types": None},),
    "recurrentgemma-9b": ("recurrent_gemma", 38, 4096, GRIFFIN | {"lru_width": 4096})
    + ({"num_attention_heads": 16, "intermediate_size": 24_576},),
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_file_is_the_preset(name):
    kind, num_layers, width, *fields = RELEASED[name]
    values = {"num_hidden_layers": num_layers, "hidden_size": width}
    for some in fields:
        values |= some
    assert build_config(FAMILIES[kind], values, where="here") == zoo.get(name)


def test_layers_of_rwkv():
    """Two for each block; the last norm has its own eps, whatever the file says."""
    config = read("rwkv", layer_norm_epsilon=1e-3)
    assert config.num_layers == 20 and config.embedding.norm == config.norm == c.LayerNorm(eps=1e-3)
    assert config.attention == (c.TimeMixing(width=32), c.ChannelMixing(hidden_dim=128))
    assert config.last_norm == c.LayerNorm() and read("rwkv").last_norm is None
    other = read("rwkv", attention_hidden_size=20, intermediate_size=22)
    assert other.attention == (c.TimeMixing(width=20), c.ChannelMixing(hidden_dim=22))
    for change in (
        {"num_layers": 5},
        {"attention": config.attention[::-1]},
        {"attention": (*config.attention, c.TimeMixing(width=20), config.attention[1])},
    ):
        with pytest.raises(ValueError, match="The family rwkv cannot represent"):
            choose_family(replace(config, **change), {}, "rwkv")


def test_layers_of_recurrent_gemma():
    config = read("recurrent_gemma")
    attending = [type(layer.attention) is c.MultiHead for layer in config.layers]
    assert attending == [i % 3 == 2 for i in range(10)]
    recurrent, heads = config.attention[1:3]
    assert recurrent == c.RGLRU(num_heads=4, head_dim=8)
    assert (heads.windows, heads.biases, heads.positions) == (
        (2048,),
        ("out",),
        (c.Rope(fraction=0.5),),
    )
    assert config.feed_forward == (c.GLU(hidden_dim=7, activation="gelu_tanh", bias=True),)
    assert config.embedding.scale == 5.65625  # of 5.656854, in bfloat16
    other = read("recurrent_gemma", lru_width=20, block_types=["attention", "recurrent"])
    assert [type(layer.attention) for layer in other.layers] == [c.MultiHead, c.RGLRU] * 5
    assert other.attention[1].head_dim == 5
    refused = {
        r"lru_width = 30: the 4 heads must divide it": {"lru_width": 30},
        "block_types = .* expected recurrent or attention for each layer": {
            "block_types": ["recurrent", "mamba"]
        },
    }
    for message, fields in refused.items():
        with pytest.raises(ValueError, match=message):
            read("recurrent_gemma", **fields)
