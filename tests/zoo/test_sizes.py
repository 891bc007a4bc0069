"""Templates of families, and models of given sizes."""

import pytest

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

MOE = c.MoE(
    expert=c.GLU(hidden_dim=1), num_experts=2, shared=c.SharedExpert(expert=c.GLU(hidden_dim=2))
)
MIXED = like(LLAMA, feed_forward=(c.GLU(hidden_dim=1), MOE))


def test_a_template_is_a_difference():
    qwen = like(LLAMA, biases=("query",), norm=c.LayerNorm())
    assert (qwen.attention.biases, qwen.norm) == (("query",), c.LayerNorm())
    assert qwen.feed_forward == LLAMA.feed_forward
    with pytest.raises(TypeError, match="bias"):
        like(LLAMA, bias=True)


def test_sizes_of_attention_follow_the_width():
    model = sized(LLAMA, 96, 3, heads=6, vocab=11, tied=True, base=5.0)
    attention = model.attention
    assert (model.model_dim, model.num_layers, model.vocab_size, model.head.tied) == (
        96,
        3,
        11,
        True,
    )
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (6, 6, 16)
    assert model.feed_forward == (c.GLU(hidden_dim=384),)
    assert model.layers[0].rope.base == 5.0


def test_dense_layers_come_before_those_with_experts():
    model = sized(MIXED, 48, 4, heads=4, hidden=7, experts=6, top_k=3, expert_dim=5, dense=3)
    dense, moe = c.GLU(hidden_dim=7), model.layers[3].feed_forward
    assert [layer.feed_forward for layer in model.layers[:3]] == [dense] * 3
    assert (moe.num_experts, moe.top_k, moe.expert.hidden_dim) == (6, 3, 5)
    assert moe.shared.expert.hidden_dim == 10


def test_scales_follow_the_width():
    gemma = like(LLAMA, embedding=c.Embedding(scale=LLAMA.model_dim**0.5))
    assert sized(gemma, 100, 1, heads=1).embedding.scale == pytest.approx(10.0)


def test_a_size_that_the_template_lacks_is_refused():
    with pytest.raises(ValueError, match="no option of the sizes dense, experts"):
        sized(LLAMA, 96, 3, heads=6, experts=4, dense=1)
