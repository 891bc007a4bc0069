"""BLOOM: serial blocks, ALiBi, embedding norm; vocabulary padded from 250,680 to 250,880."""

from jaxformer import config as c
from jaxformer.zoo.gpt import GPT_2
from jaxformer.zoo.sizes import like, sized

# As GPT-2, except: ALiBi in place of a position table, and a norm of the embedding.
# BigScience, BLOOM: A 176B-Parameter Open-Access Multilingual Language Model, 2022.
# arXiv:2211.05100, section 3.2
BLOOM = like(
    GPT_2, vocab_size=250_880, embedding=c.Embedding(norm=c.LayerNorm()), positions=(c.Alibi(),)
)

PRESETS = {
    "bloom-560m": sized(BLOOM, 1024, 24, heads=16),
    "bloom-1b7": sized(BLOOM, 2048, 24, heads=16),
    "bloom-7b1": sized(BLOOM, 4096, 30, heads=32),
    "bloom-176b": sized(BLOOM, 14_336, 70, heads=112),
}
