"""MPT: ALiBi, and no biases at all, also in the LayerNorms."""

from jaxformer import config as c
from jaxformer.zoo.gpt import GPT_2
from jaxformer.zoo.sizes import like, sized

# As GPT-2, except: ALiBi in place of a position table, no biases, GELU itself; vocabulary padded
# from 50,277.
# MosaicML, Introducing MPT-7B: A New Standard for Open-Source, Commercially Usable LLMs, 2023
MPT = like(
    GPT_2,
    vocab_size=50_432,
    norm=c.LayerNorm(parameters="scale"),
    embedding=c.Embedding(),
    positions=(c.Alibi(),),
    biases=(),
    feed_forward=(c.MLP(hidden_dim=1, activation="gelu"),),
)

PRESETS = {"mpt-7b": sized(MPT, 4096, 32, heads=32), "mpt-30b": sized(MPT, 7168, 48, heads=64)}
YEARS = dict.fromkeys(PRESETS, 2023)
