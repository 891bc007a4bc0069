"""XGLM, M2M-100, NLLB and Pegasus: pre-norm, sinusoids, a scaled and tied embedding."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.gpt import GPT_2
from jaxformer.zoo.sizes import DEPTH, WIDTH, like, sized

# As GPT-2, except: GELU itself, a scaled embedding, and sinusoids without the first two.
# Lin et al., Few-shot Learning with Multilingual Language Models, 2021. arXiv:2112.10668,
# section 2.2
XGLM = like(
    GPT_2,
    vocab_size=256_008,
    feed_forward=(c.MLP(hidden_dim=1, activation="gelu", bias=True),),
    embedding=c.Embedding(scale=WIDTH**0.5, positions=c.Sinusoid(layout="tensor2tensor", offset=2)),
)

# As XGLM, except: an encoder too, ReLU.
# Fan et al., Beyond English-Centric Multilingual Machine Translation, 2020. arXiv:2010.11125,
# section 5.1
M2M_100 = like(
    XGLM,
    vocab_size=128_112,
    feed_forward=(c.MLP(hidden_dim=1, activation="relu", bias=True),),
    topology=c.EncoderDecoder(num_encoder_layers=DEPTH),
)

# As M2M-100, except: a larger vocabulary.
# NLLB Team, No Language Left Behind: Scaling Human-Centered Machine Translation, 2022.
# arXiv:2207.04672, section 8.2
NLLB = like(M2M_100, vocab_size=256_206)

# As M2M-100, except: all sinusoids in another layout, a bias of the logits.
# Zhang et al., PEGASUS: Pre-training with Extracted Gap-sentences for Abstractive Summarization,
# 2019. arXiv:1912.08777, section 5
PEGASUS = like(
    M2M_100,
    vocab_size=96_103,
    embedding=replace(M2M_100.embedding, positions=c.Sinusoid(layout="halves")),
    head=c.LMHead(tied=True, bias=True),
)

PRESETS = {
    "pegasus-large": sized(PEGASUS, 1024, 16, heads=16),
    "m2m-100-418m": sized(M2M_100, 1024, 12, heads=16),
    "xglm-564m": sized(XGLM, 1024, 24, heads=16),
    "xglm-7.5b": sized(XGLM, 4096, 32, heads=32),
    "nllb-200-600m": sized(NLLB, 1024, 12, heads=16),
    "nllb-200-3.3b": sized(NLLB, 2048, 24, heads=16),
}
YEARS = {
    "pegasus-large": 2019,
    "m2m-100-418m": 2020,
    **dict.fromkeys(("xglm-564m", "xglm-7.5b"), 2021),
    **dict.fromkeys(("nllb-200-600m", "nllb-200-3.3b"), 2022),
}
