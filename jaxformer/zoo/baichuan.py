"""Baichuan 2: Llama at 7B, with ALiBi in place of RoPE at 13B, and a head of unit rows."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

# As Llama, except: the rows of the head have unit length; ALiBi in place of RoPE at 13B.
# Yang et al., Baichuan 2: Open Large-scale Language Models, 2023. arXiv:2309.10305, section 2
BAICHUAN_2 = like(
    LLAMA, vocab_size=125_696, norm=c.RMSNorm(eps=1e-6), head=c.LMHead(unit_rows=True)
)
BAICHUAN_2_13B = like(BAICHUAN_2, positions=(c.Alibi(),))

PRESETS = {
    "baichuan-2-7b": sized(BAICHUAN_2, 4096, 32, heads=32, hidden=11_008),
    "baichuan-2-13b": sized(BAICHUAN_2_13B, 5120, 40, heads=40, hidden=13_696),
}
