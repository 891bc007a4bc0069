"""ERNIE 4.5, dense and with experts: Llama with neighbouring features rotated together."""

from jaxformer import config as c
from jaxformer.zoo.deepseek import TWO_SHARED
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, like, sized

# As Llama, except: neighbouring features rotated, heads of 128 whatever the width, tied.
# Baidu ERNIE team, ERNIE 4.5 Technical Report, 2025
ERNIE_4_5 = like(
    LLAMA,
    vocab_size=103_424,
    head=c.LMHead(tied=True),
    positions=(c.Rope(base=500_000.0, pairing="neighbours"),),
)

# As the dense ERNIE 4.5, except: after the first layer 6 of 64 experts, by softmax and a selection
# bias, and 2 shared ones.
EXPERTS = c.MoE(
    expert=GLU, num_experts=64, top_k=6, router=c.Router(selection_bias=True), shared=TWO_SHARED
)
ERNIE_4_5_MOE = like(ERNIE_4_5, feed_forward=(GLU, EXPERTS))

PRESETS = {
    "ernie-4.5-0.3b": sized(ERNIE_4_5, 1024, 18, heads=16, kv=2, head_dim=128, hidden=3072),
    "ernie-4.5-21b-a3b": sized(
        ERNIE_4_5_MOE, 2560, 28, heads=20, kv=4, dense=1, hidden=12_288, expert_dim=1536
    ),
}
YEARS = dict.fromkeys(PRESETS, 2025)
