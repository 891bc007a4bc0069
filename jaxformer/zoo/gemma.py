"""Gemma: GeGLU; from Gemma 2 on pre- and post-norms, alternating local and global attention."""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import HEADS, WIDTH, like, sized

# As Llama, except: norms stored as scale - 1; GeGLU; a scaled embedding, tied.
# Gemma team, Gemma: Open Models Based on Gemini Research and Technology, 2024. arXiv:2403.08295,
# section 2
NORM = c.RMSNorm(eps=1e-6, scale_offset=1.0)
GEGLU = c.GLU(hidden_dim=1, activation="gelu_tanh")
GEMMA = like(
    LLAMA,
    vocab_size=256_000,
    feed_forward=(GEGLU,),
    norm=NORM,
    embedding=c.Embedding(scale=WIDTH**0.5),
    head=c.LMHead(tied=True),
)

# As Gemma, except: norms before and after the branches; a window in every other layer, scores
# capped at 50, logits at 30.
# Gemma team, Gemma 2: Improving Open Language Models at a Practical Size, 2024. arXiv:2408.00118,
# section 2
GEMMA_2 = like(
    GEMMA,
    windows=(4096, None),
    scale=1 / 16,
    logit_softcap=50.0,
    norm_placement="sandwich",
    head=c.LMHead(tied=True, softcap=30.0),
)

# As Gemma 2, except: five local layers per global layer, another RoPE base for global layers,
# QK-norm in place of the caps. From 4B on the window is wider and RoPE of global layers is scaled.
# Gemma team, Gemma 3 Technical Report, 2025. arXiv:2503.19786, section 2
GLOBAL_ROPE = c.Rope(base=1e6)
GEMMA_3_1B = like(
    GEMMA_2,
    vocab_size=262_144,
    positions=(*(c.Rope(),) * 5, GLOBAL_ROPE),
    windows=(*(512,) * 5, None),
    logit_softcap=None,
    qk_norm=c.QKNorm(norm=NORM),
    head=c.LMHead(tied=True),
)
GEMMA_3 = like(
    GEMMA_3_1B,
    vocab_size=262_208,  # 64 more than the tokenizer has, as in the released embedding
    positions=(*(c.Rope(),) * 5, replace(GLOBAL_ROPE, scaling=c.LinearScaling(factor=8.0))),
    windows=(*(1024,) * 5, None),
    scale=168**-0.5,
)

# As Gemma 2, except: scores have no scale and no cap; queries, keys and values have norms; norms
# multiply by their scale; a scalar multiplies the stream after each layer. Global layers have wider
# heads, p-RoPE, and, but for E2B and E4B, fewer keys, which are values too. The mixture has 8 of
# 128 experts beside the dense network, which is three times as wide as one of them.
# Gemma team, Gemma 4, 2026. https://ai.google.dev/gemma/docs/core/model_card_4
GEMMA_4_NORM = c.RMSNorm(eps=1e-6)
GEMMA_4_ROPE = replace(GLOBAL_ROPE, scaling=c.PRope(fraction=0.25))
GEMMA_4_HEADS = replace(
    HEADS,
    scale=1.0,
    qk_norm=c.QKNorm(norm=GEMMA_4_NORM),
    value_norm=replace(GEMMA_4_NORM, parameters="none"),
)
GLOBAL_HEADS = c.SharedKV(
    num_heads=1,
    head_dim=512,
    positions=(GEMMA_4_ROPE,),
    scale=1.0,
    qk_norm=GEMMA_4_HEADS.qk_norm,
    value_norm=GEMMA_4_HEADS.value_norm,
)
GEMMA_4 = like(
    GEMMA_2,
    vocab_size=262_144,
    attention=(*(replace(GEMMA_4_HEADS, windows=(1024,)),) * 5, GLOBAL_HEADS),
    norm=GEMMA_4_NORM,
    layer_scalar=True,
)
EXPERTS = c.MoE(
    expert=GEGLU,
    num_experts=128,
    top_k=8,
    router=c.Router(norm=GEMMA_4_NORM, expert_scale=True),
    shared=c.SharedExpert(expert=replace(GEGLU, hidden_dim=3)),
    norm=GEMMA_4_NORM,
)
GEMMA_4_MOE = like(GEMMA_4, feed_forward=(EXPERTS,))

# As Gemma 4, except: embeddings for each layer; `with_readers` adds the global layers and readers.
GEMMA_4_EDGE = like(
    GEMMA_4,
    attention=replace(GEMMA_4_HEADS, windows=(512,)),
    layer_embedding=c.LayerEmbedding(dim=256),
)


def with_readers(
    model: c.TransformerConfig,
    *,
    period: int,
    num_readers: int,
    widening: int = 1,
    head_dim: int = 512,
    rope: c.Rope = GEMMA_4_ROPE,
) -> c.TransformerConfig:
    """Return Gemma 4 E2B or E4B: one layer of each period is global, and the last ones are readers.

    A reader has keys and values of the last layer before the readers that has the same window.

    Args:
        model: The model with local layers only.
        period: Number of layers of a period; one of them is global.
        num_readers: Number of readers.
        widening: How many times as wide the feed-forward networks of readers are.
        head_dim: Width of the heads of global layers.
        rope: RoPE of global layers.

    Returns:
        The model.

    References:
        Gemma team, Gemma 4, 2026. https://ai.google.dev/gemma/docs/core/model_card_4
    """
    local: Any = model.attention
    wide = replace(local, head_dim=head_dim, windows=(None,), positions=(rope,))
    kinds = (*(local,) * (period - 1), wide)
    readers = tuple(replace(kind, cross_layer_kv=True, value_norm=None) for kind in kinds)
    network: Any = model.feed_forward[0]
    last = replace(network, hidden_dim=widening * network.hidden_dim)
    num_first = model.num_layers - num_readers
    return replace(
        model,
        attention=kinds * (num_first // period) + readers * (num_readers // period),
        feed_forward=(network,) * num_first + (last,) * num_readers,
    )


# As Gemma 4 E2B, except: four streams, of which layers run on the first, and embeddings for each
# layer join the others; a map of low rank beside attention; global layers, one of five, have heads
# and RoPE as Gemma 3's, and no scalar. Of the gates of the first ten layers most are 0.
# Gemma team, Gemma 3n, 2025. https://ai.google.dev/gemma/docs/gemma-3n
GEMMA_3N = like(
    GEMMA_4_EDGE,
    vocab_size=262_400,
    layer_scalar=False,
    layer_embedding=c.LayerEmbedding(dim=256, vocab_size=262_144),
    residual=c.AltUp(branches=c.Laurel(), layer_embedding=c.OtherStreams()),
)


def gemma_3n(num_layers: int, hidden: int, num_readers: int) -> c.TransformerConfig:
    """Return Gemma 3n of these sizes."""
    local = sized(GEMMA_3N, 2048, num_layers, heads=8, kv=2, head_dim=256, hidden=hidden)
    options: Any = dict(head_dim=256, rope=GLOBAL_ROPE)
    model = with_readers(local, period=5, num_readers=num_readers, **options)
    sparse: Any = replace(model.feed_forward[0], sparsity=0.95)
    return replace(model, feed_forward=(sparse,) * 10 + model.feed_forward[10:])


# As Gemma, except: RG-LRU in place of the attention of two in three layers; in the others a window,
# and RoPE on half of each head; biases of all but queries, keys and values; the root of the width
# is rounded to bfloat16; logits capped at 30.
# Botev et al., RecurrentGemma: Moving Past Transformers for Efficient Open Language Models, 2024.
# arXiv:2404.07839
GRIFFIN_HEADS = replace(HEADS, positions=(c.Rope(fraction=0.5),), windows=(2048,), biases=("out",))
RG_LRU = c.RGLRU(num_heads=1, head_dim=8)
RECURRENT_GEMMA = like(
    GEMMA,
    attention=(RG_LRU, RG_LRU, GRIFFIN_HEADS),
    feed_forward=(replace(GEGLU, bias=True),),
    head=c.LMHead(tied=True, softcap=30.0),
)

PRESETS = {
    "gemma-2b": sized(GEMMA, 2048, 18, heads=8, kv=1, head_dim=256, hidden=16_384),
    "gemma-7b": sized(GEMMA, 3072, 28, heads=16, head_dim=256, hidden=24_576),
    "recurrentgemma-2b": replace(
        sized(RECURRENT_GEMMA, 2560, 26, heads=10, kv=1, hidden=7680),
        embedding=c.Embedding(scale=50.5),
    ),
    "recurrentgemma-9b": sized(RECURRENT_GEMMA, 4096, 38, heads=16, kv=1, hidden=12_288),
    "gemma-2-2b": sized(GEMMA_2, 2304, 26, heads=8, kv=4, head_dim=256, hidden=9216),
    "gemma-2-9b": sized(GEMMA_2, 3584, 42, heads=16, kv=8, head_dim=256, hidden=14_336),
    "gemma-2-27b": sized(
        GEMMA_2, 4608, 46, heads=32, kv=16, head_dim=128, hidden=36_864, scale=1 / 12
    ),
    "gemma-3-1b": sized(GEMMA_3_1B, 1152, 26, heads=4, kv=1, head_dim=256, hidden=6912),
    "gemma-3-27b": sized(GEMMA_3, 5376, 62, heads=32, kv=16, head_dim=128, hidden=21_504),
    "gemma-3n-e2b": gemma_3n(30, 8192, num_readers=10),
    "gemma-3n-e4b": gemma_3n(35, 16_384, num_readers=15),
    "gemma-4-e2b": with_readers(
        sized(GEMMA_4_EDGE, 1536, 35, heads=8, kv=1, head_dim=256, hidden=6144),
        period=5,
        num_readers=20,
        widening=2,
    ),
    "gemma-4-e4b": with_readers(
        sized(GEMMA_4_EDGE, 2560, 42, heads=8, kv=2, head_dim=256), period=6, num_readers=18
    ),
    "gemma-4-31b": sized(
        GEMMA_4, 5376, 60, heads=32, kv=16, global_kv=4, head_dim=256, hidden=21_504
    ),
    "gemma-4-26b-a4b": sized(
        GEMMA_4_MOE, 2816, 30, heads=16, kv=8, global_kv=2, head_dim=256, hidden=704
    ),
}
YEARS = (
    dict.fromkeys(("gemma-2b", "gemma-7b", "recurrentgemma-2b", "recurrentgemma-9b"), 2024)
    | dict.fromkeys(("gemma-3n-e2b", "gemma-3n-e4b"), 2025)
    | dict.fromkeys(("gemma-4-e2b", "gemma-4-e4b", "gemma-4-31b", "gemma-4-26b-a4b"), 2026)
)
