"""GPT and GPT-2: learned positions, biases, Conv1D kernels stored as [inputs, outputs]."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop import transforms as t
from jaxformer.interop.config_fields import (
    Derived,
    Field,
    Fields,
    HeadsField,
    Unused,
    Written,
    fixed,
    four_widths,
    heads,
    template,
)
from jaxformer.interop.families.llama_like import ALL_BIASES, QKV
from jaxformer.interop.family import Family

LAYER = "transformer.h.{layer}"
IGNORED_TENSORS = (
    rf"{LAYER}\.attn\.(masked_)?bias".format(layer=r"\d+"),
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
    kernel = t.LinearKernel(input_axes=input_axes, outputs_first=False)
    return (
        m.MappingRule(f"{theirs}.weight", f"{ours}/kernel", kernel),
        m.MappingRule(f"{theirs}.bias", f"{ours}/bias"),
    )


LAYERS = (
    *m.fused_rules(
        f"{LAYER}.attn.c_attn",
        "attention",
        QKV,
        t.Fused(part=t.LinearKernel(outputs_first=False), axis=1),
    ),
    *conv1d_rules(f"{LAYER}.attn.c_proj", "attention/out", input_axes=2),
    *conv1d_rules(f"{LAYER}.mlp.c_fc", "feed_forward/up"),
    *conv1d_rules(f"{LAYER}.mlp.c_proj", "feed_forward/down"),
)
POSITIONS = "embedding/positions/embedding"
SIZES: Fields = (
    Field("vocab_size", "vocab_size"),
    Field("n_embd", "model_dim", 768),
    Field("n_layer", "num_layers", 12),
    HeadsField("n_head", default=12, width="n_embd"),
    Field("layer_norm_epsilon", "norm.eps", 1e-5),
    Field("tie_word_embeddings", "head.tied", True),
    *fixed(n_special=0),
    Written(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
)
GPT2 = template(
    norm=c.LayerNorm(),
    embedding=c.Embedding(positions=c.Learned(max_length=1)),
    attention=heads(positions=(None,), biases=ALL_BIASES),
    feed_forward=(c.MLP(hidden_dim=1, bias=True),),
)
FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        GPT2,
        (
            *SIZES,
            Field("n_positions", "embedding.positions.max_length", 1024),
            Field("n_inner", "feed_forward.hidden_dim", four_widths),
            Field("activation_function", "feed_forward.activation", "gelu_new"),
            Field("scale_attn_weights", "attention.scale", True, choices={True: None, False: 1.0}),
            *fixed(scale_attn_by_inverse_layer_idx=False),
            Unused("reorder_and_upcast_attn"),  # affects the precision only
        ),
        m.decoder_mapping(
            *m.top_level_rules("transformer.wte", "transformer.ln_f"),
            m.MappingRule("transformer.wpe.weight", POSITIONS),
            *LAYERS,
            *m.layer_norm_rules(LAYER, pre_attention_norm="ln_1", pre_feed_forward_norm="ln_2"),
        ),
        ignored_tensors=IGNORED_TENSORS,
        key_renames=KEY_RENAMES,
    ),
    # As GPT-2, except: norms after the residual sums, networks four times as wide as the model.
    Family(
        "openai-gpt",
        "OpenAIGPTLMHeadModel",
        replace(GPT2, norm_placement="post", final_norm=False),
        (
            *SIZES,
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
)
