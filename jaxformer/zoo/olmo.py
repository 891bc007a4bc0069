"""OLMo (LayerNorm without parameters) to OLMo 3 (norms after the branches, QK-norm), and OLMoE.

Vocabularies are padded from 50,280 to 50,304 ids (OLMo) and from 100,278 to 100,352 (OLMo 2).
"""

from dataclasses import replace
from typing import Unpack

from jaxformer import config as c
from jaxformer.zoo.llama import LlamaOptions, LlamaSizes, llama

OLMO_3_SCALING = c.Yarn(factor=8.0, original_max_length=8192, attention_factor=1.2079441541679836)


def olmo(*, tied: bool = False, **sizes: Unpack[LlamaSizes]) -> c.TransformerConfig:
    """Llama's design with a LayerNorm that has neither scale nor bias.

    References:
        Groeneveld et al., OLMo: Accelerating the Science of Language Models, 2024.
        arXiv:2402.00838, section 2.1
    """
    body = llama(vocab_size=50_304, tied=tied, **sizes)
    return replace(body, norm=c.LayerNorm(parameters="none"))


def olmo_2(**options: Unpack[LlamaOptions]) -> c.TransformerConfig:
    """OLMo 2: norm on each branch's output before the residual sum; QK-norm over the full width.

    References:
        OLMo team, 2 OLMo 2 Furious, 2024. arXiv:2501.00656, section 2
    """
    options["qk_norm"] = c.QKNorm(norm=c.RMSNorm(eps=1e-6), over="width")
    body = llama(vocab_size=100_352, eps=1e-6, base=500_000.0, **options)
    return replace(body, norm_placement="res_post")


def olmo_3(**sizes: Unpack[LlamaSizes]) -> c.TransformerConfig:
    """OLMo 2 with a window in three of four layers; the fourth sees all and has YaRN.

    References:
        OLMo team, Olmo 3, 2025. arXiv:2512.13961, section 3
    """
    local, all_tokens = c.Rope(base=500_000.0), c.Rope(base=500_000.0, scaling=OLMO_3_SCALING)
    body = olmo_2(
        positions=(local, local, local, all_tokens), windows=(4096, 4096, 4096, None), **sizes
    )
    return replace(body, vocab_size=100_278)


def olmoe() -> c.TransformerConfig:
    """OLMoE 1B-7B: pre-norm, QK-norm over the full width; weights of experts are not renormalised.

    References:
        Muennighoff et al., OLMoE: Open Mixture-of-Experts Language Models, 2024. arXiv:2409.02060,
        section 2
    """
    body = llama(
        vocab_size=50_304,
        model_dim=2048,
        num_layers=16,
        num_heads=16,
        hidden_dim=1024,
        qk_norm=c.QKNorm(norm=c.RMSNorm(eps=1e-5), over="width"),
    )
    experts = c.MoE(
        expert=c.GLU(hidden_dim=1024), num_experts=64, top_k=8, router=c.Router(renormalise=False)
    )
    return replace(body, feed_forward=(experts,))


PRESETS = {
    "olmo-1b": olmo(model_dim=2048, num_layers=16, num_heads=16, hidden_dim=8192, tied=True),
    "olmo-7b": olmo(model_dim=4096, num_layers=32, num_heads=32, hidden_dim=11_008),
    "olmo-2-7b": olmo_2(model_dim=4096, num_layers=32, num_heads=32, hidden_dim=11_008),
    "olmo-2-13b": olmo_2(model_dim=5120, num_layers=40, num_heads=40, hidden_dim=13_824),
    "olmo-3-7b": olmo_3(
        model_dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, hidden_dim=11_008
    ),
    "olmo-3-32b": olmo_3(
        model_dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, hidden_dim=27_648
    ),
    "olmoe-1b-7b": olmoe(),
}
