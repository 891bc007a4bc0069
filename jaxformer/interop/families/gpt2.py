"""GPT, GPT-2, GPT-Neo, StarCoder and CTRL: decoders with positions in the embedding, and biases.

GPT and GPT-2 have Conv1D kernels, stored as [inputs, outputs].
"""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop import transforms as t
from jaxformer.interop.config_fields import (
    Change,
    Derived,
    Field,
    Fields,
    HeadsField,
    Options,
    Repeated,
    Unused,
    Written,
    fixed,
    four_widths,
    root_of_width,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.llama_like import QKV, heads_of
from jaxformer.interop.family import Family
from jaxformer.zoo.gpt import GPT_1, GPT_2, GPT_NEO
from jaxformer.zoo.sizes import like

LAYER = "transformer.h.{layer}"
IGNORED_TENSORS = (
    rf"{LAYER}\.attn\.(attention\.)?(masked_)?bias".format(layer=r"\d+"),
    r"transformer\.position_ids",
)
# Checkpoints without the head lack the prefix.
KEY_RENAMES = ((r"^(?!transformer\.|lm_head\.)", "transformer."),)
GPT_ACTIVATIONS: dict[str, str] = {
    "gelu": "gelu_tanh",  # in GPT, this name means the approximation
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def conv1d_rules(theirs: str, ours: str, *, input_axes: int = 1) -> tuple[m.MappingRule, ...]:
    """Mapping rules of a GPT-2 Conv1D."""
    kernel = t.CONV1D if input_axes == 1 else t.CONV1D_OF_HEADS
    return (
        m.MappingRule(f"{theirs}.weight", f"{ours}/kernel", kernel),
        m.MappingRule(f"{theirs}.bias", f"{ours}/bias"),
    )


LAYERS = (
    *m.fused_rules(f"{LAYER}.attn.c_attn", "attention", QKV, t.CONV1D),
    *conv1d_rules(f"{LAYER}.attn.c_proj", "attention/out", input_axes=2),
    *conv1d_rules(f"{LAYER}.mlp.c_fc", "feed_forward/up"),
    *conv1d_rules(f"{LAYER}.mlp.c_proj", "feed_forward/down"),
)
POSITIONS = "embedding/positions/embedding"
TOP_LEVEL = (
    *m.top_level_rules("transformer.wte", "transformer.ln_f"),
    m.MappingRule("transformer.wpe.weight", POSITIONS),
)
NORMS = m.layer_norm_rules(LAYER, pre_attention_norm="ln_1", pre_feed_forward_norm="ln_2")


def sizes(width: int = 768, depth: int = 12, num_heads: int = 12) -> Fields:
    """Fields of sizes with these defaults, and of the head."""
    return (
        Field("vocab_size", "vocab_size"),
        Field("n_embd", "model_dim", width),
        Field("n_layer", "num_layers", depth),
        HeadsField("n_head", default=num_heads, width="n_embd"),
        Field("tie_word_embeddings", "head.tied", True),
        *fixed(n_special=0),
        Written(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    )


EPS = Field("layer_norm_epsilon", "norm.eps", 1e-5)
GPT2_FIELDS: Fields = (
    *(*sizes(), EPS),
    Field("n_positions", "embedding.positions.max_length", 1024),
    Field("n_inner", "feed_forward.hidden_dim", four_widths),
    Field("scale_attn_weights", "attention.scale", True, choices={True: None, False: 1.0}),
)


class ScaleByLayer:
    """``scale_attn_by_inverse_layer_idx``: layer l divides its scores by l, counted from 1."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The scales of the layers."""
        layers = range(1, options["num_layers"] + 1)

        def by_layer(kind: c.MultiHead) -> tuple[c.MultiHead, ...]:
            scale = kind.key_dim**-0.5 if kind.scale is None else kind.scale
            return tuple(replace(kind, scale=scale / number) for number in layers)

        is_by_layer = reader.boolean("scale_attn_by_inverse_layer_idx", False)
        return {"attention": Change(by_layer)} if is_by_layer else {}

    def write(self, model: c.TransformerConfig) -> Options:
        """The field, if the scales differ."""
        kinds: list[Any] = [layer.attention for layer in model.layers]
        differ = len({kind.scale for kind in kinds}) > 1
        return {"scale_attn_by_inverse_layer_idx": True} if differ else {}


class MultiQuery:
    """Whether all heads share one head of keys and values."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        shared = reader.boolean("multi_query", True)
        return {"attention.num_kv_heads": 1 if shared else options["attention.num_heads"]}

    def write(self, model: c.TransformerConfig) -> Options:
        return {"multi_query": heads_of(model).num_kv_heads == 1}


class LocalLayers:
    """``attention_types``: which layers are global, and which have a window."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        size, num_layers = reader.integer("window_size", 256), options["num_layers"]
        words = self.read_words(reader, num_layers)
        if len(words) != num_layers or not {*words} <= {"global", "local"}:
            problem = f"expected words, global or local, with counts, for {num_layers} layers."
            reader.add_problem("attention_types", problem)
            return {}
        reader.require_value("attention_layers", words, reason="attention_types differs.")
        return {"attention.windows": tuple(size if x == "local" else None for x in words)}

    def read_words(self, reader: ConfigReader, num_layers: int) -> list[str]:
        """The word of each layer, or some more; none if the field is of another form."""
        types: Any = reader.get("attention_types")
        types = [[["global", "local"], 12]] if types is None else types
        try:
            most = num_layers + 1
            return [word for words, count in types for word in [*words] * min(count, most)]
        except (TypeError, ValueError):
            return []

    def write(self, model: c.TransformerConfig) -> Options:
        """A word for each layer, and the window."""
        windows = [layer.window for layer in model.layers]
        words = ["global" if window is None else "local" for window in windows]
        size = next((window for window in windows if window is not None), 256)
        return {"attention_types": [[words, 1]], "window_size": size}


CTRL = like(
    GPT_2,
    norm=c.LayerNorm(eps=1e-6),
    embedding=c.Embedding(positions=c.Sinusoid(layout="halves")),
    feed_forward=(c.MLP(hidden_dim=1, activation="relu", bias=True),),
    head=c.LMHead(bias=True),
)
GPT2_FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    GPT_2,
    (
        *GPT2_FIELDS,
        Field("activation_function", "feed_forward.activation", "gelu_new"),
        *(ScaleByLayer(), Unused("reorder_and_upcast_attn")),  # affects the precision only
    ),
    m.decoder_mapping(*TOP_LEVEL, *LAYERS, *NORMS),
    attention_types=(c.MultiHead, c.MultiHead),
    ignored_tensors=IGNORED_TENSORS,
    key_renames=KEY_RENAMES,
)
FAMILIES = (
    GPT2_FAMILY,
    replace(GPT2_FAMILY, model_type="gpt-sw3"),
    # As GPT-2, except: norms after the residual sums, networks four times as wide as the model.
    Family(
        "openai-gpt",
        "OpenAIGPTLMHeadModel",
        GPT_1,
        (
            *(*sizes(), EPS),
            Field("n_positions", "embedding.positions.max_length", 512),
            Derived("feed_forward.hidden_dim", four_widths),
            Field("afn", "feed_forward.activation", "gelu", choices=GPT_ACTIVATIONS),
        ),
        m.decoder_mapping(
            *m.top_level_rules("transformer.tokens_embed"),
            m.MappingRule("transformer.positions_embed.weight", POSITIONS),
            *LAYERS,
            *m.layer_norm_rules(LAYER, post_attention_norm="ln_1", post_feed_forward_norm="ln_2"),
        ),
        ignored_tensors=IGNORED_TENSORS,
        key_renames=KEY_RENAMES,
    ),
    # As GPT-2, except: unscaled scores, only output biases, layers with a window.
    Family(
        "gpt_neo",
        "GPTNeoForCausalLM",
        GPT_NEO,
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim", 2048),
            Field("num_layers", "num_layers", 24),
            HeadsField("num_heads", default=16),
            *(LocalLayers(), EPS),
            Field("max_position_embeddings", "embedding.positions.max_length", 2048),
            Field("intermediate_size", "feed_forward.hidden_dim", four_widths),
            Field("activation_function", "feed_forward.activation", "gelu_new"),
            Field("tie_word_embeddings", "head.tied", True),
        ),
        m.decoder_mapping(
            *(*TOP_LEVEL, *NORMS),
            *m.attention_rules(f"{LAYER}.attn.attention", out="out_proj"),
            *m.branch_rules(f"{LAYER}.mlp", "feed_forward", up="c_fc", down="c_proj"),
        ),
        ignored_tensors=IGNORED_TENSORS,
        key_renames=KEY_RENAMES,
    ),
    # As GPT-2, except: one head of keys and values, kernels stored as [outputs, inputs].
    Family(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        GPT_2,
        (
            *(*GPT2_FIELDS, MultiQuery()),
            Repeated("num_key_value_heads", lambda x: x["attention.num_kv_heads"]),
            Field("activation_function", "feed_forward.activation", "gelu_pytorch_tanh"),
            # These affect the precision, or the memory of early code.
            Unused("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
            Unused("inference_runner", "pad_key_length", "pre_allocate_kv_cache"),
            Unused("max_batch_size", "validate_runner_input"),
        ),
        m.decoder_mapping(
            *(*TOP_LEVEL, *NORMS),
            *m.fused_rules(f"{LAYER}.attn.c_attn", "attention", QKV, *t.BY_GROUP),
            *m.branch_rules(f"{LAYER}.attn", "attention", out="c_proj"),
            *m.branch_rules(f"{LAYER}.mlp", "feed_forward", up="c_fc", down="c_proj"),
        ),
        ignored_tensors=IGNORED_TENSORS,
        key_renames=KEY_RENAMES,
    ),
    # As GPT-2, except: sinusoids, ReLU, a scaled embedding, a bias of the head.
    Family(
        "ctrl",
        "CTRLLMHeadModel",
        CTRL,
        (
            *sizes(1280, 48, 16),
            Field("dff", "feed_forward.hidden_dim", 8192),
            Derived("embedding.scale", root_of_width),
            # The last norm alone has the eps of the file.
            *fixed(layer_norm_epsilon=1e-6),
            Unused("n_positions"),  # there is no position table
        ),
        m.decoder_mapping(
            *m.top_level_rules("transformer.w", "transformer.layernorm"),
            *m.layer_norm_rules(
                LAYER, pre_attention_norm="layernorm1", pre_feed_forward_norm="layernorm2"
            ),
            *m.branch_rules(
                f"{LAYER}.multi_head_attention",
                "attention",
                **{"query": "Wq", "key": "Wk", "value": "Wv", "out": "dense"},
            ),
            *m.branch_rules(f"{LAYER}.ffn", "feed_forward", up="0", down="2"),
        ),
        key_renames=KEY_RENAMES,
        length_name="n_positions",
    ),
)
