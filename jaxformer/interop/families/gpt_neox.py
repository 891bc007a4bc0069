"""GPT-NeoX and Pythia: parallel or serial blocks with two norms, fused QKV by head."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families.activations import ACTIVATIONS, name_of
from jaxformer.interop.families.gpt2 import fused
from jaxformer.interop.families.pieces import ALL_BIASES, plain_decoder, read_sizes, rope_of
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope, write_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, Table, linear, norm
from jaxformer.interop.transforms import GroupedHeads, Kernel

LAYER = "gpt_neox.layers.{layer}"
TABLE = Table(
    whole=(
        Row("gpt_neox.embed_in.weight", "embedding/tokens/embedding"),
        *norm("gpt_neox.final_layer_norm", "decoder/final_norm"),
        Row("embed_out.weight", "head/kernel", Kernel()),
    ),
    stacks={
        "decoder": (
            *norm(f"{LAYER}.input_layernorm", "pre_attention_norm"),
            *fused(f"{LAYER}.attention.query_key_value", GroupedHeads(), GroupedHeads()),
            *linear(f"{LAYER}.attention.dense", "attention/out", input_axes=2),
            *norm(f"{LAYER}.post_attention_layernorm", "pre_feed_forward_norm"),
            *linear(f"{LAYER}.mlp.dense_h_to_4h", "feed_forward/up"),
            *linear(f"{LAYER}.mlp.dense_4h_to_h", "feed_forward/down"),
        )
    },
)


def read(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a gpt_neox's."""
    sizes = read_sizes(settings)
    heads = settings.integer("num_attention_heads")
    rope = read_rope(
        settings, base_name="rotary_emb_base", fraction=0.25, fraction_name="rotary_pct"
    )
    parallel = settings.flag("use_parallel_residual", True)
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=max(1, sizes["model_dim"] // heads),
            positions=(rope,),
            biases=ALL_BIASES if settings.flag("attention_bias", True) else (),
        ),
        feed_forward=(
            c.MLP(
                hidden_dim=settings.integer("intermediate_size"),
                activation=settings.choice("hidden_act", "gelu", ACTIVATIONS),
                bias=True,
            ),
        ),
        norm=c.LayerNorm(eps=settings.number("layer_norm_eps", 1e-5)),
        block="parallel" if parallel else "serial",
        head=c.Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A gpt_neox's configuration from ours."""
    branch = config.feed_forward[0]
    if not (plain_decoder(config) and isinstance(branch, c.MLP)):
        return None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.multi_head.num_heads,
        "attention_bias": "out" in config.multi_head.biases,
        "intermediate_size": branch.hidden_dim,
        "hidden_act": name_of(branch.activation),
        "layer_norm_eps": config.norm.eps,
        "use_parallel_residual": config.block == "parallel",
        "tie_word_embeddings": config.head.tied,
        **write_rope(rope_of(config), base_name="rotary_emb_base", fraction_name="rotary_pct"),
    }


FAMILIES = (
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        read,
        write,
        TABLE,
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    ),
)
