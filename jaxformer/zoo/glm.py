"""GLM 4 (sandwich norms), GLM 4.5 and GLM 4.7 Flash (mixtures of experts).

The module that predicts a second token is left out.
"""

from dataclasses import replace
from typing import Unpack

from jaxformer import config as c
from jaxformer.zoo.deepseek import deepseek, experts_by_sigmoid, with_experts
from jaxformer.zoo.llama import LlamaOptions, llama
from jaxformer.zoo.projection_biases import QKV

NORM = c.RMSNorm(eps=1e-5)
VOCAB_SIZE = 151_552


def glm_4() -> c.TransformerConfig:
    """GLM 4 9B of April 2025 (0414): norms before and after each branch, neighbours rotated.

    References:
        GLM team, ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4 All Tools, 2024.
        arXiv:2406.12793, section 2
    """
    body = llama(
        vocab_size=VOCAB_SIZE,
        model_dim=4096,
        num_layers=40,
        num_heads=32,
        num_kv_heads=2,
        hidden_dim=13_696,
        positions=(c.Rope(fraction=0.5, pairing="neighbours"),),
        biases=QKV,
    )
    return replace(body, norm_placement="sandwich")


def glm_4_5(
    moe: c.MoE, *, first_dense: int, **options: Unpack[LlamaOptions]
) -> c.TransformerConfig:
    """GLM 4.5: 96 heads whatever the width, DeepSeek V3's router without groups.

    References:
        GLM-4.5 team, GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models, 2025.
        arXiv:2508.06471, section 2.1 and table 1
    """
    options |= {"num_kv_heads": 8, "head_dim": 128, "biases": QKV}
    options["positions"] = (c.Rope(base=1_000_000.0, fraction=0.5),)
    body = llama(vocab_size=VOCAB_SIZE, **options)
    return with_experts(body, moe, first_dense=first_dense)


def glm_4_7_flash() -> c.TransformerConfig:
    """GLM 4.7 Flash: DeepSeek's latent attention, with values as wide as queries and keys.

    References:
        Z.ai, GLM-4.7-Flash, 2026. huggingface.co/zai-org/GLM-4.7-Flash
    """
    moe = experts_by_sigmoid(64, 4, hidden_dim=1536, scale=1.8)
    attention = c.Latent(
        num_heads=20,
        latent_dim=512,
        query_latent_dim=768,
        nope_dim=192,
        rope_dim=64,
        value_dim=256,
        positions=(c.Rope(base=1_000_000.0, pairing="neighbours"),),
        norm=c.RMSNorm(eps=1e-6),
    )
    body = deepseek(
        moe, attention, vocab_size=154_880, model_dim=2048, num_layers=47, dense_dim=10_240
    )
    return replace(body, norm=NORM)


PRESETS = {
    "glm-4-9b": glm_4(),
    "glm-4.5-air": glm_4_5(
        experts_by_sigmoid(128, 8, hidden_dim=1408, scale=1.0),
        first_dense=1,
        model_dim=4096,
        num_layers=46,
        num_heads=96,
        hidden_dim=10_944,
    ),
    "glm-4.5": glm_4_5(
        experts_by_sigmoid(160, 8, hidden_dim=1536, scale=2.5),
        first_dense=3,
        model_dim=5120,
        num_layers=92,
        num_heads=96,
        hidden_dim=12_288,
        qk_norm=c.QKNorm(norm=NORM, over="head"),
    ),
    "glm-4.7-flash": glm_4_7_flash(),
}
YEARS = dict.fromkeys(PRESETS, 2025) | {"glm-4.7-flash": 2026}
