"""GPT, T5, Marian and their like: words of config.json, refusals, other spellings of tensors."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import zoo
from jaxformer.config import GLU, MLP, Alibi, Learned, Sinusoid
from jaxformer.interop import load_pretrained, save_pretrained
from jaxformer.interop.config_comparison import canonical
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.families.gptj import rotary_fraction
from jaxformer.interop.load import build_config
from jaxformer.interop.parameter_shapes import parameter_shapes
from jaxformer.interop.save import choose_family
from tests.interop.golden_files import read_golden as read_golden
from tests.interop.golden_files import write_folder
from tests.small_models import jitted_forward, random_params

# What the first files of each kind say beside sizes, as they were released.
RELEASED = {
    "gpt2": {"n_ctx": 16, "n_positions": 16, "n_embd": 12, "n_head": 3, "n_layer": 2}
    | {"activation_function": "gelu_new", "reorder_and_upcast_attn": False},
    "openai-gpt": {"afn": "gelu", "n_ctx": 16, "n_positions": 16, "n_special": None}
    | {"n_embd": 12, "n_head": 3, "n_layer": 2, "predict_special_tokens": True},
    "gptj": {"rotary": True, "rotary_dim": 2, "scale_attn_weights": True, "n_inner": None}
    | {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 16},
    "gpt_neox": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    | {"intermediate_size": 20, "rotary_emb_base": 10000, "rotary_pct": 0.25}
    | {"hidden_act": "gelu_fast", "use_parallel_residual": True, "max_position_embeddings": 16},
    "bloom": {"n_embed": 12, "num_attention_heads": 3, "n_layer": 2, "n_inner": None}
    | {"offset_alibi": 100, "skip_bias_add": True, "skip_bias_add_qkv": False}
    | {"attention_softmax_in_fp32": True, "masked_softmax_fusion": True, "seq_length": 16}
    | {"bias_dropout_fusion": True, "apply_residual_connection_post_layernorm": False},
    "opt": {"hidden_size": 12, "word_embed_proj_dim": 6, "num_attention_heads": 3}
    | {"num_hidden_layers": 2, "ffn_dim": 20, "do_layer_norm_before": False}
    | {"max_position_embeddings": 16, "activation_function": "relu", "prefix": "</s>"},
    "falcon": {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
    | {"alibi": False, "bias": False, "multi_query": True, "parallel_attn": True}
    | {"new_decoder_architecture": False, "apply_residual_connection_post_layernorm": False},
    "t5": {"d_model": 12, "d_kv": 5, "d_ff": 20, "num_heads": 3, "num_layers": 2}
    | {"n_positions": 512, "output_past": True, "is_encoder_decoder": True}
    | {"relative_attention_num_buckets": 32, "decoder_start_token_id": 0},
    "mt5": {"d_model": 12, "d_kv": 5, "d_ff": 20, "num_heads": 3, "num_layers": 2}
    | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
RELEASED |= {
    "gpt-sw3": RELEASED["gpt2"],
    "gpt_neo": {"hidden_size": 12, "num_heads": 3, "num_layers": 4, "intermediate_size": None}
    | {"attention_types": [[["global", "local"], 2]], "window_size": 5, "embed_dropout": 0}
    | {"attention_layers": ["global", "local"] * 2, "max_position_embeddings": 16},
    "gpt_bigcode": {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 16, "n_inner": 48}
    | {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True}
    | {"inference_runner": 0, "pad_key_length": True, "validate_runner_input": True},
    "mpt": {"d_model": 12, "n_heads": 3, "n_layers": 2, "max_seq_len": 16, "no_bias": True}
    | {"attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "qk_ln": False}}
    | {"learned_pos_emb": True, "norm_type": "low_precision_layernorm", "verbose": 0}
    | {"expansion_ratio": 4, "logit_scale": None, "init_config": {"name": "kaiming_normal_"}},
    "codegen": {"n_embd": 12, "n_head": 3, "n_layer": 2, "rotary_dim": 2, "n_positions": 16}
    | {"scale_attn_weights": True, "n_inner": None},
    "biogpt": {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
    | {"intermediate_size": 20, "max_position_embeddings": 16, "layer_norm_eps": 1e-12},
    "xglm": {"d_model": 12, "attention_heads": 3, "num_layers": 2, "ffn_dim": 20}
    | {"pad_token_id": 1, "scale_embedding": True},
    "ctrl": {"n_embd": 12, "n_head": 3, "n_layer": 2, "dff": 20, "n_positions": 50_000}
    | {"layer_norm_epsilon": 1e-6},
}
TRANSLATOR = {"d_model": 12, "encoder_layers": 2, "decoder_layers": 1, "scale_embedding": True}
TRANSLATOR |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
TRANSLATOR |= {"encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "normalize_before": False}
TRANSLATOR |= {"add_final_layer_norm": False, "static_position_embeddings": True}
RELEASED["marian"] = TRANSLATOR | {"activation_function": "swish", "num_hidden_layers": 2}
RELEASED["m2m_100"] = TRANSLATOR | {"normalize_before": True, "add_final_layer_norm": True}
RELEASED["pegasus"] = RELEASED["m2m_100"] | {"force_bos_token_to_be_generated": False}
RELEASED["fsmt"] = TRANSLATOR | {"src_vocab_size": 11, "tgt_vocab_size": 13, "langs": ["en", "de"]}


def read(kind, **fields):
    values = {"model_type": kind, "vocab_size": 13} | RELEASED[kind] | fields
    if kind == "fsmt":
        del values["vocab_size"]
    return build_config(FAMILIES[kind], values, where="here")


@pytest.mark.parametrize("kind", ["marian", "fsmt", "m2m_100", "pegasus"])
def test_stacks_may_differ(kind):
    """As the translators of WMT 2019, whose encoders are wider."""
    config = read(kind, encoder_ffn_dim=40, encoder_attention_heads=2)
    assert config.feed_forward[0].hidden_dim == 20 and config.attention.num_heads == 3
    encoder = config.encoder_layers[0]
    assert encoder.feed_forward.hidden_dim == 40
    assert (encoder.attention.num_heads, encoder.attention.head_dim) == (2, 6)
    family, values = choose_family(config, {})
    assert build_config(family, values, where="") == config
    shapes = parameter_shapes(config)
    path = "layers/layer_0/feed_forward/up/kernel"
    assert shapes[f"encoder/{path}"][1:] == (12, 40) and shapes[f"decoder/{path}"][1:] == (12, 20)
    spelled_out = replace(
        config, topology=replace(config.topology, attention=encoder.attention, feed_forward=None)
    )
    both = replace(spelled_out, attention=encoder.attention)
    assert canonical(both).topology.attention is None


def test_words_that_mean_something_else_in_each_family():
    assert read("gpt2").feed_forward == (MLP(hidden_dim=48, activation="gelu_tanh", bias=True),)
    assert read("openai-gpt").feed_forward[0].activation == "gelu_tanh"
    assert read("openai-gpt", afn="swish").feed_forward[0].activation == "silu"
    assert read("falcon").feed_forward[0].activation == "gelu"
    assert read("gpt_neox").feed_forward[0].activation == "gelu_tanh"
    assert read("gpt_neox", hidden_act="gelu").feed_forward[0].activation == "gelu"
    assert read("t5").feed_forward == (MLP(hidden_dim=20, activation="relu"),)
    assert read("t5", feed_forward_proj="gelu").feed_forward[0].activation == "gelu"
    assert read("t5", feed_forward_proj="gated-silu").feed_forward[0].activation == "silu"
    assert read("mt5").feed_forward == (GLU(hidden_dim=20, activation="gelu_tanh"),)
    assert read("t5", dense_act_fn="silu", is_gated_act=True).feed_forward == (
        GLU(hidden_dim=20, activation="silu"),
    )
    assert read("marian").feed_forward[0].activation == "silu"


def test_positions_of_each_family():
    assert read("gpt2").embedding.positions == Learned(max_length=16)
    assert read("opt").embedding.positions == Learned(max_length=16, offset=2)
    assert read("marian").embedding.positions == Sinusoid(layout="halves")
    assert read("fsmt").embedding.positions == Sinusoid(layout="tensor2tensor", offset=2)
    assert read("fsmt", pad_token_id=0).embedding.positions.offset == 1
    assert read("m2m_100", pad_token_id=3).embedding.positions.offset == 4
    assert read("pegasus").embedding.positions == Sinusoid(layout="halves")
    assert read("xglm").embedding.positions == Sinusoid(layout="tensor2tensor", offset=2)
    assert read("ctrl").embedding.positions == Sinusoid(layout="halves")
    assert read("biogpt").embedding.positions == Learned(max_length=16, offset=2)
    assert read("mpt").attention.positions == (Alibi(),)
    assert read("gptj").attention.positions[0].rotary_dim(4) == 2
    assert read("codegen").attention.positions[0].rotary_dim(4) == 2
    assert read("gpt_neox").attention.positions[0].fraction == 0.25
    assert read("falcon", alibi=True).attention.positions == (Alibi(scale=0.5),)


def test_shares_of_a_head_make_the_number_of_features_they_say():
    for head_dim in range(2, 200):
        for width in range(2, head_dim + 1, 2):
            assert int(head_dim * rotary_fraction(width, head_dim)) == width


def test_heads_and_norms_of_falcons():
    new = {"new_decoder_architecture": True, "num_attention_heads": 6, "num_kv_heads": 2}
    kinds = {
        (1, "parallel_shared_norm"): {},
        (3, "parallel_shared_norm"): {"multi_query": False},
        (3, "serial"): {"multi_query": False, "parallel_attn": False},
        (2, "parallel"): new,
        (2, "parallel_shared_norm"): {**new, "num_ln_in_parallel_attn": 1},
    }
    for (kv_heads, block), fields in kinds.items():
        config = read("falcon", **fields)
        assert (config.attention.num_kv_heads, config.block) == (kv_heads, block)


def test_layers_of_gpt_neo_with_a_window():
    config = read("gpt_neo")
    assert config.attention.windows == (None, 5) and config.attention.scale == 1
    types = [[["global"], 1], [["local"], 2], [["global"], 1]]
    other = read("gpt_neo", attention_types=types, attention_layers=None)
    assert [layer.window for layer in other.layers] == [None, 5, 5, None]
    plain = read("gpt_neo", attention_types=[[["global"], 4]], attention_layers=["global"] * 4)
    assert plain.attention.windows == (None,)
    assert read("gpt_neo", num_layers=24, attention_types=None, attention_layers=None) == replace(
        config, num_layers=24
    )


def test_heads_of_starcoder():
    assert read("gpt_bigcode").attention.num_kv_heads == 1
    assert read("gpt_bigcode", multi_query=False).attention.num_kv_heads == 3
    assert read("gpt-sw3") == read("gpt2")


def test_words_of_mpt_that_mean_none():
    kind = RELEASED["mpt"]["attn_config"]
    assert read("mpt", attn_config={**kind, "clip_qkv": 0}).attention.clip_qkv is None
    given = read("mpt", attn_config={**kind, "clip_qkv": 6, "softmax_scale": 0.25}).attention
    assert (given.clip_qkv, given.scale) == (6.0, 0.25)
    assert read("mpt", attn_config=None).attention.scale is None


def test_scaled_heads_of_t5():
    """Released files tie and scale, or do neither; transformers 5 writes two words for it."""
    tied, untied = read("t5").head, read("t5", tie_word_embeddings=False).head
    assert (tied.tied, untied.tied) == (True, False)
    assert (tied.multiplier, untied.multiplier) == (12**-0.5, 1.0)
    new = read("t5", tie_word_embeddings=True, scale_decoder_outputs=False).head
    assert (new.tied, new.multiplier) == (True, 1.0)
    assert read("mt5", tie_word_embeddings=True).head.multiplier == 1.0


def test_an_opt_without_biases_scales_or_final_norm():
    config = read("opt", enable_bias=False, layer_norm_elementwise_affine=False)
    assert config.attention.biases == () and not config.feed_forward[0].bias
    assert (config.norm_placement, config.final_norm, config.embedding.dim) == ("post", False, 6)
    assert config.norm.parameters == "none"
    late = read("opt", do_layer_norm_before=True, _remove_final_layer_norm=True)
    assert (late.norm_placement, late.final_norm) == ("pre", False)


REFUSED = [
    ("gptj", {"rotary_dim": 6}, "rotary_dim = 6: expected an even number up to head_dim=4."),
    ("gptj", {"rotary_dim": 3}, "rotary_dim = 3: expected an even number up to head_dim=4."),
    ("gptj", {"rotary_dim": None}, "rotary_dim = None: it must be the number of rotated features"),
    ("bloom", {"n_inner": 40}, "n_inner = 40: not supported by jaxformer; it must be 48."),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm = True"),
    ("falcon", {"multi_query": False, "num_kv_heads": 1}, "num_kv_heads = 1: without multi_query"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2: expected 1, without"),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
        "num_ln_in_parallel_attn = 3: expected 1 or 2.",
    ),
    (
        "falcon",
        {"new_decoder_architecture": True, "parallel_attn": False},
        "parallel_attn = False: with new_decoder_architecture it must be True.",
    ),
    (
        "falcon",
        {"alibi": True, "num_attention_heads": 12},
        "alibi = True: transformers rounds the ALiBi slopes of 12 heads to bfloat16",
    ),
    ("t5", {"feed_forward_proj": "double-relu"}, "'double-relu': expected an activation, or gated"),
    ("t5", {"feed_forward_proj": "gated-mish"}, "'gated-mish': expected one of silu, swish"),
    ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder = False"),
    ("marian", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
    ("marian", {"decoder_vocab_size": 17}, "decoder_vocab_size = 17"),
    ("marian", {"encoder_attention_heads": 5}, "attention_heads = 5: it must divide d_model, 12."),
    ("gpt2", {"n_embd": 3, "n_head": 4}, "n_head = 4: it must divide n_embd, 3."),
    ("fsmt", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    ("fsmt", {"normalize_before": True}, "normalize_before = True"),
    ("pegasus", {"normalize_before": False}, "normalize_before = False"),
    ("m2m_100", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
    (
        "xglm",
        {"pad_token_id": 2},
        "pad_token_id = 2: not supported by jaxformer; it must be 0 or 1",
    ),
    ("ctrl", {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon = 1e-05: not supported"),
    ("codegen", {"rotary_dim": 3}, "rotary_dim = 3: expected an even number up to head_dim=4."),
    ("gpt_neo", {"num_layers": 3}, "expected words, global or local, with counts, for 3 layers."),
    (
        "gpt_neo",
        {"attention_types": [[["global"], 10**9]], "attention_layers": None},
        "with counts, for 4 layers.",
    ),
    ("gpt_neo", {"attention_types": "local"}, "attention_types = 'local': expected words"),
    ("gpt_neo", {"attention_layers": ["local"] * 4}, "attention_layers = ['local', "),
    ("gpt_bigcode", {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi = False"),
    ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max = 16"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = 'inv_sqrt_d_model'"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type = 'rmsnorm'"),
]


@pytest.mark.parametrize("kind, fields, message", REFUSED)
def test_what_is_not_honoured_is_named(kind, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(kind, **fields)


def unprefixed(tensors):
    """As saved without the head: no prefix, and with the masks that old code kept."""
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 20, 20), np.uint8) for i in range(2)}
    return bare | masks | {"h.0.attn.masked_bias": np.float32(-1e9)}


def stripped(tensors):
    return {name.removeprefix("transformer."): x for name, x in tensors.items()}


def headless(tensors):
    return {name.removeprefix("model."): x for name, x in tensors.items()}


def with_copies(tensors):
    """As first released: the shared table three times, and a bias that no layer reads."""
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = {f"{stack}.embed_tokens.weight": tensors["shared.weight"] for stack in STACKS}
    return tensors | copies | {unused: np.ones((8, 4), np.float32)}


def with_sinusoids(tensors):
    waves = np.ones((34, 16), np.float32)
    return tensors | {f"model.{stack}.embed_positions.weight": waves for stack in STACKS}


STACKS = ("encoder", "decoder")
SPELLED = {
    "gpt2": unprefixed,
    "openai_gpt": unprefixed,
    "bloom": stripped,
    "opt": headless,
    "t5": with_copies,
    "marian": with_sinusoids,
    "fsmt": with_sinusoids,
    "pegasus": with_sinusoids,
    "gpt_bigcode": unprefixed,
    "gpt_neo": stripped,
    "ctrl": stripped,
}


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.slow(but=["openai_gpt", "opt"])
def test_files_that_spell_tensors_in_another_way(name, tmp_path):
    golden = read_golden(name)
    other = golden._replace(tensors=SPELLED[name](golden.tensors))
    assert set(other.tensors) != set(golden.tensors)
    expected = load_pretrained(write_folder(golden, tmp_path / "one"))
    actual = load_pretrained(write_folder(other, tmp_path / "other"))
    assert actual.config == expected.config
    assert jax.tree.all(jax.tree.map(np.array_equal, actual.params, expected.params))


def test_embeddings_are_scaled_where_the_file_says_so():
    assert math.isclose(read("marian").embedding.scale, 12**0.5)
    assert read("fsmt", scale_embedding=False).embedding.scale == 1.0


@pytest.mark.slow
def test_a_head_of_unit_rows_is_saved_as_it_is(tmp_path):
    """Baichuan 2 divides them at each call: what training made of their lengths has no effect."""
    config = zoo.get("baichuan-2-7b").tiny()
    params, tokens = random_params(config), jnp.arange(6)[None]
    save_pretrained(tmp_path, config, params)
    again, read = load_pretrained(tmp_path)
    assert again == config
    np.testing.assert_array_equal(read["head"]["kernel"], params["head"]["kernel"])
    logits = jitted_forward(config)(params, tokens)
    params["head"] = {"kernel": 3 * params["head"]["kernel"]}
    np.testing.assert_allclose(jitted_forward(config)(params, tokens), logits, atol=1e-5)
