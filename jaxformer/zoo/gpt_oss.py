"""gpt-oss: sinks in every layer, windows in every second, experts with biases and clamps."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import QKVO, like, sized

# As Llama, except: layers with a window in turn with full ones, sinks, biases, and four experts a
# token.
# Agarwal et al., gpt-oss-120b & gpt-oss-20b Model Card, 2025. arXiv:2508.10925, section 2
YARN = c.Yarn(factor=32.0, original_max_length=4096, truncate=False)
EXPERT = c.ClampedGEGLU(hidden_dim=1, limit=7.0)
GPT_OSS = like(
    LLAMA,
    vocab_size=201_088,
    positions=(c.Rope(base=150_000.0, scaling=YARN),),
    windows=(128, None),
    biases=QKVO,
    sinks=True,
    feed_forward=(c.MoE(expert=EXPERT, num_experts=128, top_k=4, router=c.Router(bias=True)),),
)

PRESETS = {
    "gpt-oss-20b": sized(GPT_OSS, 2880, 24, heads=64, kv=8, head_dim=64, hidden=2880, experts=32),
    "gpt-oss-120b": sized(GPT_OSS, 2880, 36, heads=64, kv=8, head_dim=64, hidden=2880),
}
YEARS = dict.fromkeys(PRESETS, 2025)
