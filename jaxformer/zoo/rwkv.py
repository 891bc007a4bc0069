"""RWKV-4: averages of values under decaying weights, and networks of neighbouring tokens."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

# As Llama, except: a layer is time mixing or channel mixing alone, LayerNorm, also of the
# embedding.
# Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023. arXiv:2305.13048, section 3
RWKV_4 = like(
    LLAMA,
    vocab_size=50_277,
    attention=(c.TimeMixing(width=1), c.ChannelMixing(hidden_dim=1)),
    feed_forward=(c.NoFeedForward(),),
    norm=c.LayerNorm(),
    embedding=c.Embedding(norm=c.LayerNorm()),
)

PRESETS = {"rwkv-4-169m": sized(RWKV_4, 768, 2 * 12)}
YEARS = {"rwkv-4-169m": 2023}
