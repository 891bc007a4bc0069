"""GPT and GPT-2: learned positions, biases, Conv1D kernels stored as [inputs, outputs]."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families.activations import ACTIVATIONS, name_of
from jaxformer.interop.families.pieces import ALL_BIASES
from jaxformer.interop.family import Family
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, Table, norm
from jaxformer.interop.transforms import Flat, Fused, Kernel, Transform

LAYER = "transformer.h.{layer}"
QKV = ("attention/query", "attention/key", "attention/value")
IGNORED = (rf"{LAYER}\.attn\.(masked_)?bias".format(layer=r"\d+"), r"transformer\.position_ids")
# Files that were saved without the head lack the prefix.
SPELLINGS = ((r"^(?!transformer\.|lm_head\.)", "transformer."),)
GPT_ACTIVATIONS: dict[str, str] = {
    "gelu": "gelu_tanh",  # the approximation, whatever the name says
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def conv(theirs: str, ours: str, *, input_axes: int = 1) -> tuple[Row, Row]:
    """Mapping rules of a GPT-2 Conv1D."""
    kernel = Kernel(input_axes=input_axes, outputs_first=False)
    return Row(f"{theirs}.weight", f"{ours}/kernel", kernel), Row(f"{theirs}.bias", f"{ours}/bias")


def fused(theirs: str, kernels: Transform, biases: Transform) -> tuple[Row, Row]:
    """Mapping rules of a fused QKV projection."""
    return (
        Row(f"{theirs}.weight", tuple(f"{part}/kernel" for part in QKV), kernels),
        Row(f"{theirs}.bias", tuple(f"{part}/bias" for part in QKV), biases),
    )


LAYERS = (
    *fused(
        f"{LAYER}.attn.c_attn", Fused(part=Kernel(outputs_first=False), axis=1), Fused(part=Flat())
    ),
    *conv(f"{LAYER}.attn.c_proj", "attention/out", input_axes=2),
    *conv(f"{LAYER}.mlp.c_fc", "feed_forward/up"),
    *conv(f"{LAYER}.mlp.c_proj", "feed_forward/down"),
)
HEAD = Row("lm_head.weight", "head/kernel", Kernel())
GPT2_TABLE = Table(
    whole=(
        Row("transformer.wte.weight", "embedding/tokens/embedding"),
        Row("transformer.wpe.weight", "embedding/positions/embedding"),
        *norm("transformer.ln_f", "decoder/final_norm"),
        HEAD,
    ),
    stacks={
        "decoder": (
            *LAYERS,
            *norm(f"{LAYER}.ln_1", "pre_attention_norm"),
            *norm(f"{LAYER}.ln_2", "pre_feed_forward_norm"),
        )
    },
)
GPT_TABLE = Table(
    whole=(
        Row("transformer.tokens_embed.weight", "embedding/tokens/embedding"),
        Row("transformer.positions_embed.weight", "embedding/positions/embedding"),
        HEAD,
    ),
    stacks={
        "decoder": (
            *LAYERS,
            *norm(f"{LAYER}.ln_1", "post_attention_norm"),
            *norm(f"{LAYER}.ln_2", "post_feed_forward_norm"),
        )
    },
)


def read_gpt2(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a gpt2's."""
    settings.only("scale_attn_by_inverse_layer_idx", False)
    settings.value("reorder_and_upcast_attn")  # of the precision only
    scaled = settings.flag("scale_attn_weights", True)
    hidden_dim = settings.integer("n_inner", 4 * settings.integer("n_embd", 768))
    activation = settings.choice("activation_function", "gelu_new", ACTIVATIONS)
    return _read(
        settings,
        lengths=1024,
        scale=None if scaled else 1.0,
        feed_forward=(c.MLP(hidden_dim=hidden_dim, activation=activation, bias=True),),
    )


def read_gpt(settings: Settings) -> c.TransformerConfig:
    """Our configuration from an openai-gpt's."""
    hidden_dim = 4 * settings.integer("n_embd", 768)
    activation = settings.choice("afn", "gelu", GPT_ACTIVATIONS)
    return _read(
        settings,
        lengths=512,
        feed_forward=(c.MLP(hidden_dim=hidden_dim, activation=activation, bias=True),),
        placement="post",
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
        "activation_function": name_of(branch.activation),
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
    settings: Settings, *, lengths: int, scale: float | None = None, **others: Any
) -> c.TransformerConfig:
    """What both have; `lengths` are the positions where the file gives no number."""
    settings.only("n_special", 0)
    model_dim, heads = settings.integer("n_embd", 768), settings.integer("n_head", 12)
    return c.TransformerConfig(
        vocab_size=settings.integer("vocab_size"),
        model_dim=model_dim,
        num_layers=settings.integer("n_layer", 12),
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=model_dim // heads,
            positions=(None,),
            scale=scale,
            biases=ALL_BIASES,
        ),
        norm=c.LayerNorm(eps=settings.number("layer_norm_epsilon", 1e-5)),
        embedding=c.Embedding(
            positions=c.Learned(max_length=settings.integer("n_positions", lengths))
        ),
        head=c.Head(tied=settings.flag("tie_word_embeddings", True)),
        **others,
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
        ignored=IGNORED,
        spellings=SPELLINGS,
    ),
    Family(
        "openai-gpt",
        "OpenAIGPTLMHeadModel",
        read_gpt,
        write_gpt,
        GPT_TABLE,
        ignored=IGNORED,
        spellings=SPELLINGS,
    ),
)
