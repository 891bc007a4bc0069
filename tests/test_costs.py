from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxformer import Transformer, costs
from jaxformer import config as c
from jaxformer import functional as F

BASE = c.TransformerConfig(
    vocab_size=31,
    model_dim=14,
    num_layers=3,
    attention=c.MultiHead(num_heads=4, num_kv_heads=2, head_dim=6),
    feed_forward=(c.GLU(hidden_dim=11),),
)


def change(attention=None, **fields):
    return replace(BASE, attention=replace(BASE.attention, **(attention or {})), **fields)


EXPERTS = c.MoE(expert=c.GLU(hidden_dim=7), num_experts=5, top_k=2)


def shapes(config):
    tokens = jnp.zeros((1, 3), jnp.int32)
    source = tokens if isinstance(config.topology, c.EncoderDecoder) else None
    model = Transformer(config)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, source=source))["params"]


@pytest.mark.slow
def test_active_parameters():
    """Without the kernels of the experts that a token does not meet; the router stays."""
    per_expert = 3 * 14 * 7
    config = change(feed_forward=(EXPERTS, c.MLP(hidden_dim=9)))  # layers 0 and 2 of 3
    assert costs.num_active_parameters(config) == costs.num_parameters(config) - 2 * 3 * per_expert
    both = c.EncoderDecoder(num_encoder_layers=3)  # layer 0, and 0 and 2 of 3
    config = change(topology=both, feed_forward=(EXPERTS, c.GLU(hidden_dim=5)), num_layers=1)
    assert costs.num_active_parameters(config) == costs.num_parameters(config) - 3 * 3 * per_expert
    assert costs.num_active_parameters(BASE) == costs.num_parameters(BASE)
    config = change(feed_forward=(replace(EXPERTS, latent=c.ExpertLatent(latent_dim=5)),))
    unused = 3 * 3 * 3 * 5 * 7  # of three layers, three experts, three kernels
    assert costs.num_active_parameters(config) == costs.num_parameters(config) - unused


def llama(*, heads, kv_heads, model_dim, layers, hidden, vocab_size=32_000):
    return c.TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=layers,
        attention=c.MultiHead(num_heads=heads, num_kv_heads=kv_heads, head_dim=model_dim // heads),
        feed_forward=(c.GLU(hidden_dim=hidden),),
    )


LLAMA_70B = llama(heads=64, kv_heads=8, model_dim=8192, layers=80, hidden=28_672)
LLAMA_7B = llama(heads=32, kv_heads=32, model_dim=4096, layers=32, hidden=11_008)


def test_published_parameter_counts():
    """Llama 2 as released, and GPT-2 small."""
    assert costs.num_parameters(LLAMA_70B) == 68_976_648_192
    assert costs.num_parameters(LLAMA_7B) == 6_738_415_616
    gpt2 = c.TransformerConfig(
        vocab_size=50_257,
        model_dim=768,
        num_layers=12,
        attention=c.MultiHead(
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            positions=(None,),
            biases=("query", "key", "value", "out"),
        ),
        feed_forward=(c.MLP(hidden_dim=3072, bias=True),),
        norm=c.LayerNorm(),
        embedding=c.Embedding(positions=c.Learned(max_length=1024)),
        head=c.LMHead(tied=True),
    )
    assert costs.num_parameters(gpt2) == 124_439_808


# Matrix products dominate at this size.
WIDE = replace(
    llama(heads=4, kv_heads=2, model_dim=128, layers=3, hidden=384, vocab_size=512),
    attention=c.MultiHead(num_heads=4, num_kv_heads=2, head_dim=48),
)
LATENT = replace(
    WIDE,
    attention=c.Latent(
        num_heads=4, latent_dim=96, query_latent_dim=120, nope_dim=32, rope_dim=16, value_dim=48
    ),
)
MIXED = replace(WIDE, feed_forward=(c.MoE(expert=c.GLU(hidden_dim=96), num_experts=16, top_k=8),))
SHARED = replace(WIDE, attention=c.SharedKV(num_heads=4, head_dim=48))
GATED_DELTA = c.LinearAttention(
    num_heads=4, num_key_heads=2, key_dim=48, value_dim=48, convolution_width=None
)
PRODUCTS = {
    "gated": WIDE,
    "shared": SHARED,
    "latent": LATENT,
    "differential": replace(
        WIDE, attention=c.Differential(num_heads=8, num_kv_heads=4, head_dim=48)
    ),
    "output gate": replace(
        WIDE,
        attention=replace(WIDE.attention, output_gate=c.OutputGate()),
        topology=c.EncoderDecoder(num_encoder_layers=2),
    ),
    "narrow values": replace(
        WIDE, attention=replace(WIDE.attention, value_dim=20, sub_norm=c.RMSNorm())
    ),
    "plain": replace(WIDE, feed_forward=(c.MLP(hidden_dim=512), c.GLU(hidden_dim=300))),
    "factorised": replace(WIDE, embedding=c.Embedding(dim=200)),
    "hidden layer of the head": replace(WIDE, head=c.LMHead(transform=c.HeadTransform())),
    "factorised, hidden layer of the head": replace(
        WIDE, embedding=c.Embedding(dim=200), head=c.LMHead(transform=c.HeadTransform(bias=True))
    ),
    "decay": replace(WIDE, attention=c.Decay(num_heads=4, head_dim=48, angles=None)),
    "gated delta": replace(WIDE, attention=GATED_DELTA),
    "mamba 2": replace(
        WIDE,
        attention=replace(
            GATED_DELTA, decay=c.StepDecay(), delta_rule=False, beta="step", convolution_width=4
        ),
    ),
    "lightning": replace(
        WIDE, attention=replace(GATED_DELTA, decay=c.SlopeDecay(), delta_rule=False, beta="one")
    ),
    "encoder": replace(WIDE, topology=c.Encoder()),
    "encoder-decoder": replace(WIDE, topology=c.EncoderDecoder(num_encoder_layers=2)),
    "encoder-decoder, factorised": replace(
        WIDE, topology=c.EncoderDecoder(num_encoder_layers=2), embedding=c.Embedding(dim=200)
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.slow(but=["encoder"])
def test_forward_flops_are_those_the_compiler_counts(name):
    """XLA counts norms, activations and softmax too, 1 to 2 % here, and cumulative sums as squares,
    2 % of linear attention; loops it counts once, so layers are unrolled."""
    config, T, S = PRODUCTS[name], 64, 48
    reads = isinstance(config.topology, c.EncoderDecoder)
    model = Transformer(config, scan=False)
    source = jax.ShapeDtypeStruct((S,), jnp.int32) if reads else None
    forward = jax.jit(lambda p, tokens, source: model.apply({"params": p}, tokens, source=source))
    lowered = forward.lower(shapes(config), jax.ShapeDtypeStruct((T,), jnp.int32), source)
    analysis = lowered.compile().cost_analysis() if name == "gated" else lowered.cost_analysis()
    ours = costs.forward_flops(config, T, S if reads else 0)
    assert 1 < analysis["flops"] / ours < (1.05 if name in ("mamba 2", "lightning") else 1.03)


def test_flops_of_one_product_at_a_time():
    """Each part of the sum on paper: 2 * rows * inputs * outputs."""
    T, D, V, F_, N, K, H = 64, 128, 512, 384, 4, 2, 48
    head = 2 * T * D * V
    projections = 2 * T * D * (2 * N + 2 * K) * H
    mixing = 2 * 2 * T * T * N * H
    feed_forward = 2 * T * 3 * D * F_
    assert costs.forward_flops(WIDE, T) == head + 3 * (projections + mixing + feed_forward)
    windowed = replace(WIDE, attention=replace(WIDE.attention, windows=(16, None, 100)))
    saved = 2 * 2 * T * (T - 16) * N * H  # in the first layer; the third sees all 64 keys
    assert costs.forward_flops(windowed, T) == costs.forward_flops(WIDE, T) - saved


def test_flops_of_decay():
    """Values, what they are mixed to in chunks of 64 tokens, and the way back."""
    T, D, N, H = 640, 128, 4, 48
    both = [
        costs.forward_flops(replace(WIDE, attention=kind), T)
        for kind in (WIDE.attention, c.Decay(num_heads=N, head_dim=H))
    ]
    heads = 2 * T * D * (2 * N + 2 * 2) * H + 2 * 2 * T * T * N * H
    assert both[0] - both[1] == 3 * (heads - 2 * T * N * H * (2 * D + 64))
    short = [costs.forward_flops(replace(WIDE, attention=c.Decay(num_heads=N, head_dim=H)), 5)]
    assert short[0] == 2 * 5 * (D * 512 + 3 * (3 * D * 384 + N * H * (2 * D + 5)))


def test_flops_of_shared_keys_and_of_latents():
    """One kernel less; and every kernel on the way from a token to its keys, expanded."""
    T, D, N, H = 64, 128, 4, 48
    rest = costs.forward_flops(WIDE, T) - 3 * 2 * T * (D * (2 * N + 2 * 2) * H + 2 * T * N * H)
    shared = 2 * T * (D * (2 * N + 1) * H + 2 * T * N * H)
    assert costs.forward_flops(SHARED, T) == rest + 3 * shared
    C, Q, P, R, V = 96, 120, 32, 16, 48
    kernels = D * Q + Q * N * (P + R) + D * (C + R) + C * N * (P + V) + N * V * D
    latent = 2 * T * (kernels + T * N * (P + R + V))
    assert costs.forward_flops(LATENT, T) == rest + 3 * latent


@pytest.mark.slow
def test_costs_of_a_gate():
    """One more kernel, what it gives, and the heads once more behind the gate."""
    B, T, D, N, H, V = 2, 64, 128, 4, 48, 48
    for config, width in ((WIDE, H), (LATENT, V)):
        for over, gates in (("feature", N * width), ("head", N)):
            gate = c.OutputGate(over=over)
            gated = replace(config, attention=replace(config.attention, output_gate=gate))
            more = costs.num_parameters(gated) - costs.num_parameters(config)
            assert more == 3 * D * gates
            more = costs.forward_flops(gated, T) - costs.forward_flops(config, T)
            assert more == 3 * 2 * T * D * gates
            for remat, saved in (("none", gates + N * width), ("dots", gates)):
                more, less = (
                    costs.activation_bytes(x, B, T, remat=remat, tensor=2) for x in (gated, config)
                )
                numbers = 3 * saved + gates + N * width  # of 3 layers, and of one at work
                assert more - less == B * T * 4 * numbers / 2


def test_costs_of_narrow_values_and_a_norm_of_them():
    """Kernels, the product with the weights, the cache, and the heads once more behind the norm."""
    B, T, D, N, K, H, V = 2, 64, 128, 4, 2, 48, 20
    narrow = replace(WIDE, attention=replace(WIDE.attention, value_dim=V))
    fewer = costs.num_parameters(WIDE) - costs.num_parameters(narrow)
    assert fewer == 3 * D * (N + K) * (H - V)
    fewer_flops = costs.forward_flops(WIDE, T) - costs.forward_flops(narrow, T)
    assert fewer_flops == 2 * T * fewer + 3 * 2 * T * T * N * (H - V)
    assert costs.cache_bytes(narrow, 7, bytes_per_number=2) == 3 * 7 * K * (H + V) * 2
    normed = replace(narrow, attention=replace(narrow.attention, sub_norm=c.RMSNorm()))
    assert costs.num_parameters(normed) - costs.num_parameters(narrow) == 3 * N * V
    more, less = (costs.activation_bytes(x, B, T, remat="none") for x in (normed, narrow))
    assert more - less == B * T * 4 * 4 * N * V  # of 3 layers, and of one at work


def test_flops_of_experts_and_transformer_xl():
    """top_k experts and the router; W times a sinusoid a distance, and the scores it gives."""
    T, D, F_, N, H = 64, 128, 300, 4, 48
    rest = costs.forward_flops(WIDE, T) - 3 * 2 * T * 3 * D * 384
    experts = c.MoE(expert=c.GLU(hidden_dim=F_), num_experts=8, top_k=2)
    mixed = replace(WIDE, feed_forward=(experts,))
    assert costs.forward_flops(mixed, T) == rest + 3 * 2 * T * (2 * 3 * D * F_ + 8 * D)
    latent = replace(experts, latent=c.ExpertLatent(latent_dim=40))
    mixed = replace(WIDE, feed_forward=(latent,))
    per_token = 2 * 3 * 40 * F_ + 8 * D + 2 * 40 * D
    assert costs.forward_flops(mixed, T) == rest + 3 * 2 * T * per_token
    relative = replace(WIDE, attention=replace(WIDE.attention, positions=(c.TransformerXL(),)))
    added = 3 * 2 * T * (D + T) * N * H
    assert costs.forward_flops(relative, T) == costs.forward_flops(WIDE, T) + added


def test_activations_of_experts_are_those_of_as_wide_a_layer_and_their_rows():
    wide = replace(WIDE, feed_forward=(c.GLU(hidden_dim=600),))
    experts = c.MoE(expert=c.GLU(hidden_dim=300), num_experts=8, top_k=2)
    mixed = replace(WIDE, feed_forward=(experts,))
    rows = 2 * 64 * 4 * 2 * WIDE.model_dim
    for remat, arrays in (("none", 4 * 3), ("dots", 3 + 3), ("full", 3)):  # 3 layers, one at work
        of_experts, of_wide = (costs.activation_bytes(x, 2, 64, remat=remat) for x in (mixed, wide))
        assert of_experts - of_wide == arrays * rows


def test_training_flops_are_six_per_parameter_and_token():
    """The usual estimate, 6 * parameters, when products of parameters dominate."""
    per_token = costs.training_flops_per_token(LLAMA_7B, 128)
    kernels = costs.num_parameters(LLAMA_7B) - 32_000 * 4096  # looking rows up multiplies nothing
    assert per_token == pytest.approx(6 * kernels, rel=0.01)
    assert per_token == 3 * costs.forward_flops(LLAMA_7B, 128) / 128
    adapted = replace(LLAMA_7B, adapter=c.LoRA())  # no gradients of the frozen kernels
    assert costs.training_flops_per_token(adapted, 128) == per_token * 2 / 3


def test_cache_bytes():
    """Llama 2 70B keeps 320 KiB a token in bfloat16, an eighth of what 64 KV heads would."""
    assert costs.cache_bytes(LLAMA_70B, 1) == 80 * 2 * 8 * 128 * 2 == 327_680
    assert costs.cache_bytes(LLAMA_70B, 4096, batch=3) == 3 * 4096 * 327_680
    every_head = replace(LLAMA_70B, attention=replace(LLAMA_70B.attention, num_kv_heads=64))
    assert costs.cache_bytes(every_head, 7) == 8 * costs.cache_bytes(LLAMA_70B, 7)
    windowed = replace(LLAMA_70B, attention=replace(LLAMA_70B.attention, windows=(4096, None)))
    assert costs.cache_bytes(windowed, 5000) == 40 * (4096 + 5000) * 2 * 8 * 128 * 2
    assert costs.cache_bytes(windowed, 100) == costs.cache_bytes(LLAMA_70B, 100)
    assert costs.cache_bytes(LLAMA_70B, 1, bytes_per_number=1) == 327_680 // 2
    for number in (0, -1, True, 1.5, "2", 8):
        with pytest.raises(ValueError, match=f"must be 1, 2 or 4; got {number!r}"):
            costs.cache_bytes(LLAMA_70B, 1, bytes_per_number=number)
    with pytest.raises(ValueError, match=r"batch must be an integer of at least 0; got \(1,\)"):
        costs.cache_bytes(LLAMA_70B, 1, batch=(1,))


def test_cache_bytes_are_those_of_the_arrays():
    """The keys and values that the layers compute, as arrays."""
    tokens = jnp.zeros((2, 5), jnp.int32)
    model = Transformer(BASE, dtype=jnp.bfloat16, scan=False)

    def intermediates():
        _, state = model.init_with_output(
            jax.random.key(0), tokens, capture_intermediates=is_key_or_value
        )
        return state["intermediates"]

    def is_key_or_value(module, method):
        return module.name in ("key", "value")

    arrays = jax.tree.leaves(jax.eval_shape(intermediates))
    total = sum(x.size * x.dtype.itemsize for x in arrays)
    assert costs.cache_bytes(BASE, 5, batch=2) == total > 0


def measured_bytes(config, batch, length, remat, *, packed=False):
    """What the compiler sets aside for the gradient of a loss, on packed documents or none."""
    model = Transformer(config, remat=remat)

    def loss(params, tokens):
        segments = tokens if packed else None
        return F.cross_entropy(model.apply({"params": params}, tokens, segments=segments), tokens)

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    compiled = jax.jit(jax.grad(loss)).lower(shapes(config), tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "remat", ["none", pytest.param("dots", marks=pytest.mark.exhaustive), "full"]
)
@pytest.mark.parametrize(
    "kind, batch, length",
    [
        (c.Decay(num_heads=4, head_dim=48), 2, 192),
        (GATED_DELTA, 2, 192),
        (c.SelectiveScan(width=384, step_rank=12), 1, 768),  # more than a chunk
        (c.RGLRU(num_heads=4, head_dim=48), 2, 192),
        (c.TimeMixing(width=192), 2, 192),
        (c.ChannelMixing(hidden_dim=768), 2, 192),
    ],
    ids=["Decay", "LinearAttention", "SelectiveScan", "RGLRU", "TimeMixing", "ChannelMixing"],
)
@pytest.mark.slow
def test_activation_bytes_of_recurrences_are_near_the_compilers(remat, kind, batch, length):
    config = replace(WIDE, num_layers=6, attention=kind)
    ours = costs.activation_bytes(config, batch, length, remat=remat)
    assert 0.5 < ours / measured_bytes(config, batch, length, remat, packed=True) < 2


@pytest.mark.parametrize(
    "config, remat, batch, length",
    [
        (WIDE, "none", 4, 64),
        (WIDE, "dots", 2, 192),
        (WIDE, "full", 2, 192),
        (SHARED, "none", 4, 64),
        (LATENT, "dots", 2, 192),
        (MIXED, "dots", 2, 192),
        (WIDE, "none", 2, 320),  # by blocks
        (WIDE, "full", 2, 320),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (WIDE, "none", 2, 192),
                (WIDE, "dots", 4, 64),
                (WIDE, "full", 4, 64),
                (LATENT, "none", 4, 64),
                (MIXED, "none", 2, 192),
                (MIXED, "full", 2, 192),
                (WIDE, "dots", 2, 320),
                (LATENT, "none", 1, 320),
            )
        ),
    ],
)
@pytest.mark.slow
def test_activation_bytes_are_near_the_compilers(config, remat, batch, length):
    config = replace(config, num_layers=6)
    measured = measured_bytes(config, batch, length, remat)
    assert 0.5 < costs.activation_bytes(config, batch, length, remat=remat) / measured < 2


def test_activation_bytes_by_hand():
    """3 layers kept, and one at work; what devices divide and what each has whole."""
    B, T, D, V, F_, N, K, H = 2, 64, 128, 512, 384, 4, 2, 48

    def layer(t=1):
        return 10 * D + (3 * N * H + 3 * K * H + 6 * F_) / t

    def bytes_of(saved, working, c=1, t=1):
        return B * T // c * ((3 * saved + working) * 4 + 8 * V // t)

    scores, dots = 2 * N * T, 3 * D + (N + 2 * K) * H + 2 * F_
    none, cost = layer() + scores, costs.activation_bytes
    assert cost(WIDE, B, T) == bytes_of(none, none)
    assert cost(WIDE, B, T, remat="dots") == bytes_of(dots, none)
    assert cost(WIDE, B, T, remat="full") == bytes_of(D, none)
    half = layer(2) + scores / 2
    assert cost(WIDE, B, T, tensor=2) == bytes_of(half, half, t=2)
    copies = layer(4) + scores / 4 + 3 * K * H / 4  # both heads of two are not divided by four
    assert cost(WIDE, B, T, tensor=4) == bytes_of(copies, copies, t=4)
    ring = layer() + N
    whole = bytes_of(ring, ring + 8 * K * H, c=4)
    biased = replace(WIDE, attention=replace(WIDE.attention, positions=(c.Alibi(),)))
    assert cost(WIDE, B, T, context=4) == cost(biased, B, T, context=4) == whole
    experts = c.MoE(expert=c.GLU(hidden_dim=F_ // 2), num_experts=8, top_k=2)
    mixed = replace(WIDE, feed_forward=(experts,))
    rows = 2 * 2 * D  # top_k outputs per token, and as many rows without a token
    room = none + 6 * F_ + 3 * rows
    assert cost(mixed, B, T, expert_capacity_factor=2.0) == bytes_of(room, room)
    assert cost(mixed, B, T, expert_capacity_factor=2.0, remat="dots") == bytes_of(
        dots + 2 * F_ + rows, room
    )


def test_activation_bytes_of_an_encoder_decoder_are_those_of_both():
    both = PRODUCTS["encoder-decoder"]
    decoder = costs.activation_bytes(both, 2, 64, remat="full")
    added = costs.activation_bytes(both, 2, 64, source_length=48, remat="full") - decoder
    assert added == 2 * 48 * 2 * 128 * 4


def test_activation_bytes_in_order():
    none, dots, full = (
        costs.activation_bytes(LLAMA_7B, 2, 512, remat=remat, bytes_per_number=2)
        for remat in ("none", "dots", "full")
    )
    assert full < dots < none
    two, four = (
        costs.activation_bytes(LLAMA_7B, batch, 512) - costs.logit_bytes(LLAMA_7B, batch * 512)
        for batch in (2, 4)
    )
    assert four == 2 * two
    with pytest.raises(ValueError, match=r"one of \('none', 'dots', 'full'\); got 'some'"):
        costs.activation_bytes(LLAMA_7B, 2, 512, remat="some")


def test_logits_that_there_are_at_once():
    """All of few tokens; of many as few as products still fill matrix units with."""
    assert costs.logit_bytes(LLAMA_7B, 256) == 2 * 4 * 256 * 32_000
    assert costs.logit_bytes(LLAMA_7B, 2048) == 2 * 4 * 2048 * 2048
    assert costs.logit_bytes(LLAMA_7B, 2048, tensor=4) == 2 * 4 * 2048 * 8000
    assert costs.logit_bytes(LLAMA_7B, 2**20) == 2 * 4 * 2**20 * 512
    assert not costs.recomputes_logits(LLAMA_7B, 256)
    assert costs.recomputes_logits(LLAMA_7B, 2048)
    assert not costs.recomputes_logits(LLAMA_7B, 2048, tensor=4)
