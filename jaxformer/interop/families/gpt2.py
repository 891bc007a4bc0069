"""GPT and GPT-2: learned positions, biases, Conv1D kernels stored as [inputs, outputs]."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, norm_rules
from jaxformer.interop.transforms import Flatten, Fused, LinearKernel, Transform

LAYER = "transformer.h.{layer}"
QKV = ("attention/query", "attention/key", "attention/value")
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


def conv1d_rules(theirs: str, ours: str, *, input_axes: int = 1) -> tuple[MappingRule, MappingRule]:
    """Mapping rules of a GPT-2 Conv1D."""
    kernel = LinearKernel(input_axes=input_axes, outputs_first=False)
    return MappingRule(f"{theirs}.weight", f"{ours}/kernel", kernel), MappingRule(
        f"{theirs}.bias", f"{ours}/bias"
    )


def fused_qkv_rules(
    theirs: str, kernels: Transform, biases: Transform
) -> tuple[MappingRule, MappingRule]:
    """Mapping rules of a fused QKV projection."""
    return (
        MappingRule(f"{theirs}.weight", tuple(f"{part}/kernel" for part in QKV), kernels),
        MappingRule(f"{theirs}.bias", tuple(f"{part}/bias" for part in QKV), biases),
    )


LAYERS = (
    *fused_qkv_rules(
        f"{LAYER}.attn.c_attn",
        Fused(part=LinearKernel(outputs_first=False), axis=1),
        Fused(part=Flatten()),
    ),
    *conv1d_rules(f"{LAYER}.attn.c_proj", "attention/out", input_axes=2),
    *conv1d_rules(f"{LAYER}.mlp.c_fc", "feed_forward/up"),
    *conv1d_rules(f"{LAYER}.mlp.c_proj", "feed_forward/down"),
)
HEAD = MappingRule("lm_head.weight", "head/kernel", LinearKernel())
GPT2_TABLE = ParamMapping(
    top_level=(
        MappingRule("transformer.wte.weight", "embedding/tokens/embedding"),
        MappingRule("transformer.wpe.weight", "embedding/positions/embedding"),
        *norm_rules("transformer.ln_f", "decoder/final_norm"),
        HEAD,
    ),
    stacks={
        "decoder": (
            *LAYERS,
            *norm_rules(f"{LAYER}.ln_1", "pre_attention_norm"),
            *norm_rules(f"{LAYER}.ln_2", "pre_feed_forward_norm"),
        )
    },
)
GPT_TABLE = ParamMapping(
    top_level=(
        MappingRule("transformer.tokens_embed.weight", "embedding/tokens/embedding"),
        MappingRule("transformer.positions_embed.weight", "embedding/positions/embedding"),
        HEAD,
    ),
    stacks={
        "decoder": (
            *LAYERS,
            *norm_rules(f"{LAYER}.ln_1", "post_attention_norm"),
            *norm_rules(f"{LAYER}.ln_2", "post_feed_forward_norm"),
        )
    },
)


def read_gpt2(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a gpt2 model."""
    reader.require_value("scale_attn_by_inverse_layer_idx", False)
    reader.get("reorder_and_upcast_attn")  # affects the precision only
    scaled = reader.boolean("scale_attn_weights", True)
    hidden_dim = reader.integer("n_inner", 4 * reader.integer("n_embd", 768))
    activation = reader.choice("activation_function", "gelu_new", HF_ACTIVATIONS)
    return _read(
        reader,
        default_length=1024,
        scale=None if scaled else 1.0,
        feed_forward=(c.MLP(hidden_dim=hidden_dim, activation=activation, bias=True),),
    )


def read_gpt(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an openai-gpt model."""
    hidden_dim = 4 * reader.integer("n_embd", 768)
    activation = reader.choice("afn", "gelu", GPT_ACTIVATIONS)
    return _read(
        reader,
        default_length=512,
        feed_forward=(c.MLP(hidden_dim=hidden_dim, activation=activation, bias=True),),
        norm_placement="post",
        final_norm=False,
    )


def write_gpt2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A gpt2's configuration from ours."""
    fields, branch = _write(config), config.feed_forward[0]
    if fields is None or not isinstance(branch, c.MLP):
        return None
    return {
        **fields,
        "n_inner": branch.hidden_dim,
        "activation_function": hf_activation_name(branch.activation),
        "scale_attn_weights": config.multi_head.scale != 1,
    }


def write_gpt(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An openai-gpt's configuration from ours."""
    fields, branch = _write(config), config.feed_forward[0]
    if fields is None or not isinstance(branch, c.MLP):
        return None
    names = {ours: name for name, ours in reversed(GPT_ACTIVATIONS.items())}
    return {**fields, "afn": names.get(branch.activation, branch.activation)}


def _read(
    reader: ConfigReader, *, default_length: int, scale: float | None = None, **fields: Any
) -> c.TransformerConfig:
    """Attributes of both; `default_length` is the default number of positions."""
    reader.require_value("n_special", 0)
    model_dim, heads = reader.integer("n_embd", 768), reader.positive_integer("n_head", 12)
    return c.TransformerConfig(
        vocab_size=reader.integer("vocab_size"),
        model_dim=model_dim,
        num_layers=reader.integer("n_layer", 12),
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=model_dim // heads,
            positions=(None,),
            scale=scale,
            biases=ALL_BIASES,
        ),
        norm=c.LayerNorm(eps=reader.number("layer_norm_epsilon", 1e-5)),
        embedding=c.Embedding(
            positions=c.Learned(max_length=reader.integer("n_positions", default_length))
        ),
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", True)),
        **fields,
    )


def _write(config: c.TransformerConfig) -> dict[str, Any] | None:
    positions = config.embedding.positions
    if not (isinstance(config.topology, c.Decoder) and isinstance(positions, c.Learned)):
        return None
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.model_dim,
        "n_layer": config.num_layers,
        "n_head": config.multi_head.num_heads,
        "n_positions": positions.max_length,
        "layer_norm_epsilon": config.norm.eps,
        "tie_word_embeddings": config.head.tied,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        read_gpt2,
        write_gpt2,
        GPT2_TABLE,
        ignored_tensors=IGNORED_TENSORS,
        key_renames=KEY_RENAMES,
    ),
    Family(
        "openai-gpt",
        "OpenAIGPTLMHeadModel",
        read_gpt,
        write_gpt,
        GPT_TABLE,
        ignored_tensors=IGNORED_TENSORS,
        key_renames=KEY_RENAMES,
    ),
)
