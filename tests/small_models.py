"""Small models shared by tests, initialized and compiled once per process."""

from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np

from jaxformer import Transformer, zoo
from jaxformer.config import (
    GLU,
    MLP,
    RGLRU,
    Angles,
    Decay,
    DeepNorm,
    Differential,
    ExpertLatent,
    GatedNorm,
    HeadTransform,
    HybridHeads,
    Latent,
    LinearAttention,
    LMHead,
    MoE,
    MultiHead,
    OutputGate,
    QKNorm,
    QueryScaling,
    RMSNorm,
    Rope,
    Router,
    SelectiveScan,
    SharedExpert,
    SharedKV,
    SlopeDecay,
    StepDecay,
    TransformerConfig,
)
from jaxformer.parallel import abstract_parameters

BASE = TransformerConfig(
    vocab_size=31,
    model_dim=14,
    num_layers=3,
    attention=MultiHead(num_heads=4, num_kv_heads=2, head_dim=6, positions=(Rope(),)),
    feed_forward=(GLU(hidden_dim=11),),
)


def random_tree(shapes, size=0.35):
    """Random kernels and tables of this size, norms near 1, biases not 0."""
    rng = np.random.default_rng(0)  # numpy compiles nothing

    def leaf(path, x):
        name = path[-1].key
        noise = rng.normal(size=x.shape)
        if name in ("kernel", "embedding"):
            noise *= size
        else:
            noise = 0.2 * noise + name.endswith(("scale", "scalar"))
        return jax.device_put(noise.astype(x.dtype))  # `jnp.asarray` compiles

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@lru_cache(256)
def _cached_params(config, size):
    return random_tree(abstract_parameters(config, None), size)


def random_params(config, size=None):
    """Random parameters of a model, in which every part matters. The dicts are the caller's own."""
    return jax.tree.map(lambda x: x, _cached_params(config, size or 1.3 * config.model_dim**-0.5))


@lru_cache(256)
def jitted_forward(config, **options):
    """The forward pass, as `run(params, tokens, **given)`; the options are those of Transformer."""
    apply = jax.jit(Transformer(config, **options).apply, static_argnames="deterministic")
    return lambda params, tokens, **given: apply({"params": params}, tokens, **given)


def float64_log_probs(config, params, tokens, width=128):
    """Of every id after each token of a text, from the softmax in float64.

    Padded behind, which a decoder does not see, so that one program serves all texts.
    """
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.float64(jitted_forward(config)(params, padded))[0, : len(tokens)]
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def rounding_error(run, params, tokens, draws=4):
    """How far logits go when every parameter goes half of its last place up or down.

    It is what two orders of the same sums may differ by: from 5e-7 of the largest logit to 2e-5, by
    model, and on which machine which of them is worse is not foreseen.
    """
    logits = np.asarray(run(params, tokens))
    rng, moved = np.random.default_rng(0), []
    for _ in range(draws):
        noise = lambda p: np.float32(np.float64(p) * (1 + rng.choice([-6e-8, 6e-8], p.shape)))  # noqa: E731
        noisy = jax.tree.map(noise, params)
        moved.append(np.abs(np.asarray(run(noisy, tokens)) - logits).max())
    return max(moved)


# A small Llama 2 with other kinds of attention, which no model of the zoo has.
TINY_LLAMA = zoo.get(
    "llama-2-70b"
).tiny()  # 2 layers, width 64, 4 heads of 16, 2 of keys and values
TINY_GEMMA = zoo.get("gemma-4-26b-a4b").tiny()
TINY_EDGE = zoo.get("gemma-4-e4b").tiny()
LLAMA_VARIANTS = {
    "gemma 4": replace(  # one layer of each kind
        TINY_GEMMA, num_layers=2, attention=TINY_GEMMA.attention[-2:]
    ),
    "gemma 4 edge": replace(  # keys of earlier layers, embeddings of layers
        TINY_EDGE,
        num_layers=4,
        attention=TINY_EDGE.attention[4:6] + TINY_EDGE.attention[-2:],
        feed_forward=TINY_EDGE.feed_forward[4:6] + TINY_EDGE.feed_forward[-2:],
    ),
    "norms of heads": replace(
        TINY_LLAMA, attention=replace(TINY_LLAMA.attention, qk_norm=QKNorm())
    ),
    "scaled queries": replace(
        TINY_LLAMA,
        residual_multiplier=0.6,
        attention=replace(
            TINY_LLAMA.attention,
            qk_norm=QKNorm(placement="after_rope"),
            query_scaling=QueryScaling(beta=0.7, original_max_length=5),
        ),
    ),
    "output gates": replace(
        TINY_LLAMA,
        num_layers=3,
        attention=(
            replace(TINY_LLAMA.attention, output_gate=OutputGate()),
            SharedKV(num_heads=4, head_dim=16),
            Latent(
                num_heads=4,
                latent_dim=24,
                nope_dim=8,
                rope_dim=6,
                value_dim=10,
                output_gate=OutputGate(over="head"),
                query_scaling=QueryScaling(beta=0.7, original_max_length=5),
            ),
        ),
    ),
    "differential": replace(
        TINY_LLAMA,
        attention=Differential(
            num_heads=8, num_kv_heads=4, head_dim=8, norm=RMSNorm(), biases=("value",)
        ),
    ),
    "tied": replace(
        TINY_LLAMA, head=LMHead(tied=True, bias=True, transform=HeadTransform(bias=True))
    ),
    "shared expert": replace(
        TINY_LLAMA,
        feed_forward=(
            MoE(
                expert=GLU(hidden_dim=24),
                num_experts=4,
                shared=SharedExpert(expert=GLU(hidden_dim=40, bias=True), gated=True),
            ),
        ),
    ),
    "norms of experts": replace(
        TINY_LLAMA,
        feed_forward=(
            MoE(
                expert=GLU(hidden_dim=24),
                num_experts=4,
                router=Router(norm=RMSNorm(), expert_scale=True),
                shared=SharedExpert(expert=GLU(hidden_dim=40)),
                norm=RMSNorm(),
            ),
        ),
    ),
    "norms before projections": replace(  # of narrower values
        TINY_LLAMA,
        attention=replace(
            TINY_LLAMA.attention, value_dim=10, sinks=True, windows=(5, None), sub_norm=RMSNorm()
        ),
        feed_forward=(GLU(hidden_dim=88, activation="relu_squared", sub_norm=RMSNorm()),),
    ),
    "a norm of the sum": replace(
        TINY_LLAMA,
        feed_forward=(
            MoE(
                expert=GLU(hidden_dim=24),
                num_experts=4,
                router=Router(score="sigmoid", logit_softcap=0.5),
                shared=SharedExpert(expert=GLU(hidden_dim=40)),
                output_norm=RMSNorm(),
            ),
        ),
    ),
    "latent experts": replace(
        TINY_LLAMA,
        feed_forward=(
            MoE(
                expert=MLP(hidden_dim=24),
                num_experts=4,
                shared=SharedExpert(expert=MLP(hidden_dim=40)),
                latent=ExpertLatent(latent_dim=20, bias=True),
            ),
        ),
    ),
    "decay": replace(
        TINY_LLAMA, attention=Decay(num_heads=4, head_dim=16, angles=Angles(learned=True))
    ),
    "hybrid": replace(
        TINY_LLAMA, num_layers=4, attention=(Decay(num_heads=4, head_dim=16), TINY_LLAMA.attention)
    ),
    "gated delta": replace(
        TINY_LLAMA,
        num_layers=4,
        attention=(
            LinearAttention(num_heads=4, num_key_heads=2, key_dim=8, value_dim=16),
            TINY_LLAMA.attention,
        ),
    ),
    "mamba 2": replace(
        TINY_LLAMA,
        attention=LinearAttention(
            num_heads=4,
            num_key_heads=2,
            key_dim=8,
            value_dim=16,
            delta_rule=False,
            beta="step",
            unit_vectors=False,
            skip=True,
            output=GatedNorm(over="group", placement="before_norm"),
            biases=("convolution",),
        ),
    ),
    "mamba": replace(
        TINY_LLAMA,
        num_layers=4,
        attention=(
            SelectiveScan(width=32, step_rank=5, state_dim=8, norm=RMSNorm()),
            TINY_LLAMA.attention,
        ),
    ),
    "griffin": replace(
        TINY_LLAMA, num_layers=4, attention=(RGLRU(num_heads=4, head_dim=8), TINY_LLAMA.attention)
    ),
    "hybrid heads": replace(
        TINY_LLAMA,
        attention=HybridHeads(
            kinds=(
                replace(TINY_LLAMA.attention, windows=(5, None)),
                LinearAttention(
                    num_heads=4,
                    num_key_heads=2,
                    key_dim=8,
                    value_dim=16,
                    delta_rule=False,
                    beta="step",
                    unit_vectors=False,
                    skip=True,
                    output=GatedNorm(norm=None),
                    biases=("convolution", "out"),
                ),
            )
        ),
    ),
    "kimi delta": replace(
        TINY_LLAMA,
        attention=LinearAttention(
            num_heads=4,
            num_key_heads=4,
            key_dim=8,
            value_dim=8,
            decay=StepDecay(over="feature", rank=6),
            output=GatedNorm(activation="sigmoid", rank=6),
        ),
    ),
    "lightning": replace(
        TINY_LLAMA,
        attention=LinearAttention(
            num_heads=4,
            num_key_heads=4,
            key_dim=8,
            value_dim=8,
            decay=SlopeDecay(),
            delta_rule=False,
            beta="one",
            unit_vectors=False,
            scale=1.0,
            convolution_width=None,
            output=GatedNorm(over="all", activation="sigmoid"),
        ),
        norm_placement="post",
        residual=DeepNorm(alpha=1.6),
    ),
    "shared": replace(
        TINY_LLAMA,
        num_layers=4,
        attention=SharedKV(
            num_heads=4,
            head_dim=16,
            positions=(Rope(targets=("q", "k", "v", "o")), Rope()),
            qk_norm=QKNorm(),
            biases=("key_value",),
        ),
    ),
    "latent": replace(
        TINY_LLAMA,
        attention=Latent(
            num_heads=4,
            latent_dim=24,
            query_latent_dim=20,
            nope_dim=8,
            rope_dim=6,
            value_dim=10,
            biases=("query_latent", "latent", "out"),
        ),
    ),
}


def model(name):
    """One of these, or of the zoo, made tiny."""
    return LLAMA_VARIANTS.get(name) or zoo.get(name).tiny()
