"""OPT: GPT with ReLU; position table offset by 2 rows, vocabulary padded to 50,272."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.gpt import GPT_2
from jaxformer.zoo.sizes import like, sized

# As GPT-2, except: ReLU, and 2 rows before the rows of the positions. The model of 350M has
# post-norm, no final norm, and a narrower embedding.
# Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022. arXiv:2205.01068,
# section 2.1
OPT = like(
    GPT_2,
    vocab_size=50_272,
    feed_forward=(c.MLP(hidden_dim=1, activation="relu", bias=True),),
    embedding=c.Embedding(positions=c.Learned(max_length=2048, offset=2)),
)
OPT_350M = like(
    OPT, norm_placement="post", final_norm=False, embedding=replace(OPT.embedding, dim=512)
)

PRESETS = {
    "opt-125m": sized(OPT, 768, 12, heads=12),
    "opt-350m": sized(OPT_350M, 1024, 24, heads=16),
    "opt-1.3b": sized(OPT, 2048, 24, heads=32),
    "opt-6.7b": sized(OPT, 4096, 32, heads=32),
    "opt-175b": sized(OPT, 12_288, 96, heads=96),
}
