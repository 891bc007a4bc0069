"""OPT: learned positions with offset 2; the 350M model is post-norm with a factorized embedding."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families.activations import ACTIVATIONS, name_of
from jaxformer.interop.families.pieces import ALL_BIASES, read_sizes
from jaxformer.interop.family import Family
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, Table, linear, norm
from jaxformer.interop.transforms import Kernel

LAYER = "model.decoder.layers.{layer}"
TABLE = Table(
    whole=(
        Row("model.decoder.embed_tokens.weight", "embedding/tokens/embedding"),
        Row("model.decoder.embed_positions.weight", "embedding/positions/embedding"),
        Row("model.decoder.project_in.weight", "embedding/projection/kernel", Kernel()),
        Row("model.decoder.project_out.weight", "head/projection/kernel", Kernel()),
        *norm("model.decoder.final_layer_norm", "decoder/final_norm"),
        Row("lm_head.weight", "head/kernel", Kernel()),
    ),
    stacks={
        "decoder": (
            # Either stands before its branch or after the sum.
            *norm(f"{LAYER}.self_attn_layer_norm", "pre_attention_norm"),
            *norm(f"{LAYER}.self_attn_layer_norm", "post_attention_norm"),
            *norm(f"{LAYER}.final_layer_norm", "pre_feed_forward_norm"),
            *norm(f"{LAYER}.final_layer_norm", "post_feed_forward_norm"),
            *linear(f"{LAYER}.self_attn.q_proj", "attention/query"),
            *linear(f"{LAYER}.self_attn.k_proj", "attention/key"),
            *linear(f"{LAYER}.self_attn.v_proj", "attention/value"),
            *linear(f"{LAYER}.self_attn.out_proj", "attention/out", input_axes=2),
            *linear(f"{LAYER}.fc1", "feed_forward/up"),
            *linear(f"{LAYER}.fc2", "feed_forward/down"),
        )
    },
)
OFFSET = 2


def read(settings: Settings) -> c.TransformerConfig:
    """Our configuration from an opt's."""
    sizes = read_sizes(settings)
    model_dim, heads = sizes["model_dim"], settings.integer("num_attention_heads")
    settings.only("output_projection", True)
    bias = settings.flag("enable_bias", True)
    before = settings.flag("do_layer_norm_before", True)
    learned = settings.flag("layer_norm_elementwise_affine", True)
    dropped = settings.flag("_remove_final_layer_norm", False)
    width = settings.integer("word_embed_proj_dim", model_dim)
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=max(1, model_dim // heads),
            positions=(None,),
            biases=ALL_BIASES if bias else (),
        ),
        feed_forward=(
            c.MLP(
                hidden_dim=settings.integer("ffn_dim"),
                activation=settings.choice("activation_function", "relu", ACTIVATIONS),
                bias=bias,
            ),
        ),
        norm=c.LayerNorm(eps=1e-5, parameters="scale_bias" if learned else "none"),
        placement="pre" if before else "post",
        final_norm=before and not dropped,
        embedding=c.Embedding(
            positions=c.Learned(
                max_length=settings.integer("max_position_embeddings", 2048), offset=OFFSET
            ),
            dim=None if width == model_dim else width,
        ),
        head=c.Head(tied=settings.flag("tie_word_embeddings", True)),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An opt's configuration from ours."""
    positions, branch = config.embedding.positions, config.feed_forward[0]
    if not isinstance(config.topology, c.Decoder) or not isinstance(positions, c.Learned):
        return None
    if not isinstance(branch, c.MLP):
        return None
    before = config.placement == "pre"
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "word_embed_proj_dim": config.embedding.dim or config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.multi_head.num_heads,
        "enable_bias": branch.bias,
        "ffn_dim": branch.hidden_dim,
        "activation_function": name_of(branch.activation),
        "layer_norm_elementwise_affine": config.norm.parameters != "none",
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and not config.final_norm,
        "max_position_embeddings": positions.max_length,
        "tie_word_embeddings": config.head.tied,
        "dropout": 0.0,
    }


FAMILIES = (
    Family(
        "opt", "OPTForCausalLM", read, write, TABLE, spellings=((r"^decoder\.", "model.decoder."),)
    ),
)
