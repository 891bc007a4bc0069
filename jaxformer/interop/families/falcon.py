"""Falcon: parallel blocks with one or two norms, or serial blocks with ALiBi (falcon-rw)."""

import math
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.interop.families.activations import ACTIVATIONS, name_of
from jaxformer.interop.families.gpt2 import fused
from jaxformer.interop.families.pieces import ALL_BIASES, read_sizes
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope, write_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, Table, linear, norm
from jaxformer.interop.transforms import GroupedHeads, Kernel

LAYER = "transformer.h.{layer}"
COMMON = (
    *fused(f"{LAYER}.self_attention.query_key_value", GroupedHeads(), GroupedHeads()),
    *linear(f"{LAYER}.self_attention.dense", "attention/out", input_axes=2),
    *linear(f"{LAYER}.mlp.dense_h_to_4h", "feed_forward/up"),
    *linear(f"{LAYER}.mlp.dense_4h_to_h", "feed_forward/down"),
)


def _side_by_side(config: c.TransformerConfig) -> bool:
    return config.block == "parallel"


def _in_turn(config: c.TransformerConfig) -> bool:
    return config.block == "serial"


def _norms() -> tuple[Row, ...]:
    """Mapping rules of the norms, whose names depend on the block type."""
    rows = norm(f"{LAYER}.input_layernorm", "pre_norm")
    for only, names in (
        (_side_by_side, ("ln_attn", "ln_mlp")),
        (_in_turn, ("input_layernorm", "post_attention_layernorm")),
    ):
        ours = ("pre_attention_norm", "pre_feed_forward_norm")
        for theirs, path in zip(names, ours, strict=True):
            rows += tuple(replace(row, only=only) for row in norm(f"{LAYER}.{theirs}", path))
    return rows


TABLE = Table(
    whole=(
        Row("transformer.word_embeddings.weight", "embedding/tokens/embedding"),
        *norm("transformer.ln_f", "decoder/final_norm"),
        Row("lm_head.weight", "head/kernel", Kernel()),
    ),
    stacks={"decoder": (*_norms(), *COMMON)},
)


def read(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a falcon's."""
    settings.only("apply_residual_connection_post_layernorm", False)
    settings.value("ff_factor")  # ffn_hidden_size says it again
    settings.only("n_embed", settings.integer("hidden_size"))
    sizes = read_sizes(settings)
    heads = settings.integer("num_attention_heads")
    head_dim = max(1, sizes["model_dim"] // heads)
    bias = settings.flag("bias", False)
    alibi, rope = settings.flag("alibi", False), read_rope(settings)
    if alibi and not _slopes_are_powers_of_two(heads):
        settings.refuse(
            "alibi",
            f"transformers rounds the slopes of {heads} heads to bfloat16, here they stay exact; "
            "ignore=('alibi',) reads it so.",
        )
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=_kv_heads(settings, heads),
            head_dim=head_dim,
            positions=(c.Alibi(scale=head_dim**-0.5) if alibi else rope,),
            biases=ALL_BIASES if bias else (),
        ),
        feed_forward=(
            c.MLP(
                hidden_dim=settings.integer("ffn_hidden_size", 4 * sizes["model_dim"]),
                activation=settings.choice("activation", "gelu", ACTIVATIONS),
                bias=bias,
            ),
        ),
        norm=c.LayerNorm(eps=settings.number("layer_norm_epsilon", 1e-5)),
        block=_block(settings),
        head=c.Head(tied=settings.flag("tie_word_embeddings", True)),
    )


def _slopes_are_powers_of_two(heads: int) -> bool:
    """Whether bfloat16 holds every slope of ALiBi."""
    return all(math.log2(slope).is_integer() for slope in F.alibi_slopes(heads).tolist())


def _kv_heads(settings: Settings, heads: int) -> int:
    stated = settings.integer("num_kv_heads", heads)
    shared = settings.flag("multi_query", True)
    if settings.flag("new_decoder_architecture", False):
        return stated
    if not shared and stated != heads:
        settings.refuse("num_kv_heads", f"without multi_query there are {heads}, one per head.")
    return 1 if shared else heads


def _block(settings: Settings) -> Any:
    """Block type: serial, parallel, or parallel with one shared norm."""
    new = settings.flag("new_decoder_architecture", False)
    norms = settings.integer("num_ln_in_parallel_attn", 2 if new else 1)
    parallel = settings.flag("parallel_attn", True)
    if norms not in (1, 2) or (norms == 2 and not new):
        allowed = "1 or 2" if new else "1, without new_decoder_architecture"
        settings.refuse("num_ln_in_parallel_attn", f"expected {allowed}.")
    if new and not parallel:
        settings.refuse("parallel_attn", "with new_decoder_architecture it can only be True.")
    if not parallel:
        return "serial"
    return "parallel" if norms == 2 else "parallel_shared_norm"


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A falcon's configuration from ours."""
    attention, branch = config.multi_head, config.feed_forward[0]
    positions = attention.positions[0]
    if not isinstance(config.topology, c.Decoder) or not isinstance(branch, c.MLP):
        return None
    if not isinstance(positions, c.Rope | c.Alibi):
        return None
    heads, kv_heads, serial = attention.num_heads, attention.num_kv_heads, config.block == "serial"
    new = config.block == "parallel" or (not serial and kv_heads not in (1, heads))
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1 != heads,
        "parallel_attn": not serial,
        "num_ln_in_parallel_attn": 2 if config.block == "parallel" else 1,
        "ffn_hidden_size": branch.hidden_dim,
        "activation": name_of(branch.activation),
        "bias": branch.bias,
        "alibi": isinstance(positions, c.Alibi),
        "layer_norm_epsilon": config.norm.eps,
        "tie_word_embeddings": config.head.tied,
    }
    return fields if isinstance(positions, c.Alibi) else {**fields, **write_rope(positions)}


FAMILIES = (Family("falcon", "FalconForCausalLM", read, write, TABLE),)
