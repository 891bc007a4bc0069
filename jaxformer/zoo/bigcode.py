"""SantaCoder and StarCoder: GPT-2 with one head of keys and values."""

from jaxformer import config as c
from jaxformer.zoo.gpt import GPT_2
from jaxformer.zoo.sizes import like, sized

# As GPT-2, except: a longer context, multi-query attention.
# Ben Allal et al., SantaCoder: don't reach for the stars!, 2023. arXiv:2301.03988, section 5.1
SANTACODER = like(
    GPT_2, vocab_size=49_280, embedding=c.Embedding(positions=c.Learned(max_length=2048))
)

# As SantaCoder, except: GELU itself, a longer context.
# Li et al., StarCoder: may the source be with you!, 2023. arXiv:2305.06161, section 5.1
STARCODER = like(
    SANTACODER,
    vocab_size=49_152,
    feed_forward=(c.MLP(hidden_dim=1, activation="gelu", bias=True),),
    embedding=c.Embedding(positions=c.Learned(max_length=8192)),
)

PRESETS = {
    "santacoder": sized(SANTACODER, 2048, 24, heads=16, kv=1),
    "starcoder": sized(STARCODER, 6144, 40, heads=48, kv=1),
}
YEARS = dict.fromkeys(PRESETS, 2023)
