"""Grok-1: a mixture of 8 experts with sandwich norms and capped scores."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import WIDTH, like, sized

# As Llama, except: 2 of 8 experts, weighed by a softmax over all 8; norms before and after the
# branches; capped scores; a scaled embedding; tied logits, divided by sqrt(3).
# xAI, Open Release of Grok-1, 2024. github.com/xai-org/grok-1
EXPERT = c.GLU(hidden_dim=1, activation="gelu_tanh")
GROK = like(
    LLAMA,
    vocab_size=131_072,
    logit_softcap=30.0,
    feed_forward=(c.MoE(expert=EXPERT, num_experts=8, router=c.Router(renormalise=False)),),
    norm_placement="sandwich",
    embedding=c.Embedding(scale=WIDTH**0.5),
    head=c.LMHead(tied=True, multiplier=3**-0.5),
)

PRESETS = {"grok-1": sized(GROK, 6144, 64, heads=48, kv=8, hidden=32_768)}
