"""LaMDA: a decoder with relative positions and GeGLU; unpublished details are as in T5 v1.1."""

from jaxformer import config as c
from jaxformer.zoo.sizes import like, sized
from jaxformer.zoo.t5 import T5_V1_1

# As T5 v1.1, except: a decoder only. Norm, its position, the scale of the scores and the head are
# not published.
# Thoppilan et al., LaMDA: Language Models for Dialog Applications, 2022. arXiv:2201.08239,
# section 3
LAMDA = like(T5_V1_1, vocab_size=32_000, topology=c.Decoder())

PRESETS = {"lamda-137b": sized(LAMDA, 8192, 64, heads=128, head_dim=128, hidden=65_536)}
