"""Gemma 2, 3 and 4: pre- and post-norms, GeGLU, alternating local and global attention."""

import math
from dataclasses import replace
from typing import Any, Unpack

from jaxformer import config as c
from jaxformer.zoo.llama import LlamaOptions, LlamaSizes, llama

NORM = c.RMSNorm(eps=1e-6, scale_offset=1.0)
LOCAL_LAYERS_PER_GLOBAL = 5


def gemma(
    *, vocab_size: int, softcap: float | None = None, **options: Unpack[LlamaOptions]
) -> c.TransformerConfig:
    """Common part of all: scaled embeddings, tied head, norms stored as scale - 1."""
    return replace(
        llama(vocab_size=vocab_size, **options),
        feed_forward=(c.GLU(hidden_dim=options["hidden_dim"], activation="gelu_tanh"),),
        norm=NORM,
        norm_placement="sandwich",
        embedding=c.Embedding(scale=math.sqrt(options["model_dim"])),
        head=c.LMHead(tied=True, softcap=softcap),
    )


def gemma_2(*, query_scalar: int = 256, **sizes: Unpack[LlamaSizes]) -> c.TransformerConfig:
    """Gemma 2: sliding window in every other layer, scores capped at 50, logits at 30.

    References:
        Gemma team, Gemma 2: Improving Open Language Models at a Practical Size, 2024.
        arXiv:2408.00118, section 2
    """
    return gemma(
        vocab_size=256_000,
        softcap=30.0,
        windows=(4096, None),
        scale=query_scalar**-0.5,
        logit_softcap=50.0,
        **sizes,
    )


def gemma_3(
    *,
    vocab_size: int,
    query_scalar: int,
    window: int,
    scaling: c.RopeScaling | None = None,
    **sizes: Unpack[LlamaSizes],
) -> c.TransformerConfig:
    """Gemma 3: five local layers per global layer, another RoPE base for global layers, QK-norm.

    References:
        Gemma team, Gemma 3 Technical Report, 2025. arXiv:2503.19786, section 2
    """
    global_rope = c.Rope(base=1_000_000.0, scaling=scaling)
    return gemma(
        vocab_size=vocab_size,
        positions=(*(c.Rope(),) * LOCAL_LAYERS_PER_GLOBAL, global_rope),
        windows=(*(window,) * LOCAL_LAYERS_PER_GLOBAL, None),
        scale=query_scalar**-0.5,
        qk_norm=c.QKNorm(norm=NORM, over="head"),
        **sizes,
    )


GEMMA_4_NORM = c.RMSNorm(eps=1e-6)
GEMMA_4_ROPE = c.Rope(base=1_000_000.0, scaling=c.PRope(fraction=0.25))
GEMMA_4_HEADS: dict[str, Any] = {
    "scale": 1.0,
    "qk_norm": c.QKNorm(norm=GEMMA_4_NORM),
    "value_norm": replace(GEMMA_4_NORM, parameters="none"),
}


def gemma_4_body(window: int, **sizes: Unpack[LlamaSizes]) -> c.TransformerConfig:
    """Common part of all Gemma 4, with a window in every layer.

    Queries, keys and values are normalised and scores have no scale; norms multiply by their scale;
    a scalar multiplies the stream after each layer.
    """
    sizes["head_dim"] = 256
    body = gemma(vocab_size=262_144, softcap=30.0, windows=(window,), **sizes)
    attention: Any = body.attention
    attention = replace(attention, **GEMMA_4_HEADS)
    return replace(body, attention=attention, norm=GEMMA_4_NORM, layer_scalar=True)


def gemma_4_edge(
    *,
    local_layers_per_global: int,
    num_kv_shared_layers: int,
    last_hidden_dim: int,
    **sizes: Unpack[LlamaSizes],
) -> c.TransformerConfig:
    """Gemma 4 E2B and E4B: embeddings for each layer, and keys and values of earlier layers.

    The last `num_kv_shared_layers` layers read keys and values of the last layer before them that
    has the same window; their feed-forward networks have `last_hidden_dim` features.

    References:
        Gemma team, Gemma 4, 2026. https://ai.google.dev/gemma/docs/core/model_card_4
    """
    body = gemma_4_body(512, **sizes)
    local_layer: Any = body.attention
    global_layer = replace(local_layer, head_dim=512, windows=(None,), positions=(GEMMA_4_ROPE,))
    kinds = (*(local_layer,) * local_layers_per_global, global_layer)
    readers = tuple(replace(kind, cross_layer_kv=True, value_norm=None) for kind in kinds)
    last_feed_forward = c.GLU(hidden_dim=last_hidden_dim, activation="gelu_tanh")
    num_first_layers = body.num_layers - num_kv_shared_layers
    repeats = num_first_layers // len(kinds), num_kv_shared_layers // len(kinds)
    return replace(
        body,
        attention=kinds * repeats[0] + readers * repeats[1],
        feed_forward=body.feed_forward * num_first_layers
        + (last_feed_forward,) * num_kv_shared_layers,
        layer_embedding=c.LayerEmbedding(dim=256),
    )


def gemma_4(
    *, num_global_kv_heads: int, expert_dim: int | None = None, **sizes: Unpack[LlamaSizes]
) -> c.TransformerConfig:
    """Gemma 4: global layers have fewer and wider heads, keys that are values too, and p-RoPE.

    With an `expert_dim`, 8 of 128 experts of this width stand beside the dense network.

    References:
        Gemma team, Gemma 4, 2026. https://ai.google.dev/gemma/docs/core/model_card_4
    """
    body = gemma_4_body(1024, **sizes)
    local_layer: Any = body.attention
    global_layer = c.SharedKV(
        num_heads=local_layer.num_heads,
        num_kv_heads=num_global_kv_heads,
        head_dim=512,
        positions=(GEMMA_4_ROPE,),
        **GEMMA_4_HEADS,
    )
    kinds: tuple[Any, ...] = (*(local_layer,) * LOCAL_LAYERS_PER_GLOBAL, global_layer)
    body = replace(body, attention=kinds)
    if expert_dim is None:
        return body
    shared = c.GLU(hidden_dim=sizes["hidden_dim"], activation="gelu_tanh")
    experts = c.MoE(
        expert=c.GLU(hidden_dim=expert_dim, activation="gelu_tanh"),
        num_experts=128,
        top_k=8,
        router=c.Router(norm=GEMMA_4_NORM, expert_scale=True),
        shared=c.SharedExpert(expert=shared),
        norm=GEMMA_4_NORM,
    )
    return replace(body, feed_forward=(experts,))


PRESETS = {
    "gemma-2-2b": gemma_2(
        model_dim=2304, num_layers=26, num_heads=8, num_kv_heads=4, head_dim=256, hidden_dim=9216
    ),
    "gemma-2-9b": gemma_2(
        model_dim=3584, num_layers=42, num_heads=16, num_kv_heads=8, head_dim=256, hidden_dim=14_336
    ),
    "gemma-2-27b": gemma_2(
        model_dim=4608,
        num_layers=46,
        num_heads=32,
        num_kv_heads=16,
        hidden_dim=36_864,
        head_dim=128,
        query_scalar=144,
    ),
    "gemma-3-1b": gemma_3(
        vocab_size=262_144,
        model_dim=1152,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        hidden_dim=6912,
        head_dim=256,
        query_scalar=256,
        window=512,
    ),
    "gemma-3-27b": gemma_3(
        vocab_size=262_208,  # 64 more than the tokenizer has, as in the released embedding
        model_dim=5376,
        num_layers=62,
        num_heads=32,
        num_kv_heads=16,
        hidden_dim=21_504,
        head_dim=128,
        query_scalar=168,
        window=1024,
        scaling=c.LinearScaling(factor=8.0),
    ),
    "gemma-4-e2b": gemma_4_edge(
        model_dim=1536,
        num_layers=35,
        num_heads=8,
        num_kv_heads=1,
        hidden_dim=6144,
        local_layers_per_global=4,
        num_kv_shared_layers=20,
        last_hidden_dim=12_288,
    ),
    "gemma-4-e4b": gemma_4_edge(
        model_dim=2560,
        num_layers=42,
        num_heads=8,
        num_kv_heads=2,
        hidden_dim=10_240,
        local_layers_per_global=5,
        num_kv_shared_layers=18,
        last_hidden_dim=10_240,
    ),
    "gemma-4-31b": gemma_4(
        model_dim=5376,
        num_layers=60,
        num_heads=32,
        num_kv_heads=16,
        num_global_kv_heads=4,
        hidden_dim=21_504,
    ),
    "gemma-4-26b-a4b": gemma_4(
        model_dim=2816,
        num_layers=30,
        num_heads=16,
        num_kv_heads=8,
        num_global_kv_heads=2,
        hidden_dim=2112,
        expert_dim=704,
    ),
}
YEARS = dict.fromkeys(("gemma-4-e2b", "gemma-4-e4b", "gemma-4-31b", "gemma-4-26b-a4b"), 2026)
