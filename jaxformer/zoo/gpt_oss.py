"""gpt-oss: sinks in every layer, windows in every second, experts with biases and clamps."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import llama
from jaxformer.zoo.projection_biases import QKVO


def gpt_oss(*, num_layers: int, num_experts: int) -> c.TransformerConfig:
    """Layers with a window of 128 tokens in turn with full ones; four experts a token.

    References:
        Agarwal et al., gpt-oss-120b & gpt-oss-20b Model Card, 2025. arXiv:2508.10925, section 2
    """
    body = llama(
        vocab_size=201_088,
        model_dim=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        hidden_dim=2880,
        base=150_000.0,
        scaling=c.Yarn(factor=32.0, original_max_length=4096, truncate=False),
        windows=(128, None),
        biases=QKVO,
        sinks=True,
    )
    expert, router = c.ClampedGEGLU(hidden_dim=2880, limit=7.0), c.Router(bias=True)
    experts = c.MoE(expert=expert, num_experts=num_experts, top_k=4, router=router)
    return replace(body, feed_forward=(experts,))


PRESETS = {
    "gpt-oss-20b": gpt_oss(num_layers=24, num_experts=32),
    "gpt-oss-120b": gpt_oss(num_layers=36, num_experts=128),
}
YEARS = dict.fromkeys(PRESETS, 2025)
