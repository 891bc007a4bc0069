"""What holds of every model, over rows in which any two options meet."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from jaxformer.config import (
    GLU,
    MLP,
    RGLRU,
    XIELU,
    Alibi,
    Angles,
    BlockSparse,
    ChannelMixing,
    Chunks,
    ClampedGEGLU,
    Decay,
    DepthScaledSum,
    Differential,
    Embedding,
    ExpertGroups,
    ExpertLatent,
    Fire,
    GatedNorm,
    HeadTransform,
    HybridHeads,
    Latent,
    LayerEmbedding,
    LayerNorm,
    Learned,
    LinearAttention,
    LMHead,
    MoE,
    MultiHead,
    OutputGate,
    PRope,
    QKNorm,
    QueryPower,
    QueryScaling,
    RMSNorm,
    Rope,
    Router,
    SelectiveScan,
    SharedExpert,
    SharedKV,
    ShortConvolution,
    Sinusoid,
    SparseMixer,
    StepDecay,
    T5Bias,
    TimeMixing,
    TransformerXL,
    Yarn,
)
from jaxformer.layers import empty_cache
from tests.small_models import BASE, jitted_forward, random_params, rounding_error

LENGTH, WINDOW = 7, 3
TOKENS = np.random.default_rng(5).integers(0, BASE.vocab_size, (2, LENGTH))
EVERYWHERE = ("q", "k", "v", "o")
STRETCHED = Yarn(factor=4.0, original_max_length=4)
T5 = T5Bias(num_buckets=8, max_distance=6)
LEARNED = Embedding(positions=Learned(max_length=LENGTH, offset=2), dim=5, norm=LayerNorm())
GROUPED = MoE(
    expert=MLP(hidden_dim=5),
    num_experts=8,
    top_k=3,
    router=Router(
        score="sigmoid",
        bias=True,
        selection_bias=True,
        groups=ExpertGroups(num_groups=4, top_k=2),
        scale=2.5,
        logit_softcap=0.9,
    ),
    shared=SharedExpert(expert=GLU(hidden_dim=7, bias=True), gated=True, combination="average"),
    latent=ExpertLatent(latent_dim=6, bias=True),
)
MIXED = MoE(expert=GLU(hidden_dim=5), num_experts=5, router=SparseMixer(jitter=0.3))
OPTIONS = {  # of attention where its name is there, else of the model
    "positions": {
        "learned": dict(positions=(None,), embedding=LEARNED),
        "sinusoid": dict(positions=(None,), embedding=Embedding(positions=Sinusoid(), scale=3.7)),
        "alibi": dict(positions=(Alibi(),)),
        "t5": dict(positions=(T5,), scale=1.0),
        "fire": dict(positions=(Fire(hidden_dim=3, length=3.0), None)),
        "hybrid": dict(positions=(Rope(targets=EVERYWHERE), None)),
        "transformer-xl": dict(positions=(TransformerXL(),), value_dim=5),
    },
    "placement": {
        name: dict(norm_placement=name) for name in ("pre", "post", "sandwich", "res_post")
    },
    "block": {name: dict(block=name) for name in ("serial", "parallel", "parallel_shared_norm")},
    "windows": {
        "full": {},
        "window": dict(windows=(WINDOW, None)),
        "blocks": dict(windows=(BlockSparse(block_size=2, local_blocks=1, stride=2), None)),
    },
    "heads": {name: dict(num_kv_heads=n) for name, n in dict(mha=4, gqa=2, mqa=1).items()},
    "norm": {
        "rms": dict(norm=RMSNorm(scale_offset=1.0, eps_position="outside"), head=LMHead(tied=True)),
        "layer": dict(norm=LayerNorm(), final_norm=False),
        "bare": dict(
            norm=LayerNorm(parameters="none"), head=LMHead(softcap=3.0, multiplier=0.5, bias=True)
        ),
    },
    "feed-forward": {
        "glu": dict(feed_forward=(GLU(hidden_dim=9, sub_norm=LayerNorm()),)),
        "mixed": dict(
            feed_forward=(
                MLP(hidden_dim=9, bias=True, sparsity=0.4),
                ClampedGEGLU(hidden_dim=5),
                XIELU(hidden_dim=6),
            ),
            residual_multiplier=0.6,
            layer_scalar=True,
            layer_embedding=LayerEmbedding(dim=5),
        ),
        "experts": dict(
            feed_forward=(MoE(expert=ClampedGEGLU(hidden_dim=5), num_experts=4), GROUPED)
        ),
        "mixers": dict(feed_forward=(MIXED, MLP(hidden_dim=9))),
    },
    "scores": {
        "plain": {},
        "normed": dict(
            qk_norm=QKNorm(over="width", placement="after_rope"),
            clip_qkv=0.7,
            logit_softcap=2.0,
            sinks=True,
            output_gate=OutputGate(bias=True),
            query_scaling=QueryPower(exponent=0.7, length=3),
            value_norm=RMSNorm(),
            sub_norm=RMSNorm(),
        ),
        "other": dict(
            qk_norm=QKNorm(norm=LayerNorm(parameters="scale"), over="each_head"),
            biases=("query", "key", "value", "out"),
            normalizer="relu",
            query_scaling=QueryScaling(beta=0.7, original_max_length=3),
            output_gate=OutputGate(over="head", activation="softplus"),
        ),
    },
}
KINDS = {
    "shared": SharedKV(
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        windows=(WINDOW, None),
        qk_norm=QKNorm(),
        biases=("query", "key_value", "out"),
    ),
    "shared, in part": SharedKV(
        num_heads=2,
        head_dim=6,
        positions=(Rope(fraction=0.7, scaling=STRETCHED, targets=EVERYWHERE), Alibi()),
    ),
    "latent": Latent(
        num_heads=4,
        latent_dim=5,
        query_latent_dim=7,
        nope_dim=3,
        rope_dim=4,
        value_dim=6,
        windows=(WINDOW, None),
        biases=("query_latent", "latent", "rotary_key", "out"),
        output_gate=OutputGate(over="head"),
    ),
    "latent, expanded for three": Latent(
        num_heads=2,
        latent_dim=64,
        nope_dim=2,
        rope_dim=2,
        value_dim=2,
        positions=(Rope(scaling=STRETCHED), T5, None),
        query_scaling=QueryScaling(beta=0.7, original_max_length=3),
    ),
    "decay": Decay(num_heads=4, head_dim=4, min_memory=1.5, angles=Angles(base=50.0)),
    "convolution": ShortConvolution(
        num_heads=2, head_dim=3, width=4, biases=("in", "convolution", "out")
    ),
    "gated delta": LinearAttention(
        num_heads=4, num_key_heads=2, key_dim=3, value_dim=5, biases=("in", "out"), max_beta=2.0
    ),
    "mamba 2": LinearAttention(
        num_heads=4,
        num_key_heads=2,
        key_dim=3,
        value_dim=5,
        decay=StepDecay(min_step=0.01, max_step=0.5),
        delta_rule=False,
        beta="step",
        unit_vectors=False,
        scale=1.0,
        skip=True,
        output=GatedNorm(over="group", placement="before_norm"),
        biases=("convolution",),
    ),
    "mamba": SelectiveScan(
        width=6, step_rank=3, state_dim=4, norm=RMSNorm(), biases=("in", "convolution", "out")
    ),
    "time mixing": TimeMixing(width=6),
    "channel mixing": ChannelMixing(hidden_dim=10),
    "griffin": RGLRU(num_heads=2, head_dim=3, convolution_width=3, activation="relu"),
    "kimi delta": LinearAttention(
        num_heads=2,
        num_key_heads=2,
        key_dim=3,
        value_dim=3,
        decay=StepDecay(over="feature", rank=2),
        output=GatedNorm(activation="sigmoid", rank=2),
    ),
    "decay, real": Decay(num_heads=2, head_dim=3, angles=None),
    "hybrid": (
        ShortConvolution(num_heads=2, head_dim=3),
        MultiHead(
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            value_dim=5,
            positions=(T5, Rope(), Rope(), Alibi()),
            windows=(WINDOW, None),
            output_gate=OutputGate(),
        ),
    ),
    "hybrid heads": HybridHeads(
        kinds=(
            Decay(num_heads=2, head_dim=4),
            MultiHead(
                num_heads=4,
                num_kv_heads=2,
                head_dim=6,
                positions=(T5, Rope()),
                windows=(WINDOW, None, None),
            ),
            ShortConvolution(num_heads=2, head_dim=3),
        )
    ),
    "differential": Differential(
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
        positions=(Rope(), Alibi()),
        windows=(WINDOW, None, None),
        norm=RMSNorm(),
        biases=("query", "out"),
    ),
    "chunks": (
        MultiHead(
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            windows=(Chunks(size=WINDOW),),
            qk_norm=QKNorm(),
        ),
        MultiHead(
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            positions=(None,),
            query_scaling=QueryScaling(beta=0.7, original_max_length=2, offset=1),
        ),
    ),
    "hybrid of three": (
        SharedKV(
            num_heads=2,
            head_dim=6,
            positions=(Rope(scaling=PRope(fraction=0.4)),),
            value_norm=RMSNorm(parameters="none"),
        ),
        MultiHead(num_heads=4, num_kv_heads=4, head_dim=6, positions=(Alibi(),)),
        Latent(num_heads=2, latent_dim=5, nope_dim=2, rope_dim=4, value_dim=3, windows=(WINDOW,)),
    ),
}


def pairs_of(row):
    return set(combinations(sorted(row.items()), 2))


def covering():
    """Few rows in which any two values of different options meet."""
    missing = set()
    for (one, some), (other, more) in combinations(sorted(OPTIONS.items()), 2):
        missing |= {((one, a), (other, b)) for a in some for b in more}
    while missing:
        row = dict(min(missing))
        for option in OPTIONS:
            if option not in row:
                row[option] = max(
                    OPTIONS[option],
                    key=lambda value: len(missing & pairs_of(row | {option: value})),  # noqa: B023
                )
        missing -= pairs_of(row)
        yield {option: row[option] for option in OPTIONS}


def of(row):
    """Three layers, so that of a pattern of two one is left over."""
    chosen = {}
    for option, value in row.items():
        chosen |= OPTIONS[option][value]
    within = {name: x for name, x in chosen.items() if hasattr(BASE.attention, name)}
    whole = {name: x for name, x in chosen.items() if name not in within}
    return replace(BASE, attention=replace(BASE.attention, **within), **whole)


NORMED = replace(
    GROUPED,
    router=Router(
        score="sigmoid",
        selection_bias=True,
        selection="logits",
        norm=LayerNorm(),
        expert_scale=True,
    ),
    norm=RMSNorm(scale_offset=1.0),
)
CONFIGS = {name: replace(BASE, attention=kind) for name, kind in KINDS.items()}
CONFIGS["norms by layer"] = replace(
    BASE,
    norm_placement=("pre", "res_post", "sandwich"),
    feed_forward=(GLU(hidden_dim=11), NORMED, replace(GROUPED, output_norm=RMSNorm())),
    attention=(KINDS["gated delta"], BASE.attention),
    num_layers=7,
)
CONFIGS["no first norm, hidden layer of the head"] = replace(
    BASE,
    norm_placement=("pre_feed_forward", "pre", "sandwich"),
    post_norm=RMSNorm(eps=0.1, scale_offset=1.0),
    last_norm=LayerNorm(parameters="scale"),
    residual=DepthScaledSum(),
    head=LMHead(tied=True, transform=HeadTransform(bias=True, activation="silu")),
)
CONFIGS |= {"-".join(row.values()): of(row) for row in covering()}


def cases(number):
    """The first configurations; the others before a release, since each adds few pairs."""
    for i, (name, config) in enumerate(CONFIGS.items()):
        mark = pytest.mark.exhaustive if i >= number else pytest.mark.slow
        yield pytest.param(config, id=name, marks=mark if i >= 12 else ())


@pytest.fixture(scope="module", params=cases(28))  # so that all claims of one go in turn
def config(request):
    return request.param


@pytest.mark.slow
def test_logits_depend_on_no_later_token(config):
    """inventory row 123: what comes after a token changes nothing of its logits, not a bit."""
    params, run = random_params(config), jitted_forward(config)
    later = TOKENS.copy()
    later[:, 4:] = (later[:, 4:] + 1) % config.vocab_size
    logits, changed = (np.asarray(run(params, tokens)) for tokens in (TOKENS, later))
    np.testing.assert_array_equal(changed[:, :4], logits[:, :4])
    assert (changed[:, 4:] != logits[:, 4:]).any(axis=-1).all()


@pytest.mark.parametrize("config", [*cases(18)], indirect=True, scope="module")
@pytest.mark.slow(but=["shared, in part"])
def test_layers_unrolled_compute_what_the_loop_does(config):
    params, run = random_params(config), jitted_forward(config)
    unrolled = jitted_forward(config, scan=False)(params, TOKENS)
    bound = 3 * rounding_error(run, params, TOKENS)
    np.testing.assert_allclose(unrolled, run(params, TOKENS), rtol=0, atol=bound)


@pytest.mark.slow(but=["decay"])
def test_token_by_token_with_a_cache_is_the_whole_text_at_once(config):
    params, run, cache = (
        random_params(config),
        jitted_forward(config),
        empty_cache(config, (2,), LENGTH),
    )
    whole, bound = np.asarray(run(params, TOKENS)), 3 * rounding_error(run, params, TOKENS)
    for t in range(LENGTH):
        logits, cache = run(params, TOKENS[:, t : t + 1], cache=cache)
        np.testing.assert_allclose(
            logits[:, 0], whole[:, t], rtol=0, atol=bound, err_msg=f"token {t}"
        )
