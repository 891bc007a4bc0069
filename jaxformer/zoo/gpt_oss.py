"""gpt-oss: sinks in every layer, windows in every second, experts with biases and clamps."""

from jaxformer import config as c


def gpt_oss(*, num_layers: int, num_experts: int) -> c.TransformerConfig:
    """Layers with a window of 128 tokens in turn with full ones; four experts a token.

    References:
        Agarwal et al., gpt-oss-120b & gpt-oss-20b Model Card, 2025. arXiv:2508.10925, section 2
    """
    scaling = c.Yarn(factor=32.0, original_max_length=4096, truncate=False)
    return c.TransformerConfig(
        vocab_size=201_088,
        model_dim=2880,
        num_layers=num_layers,
        attention=c.MultiHead(
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            positions=(c.Rope(base=150_000.0, scaling=scaling),),
            windows=(128, None),
            biases=("query", "key", "value", "out"),
            sinks=True,
        ),
        feed_forward=(
            c.MoE(
                expert=c.ClampedGEGLU(hidden_dim=2880, limit=7.0),
                num_experts=num_experts,
                top_k=4,
                router=c.Router(bias=True),
            ),
        ),
        norm=c.RMSNorm(eps=1e-5),
        head=c.LMHead(tied=False),
    )


PRESETS = {
    "gpt-oss-20b": gpt_oss(num_layers=24, num_experts=32),
    "gpt-oss-120b": gpt_oss(num_layers=36, num_experts=128),
}
YEARS = dict.fromkeys(PRESETS, 2025)
