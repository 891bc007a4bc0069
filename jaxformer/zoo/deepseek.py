"""DeepSeekMoE, and DeepSeek V2 and V3: multi-head latent attention and many small experts.

The dense DeepSeek 67B is a Llama (`jaxformer.zoo.llama`). V3's module that predicts a second token
is left out.
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.functional.rope_scaling import yarn_attention_factor
from jaxformer.zoo.llama import llama

FACTOR = 40.0
NOPE_DIM, ROPE_DIM = 128, 64


def with_experts(
    body: c.TransformerConfig, moe: c.MoE, *, first_dense: int = 1
) -> c.TransformerConfig:
    """The model with experts in all layers but the first ones."""
    (dense,) = body.feed_forward
    num_sparse = body.num_layers - first_dense
    return replace(body, feed_forward=(dense,) * first_dense + (moe,) * num_sparse)


def shared_experts(count: int, *, hidden_dim: int) -> c.SharedExpert:
    """Experts that every token meets, as one network of their total width."""
    return c.SharedExpert(expert=c.GLU(hidden_dim=count * hidden_dim))


def experts_by_sigmoid(
    num_experts: int,
    top_k: int,
    *,
    hidden_dim: int,
    scale: float,
    groups: c.ExpertGroups | None = None,
) -> c.MoE:
    """Experts chosen by sigmoid and a selection bias, and a shared one, as in DeepSeek V3."""
    return c.MoE(
        expert=c.GLU(hidden_dim=hidden_dim),
        num_experts=num_experts,
        top_k=top_k,
        router=c.Router(score="sigmoid", selection_bias=True, groups=groups, scale=scale),
        shared=shared_experts(1, hidden_dim=hidden_dim),
    )


EXPERTS_16B = c.MoE(
    expert=c.GLU(hidden_dim=1408),
    num_experts=64,
    top_k=6,
    router=c.Router(renormalise=False),
    shared=shared_experts(2, hidden_dim=1408),
)


def deepseek_moe() -> c.TransformerConfig:
    """DeepSeekMoE 16B: 6 of 64 experts and 2 shared ones, in all layers but the first.

    References:
        Dai et al., DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts
        Language Models, 2024. arXiv:2401.06066, sections 3 and 5.1
    """
    body = llama(
        vocab_size=102_400, model_dim=2048, num_layers=28, num_heads=16, hidden_dim=10_944, eps=1e-6
    )
    return with_experts(body, EXPERTS_16B)


def latent_attention(
    *, num_heads: int, query_latent_dim: int | None, mscale_all_dim: float
) -> c.Latent:
    """Multi-head latent attention with YaRN, whose scores are scaled by its factor squared."""
    scaling = c.Yarn(factor=FACTOR, original_max_length=4096, attention_factor=1.0)
    grown = yarn_attention_factor(FACTOR, mscale=mscale_all_dim)
    return c.Latent(
        num_heads=num_heads,
        latent_dim=512,
        query_latent_dim=query_latent_dim,
        nope_dim=NOPE_DIM,
        rope_dim=ROPE_DIM,
        value_dim=128,
        positions=(c.Rope(pairing="neighbours", scaling=scaling),),
        scale=(NOPE_DIM + ROPE_DIM) ** -0.5 * grown**2,
        norm=c.RMSNorm(eps=1e-6),
    )


def deepseek(
    moe: c.MoE,
    attention: c.Latent,
    *,
    vocab_size: int = 102_400,
    model_dim: int,
    num_layers: int,
    first_dense: int = 1,
    dense_dim: int,
) -> c.TransformerConfig:
    """DeepSeek V2 or V3: latent attention and experts.

    References:
        DeepSeek-AI, DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
        Model, 2024. arXiv:2405.04434, section 2 and appendix B
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024. arXiv:2412.19437, sections 2 and 4.2
    """
    body = c.TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=attention,
        feed_forward=(c.GLU(hidden_dim=dense_dim),),
        norm=c.RMSNorm(eps=1e-6),
    )
    return with_experts(body, moe, first_dense=first_dense)


def deepseek_v2_lite() -> c.TransformerConfig:
    """16B: queries without a latent, experts chosen from all."""
    attention = latent_attention(num_heads=16, query_latent_dim=None, mscale_all_dim=0.707)
    return deepseek(EXPERTS_16B, attention, model_dim=2048, num_layers=27, dense_dim=10_944)


def deepseek_v2() -> c.TransformerConfig:
    """236B: 6 of 160 experts from the best 3 of 8 groups, and 2 shared ones."""
    moe = c.MoE(
        expert=c.GLU(hidden_dim=1536),
        num_experts=160,
        top_k=6,
        router=c.Router(
            groups=c.ExpertGroups(num_groups=8, top_k=3, score="max"), renormalise=False, scale=16.0
        ),
        shared=shared_experts(2, hidden_dim=1536),
    )
    attention = latent_attention(num_heads=128, query_latent_dim=1536, mscale_all_dim=0.707)
    return deepseek(moe, attention, model_dim=5120, num_layers=60, dense_dim=12_288)


def deepseek_v3() -> c.TransformerConfig:
    """671B: 8 of 256 experts by sigmoid and a selection bias, and a shared one."""
    groups = c.ExpertGroups(num_groups=8, top_k=4, score="top_2")
    moe = experts_by_sigmoid(256, 8, hidden_dim=2048, scale=2.5, groups=groups)
    attention = latent_attention(num_heads=128, query_latent_dim=1536, mscale_all_dim=1.0)
    return deepseek(
        moe,
        attention,
        vocab_size=129_280,
        model_dim=7168,
        num_layers=61,
        first_dense=3,
        dense_dim=18_432,
    )


PRESETS = {
    "deepseek-moe-16b": deepseek_moe(),
    "deepseek-v2-lite": deepseek_v2_lite(),
    "deepseek-v2": deepseek_v2(),
    "deepseek-v3": deepseek_v3(),
}
