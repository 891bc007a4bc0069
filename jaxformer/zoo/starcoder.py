"""StarCoder 2: LayerNorm, biases, no gate, RoPE, a window in every layer."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import QKVO, like, sized

# As Llama, except: LayerNorm, no gate, biases; a window in every layer; tied but for
# the largest.
# Lozhkov et al., StarCoder 2 and The Stack v2: The Next Generation, 2024. arXiv:2402.19173,
# section 6
STARCODER_2 = like(
    LLAMA,
    vocab_size=49_152,
    positions=(c.Rope(base=1e6),),
    windows=(4096,),
    biases=QKVO,
    feed_forward=(c.MLP(hidden_dim=1, activation="gelu_tanh", bias=True),),
    norm=c.LayerNorm(eps=1e-5),
    head=c.LMHead(tied=True),
)

PRESETS = {
    "starcoder2-3b": sized(STARCODER_2, 3072, 30, heads=24, kv=2, base=999_999.4420358813),
    "starcoder2-7b": sized(STARCODER_2, 4608, 32, heads=36, kv=4),
    "starcoder2-15b": sized(STARCODER_2, 6144, 40, heads=48, kv=4, base=1e5, tied=False),
}
YEARS = dict.fromkeys(PRESETS, 2024)
