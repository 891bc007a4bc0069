"""One change for each configuration axis, with a reference whose logits must change."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from jaxformer import config as c


class Mutation(NamedTuple):
    """`change` gives the other configuration; norms may be read under `renamed` names then."""

    reference: str
    change: Callable[[c.TransformerConfig], c.TransformerConfig]
    renamed: tuple[tuple[str, str], ...] = ()


def attention(**fields):
    return lambda config: replace(config, attention=replace(config.attention, **fields))


def qk_norm(**fields):
    return lambda config: attention(qk_norm=replace(config.attention.qk_norm, **fields))(config)


def embedding(**fields):
    return lambda config: replace(config, embedding=replace(config.embedding, **fields))


def head(**fields):
    return lambda config: replace(config, head=replace(config.head, **fields))


def model(**fields):
    return lambda config: replace(config, **fields)


def norm(**fields):
    return lambda config: replace(config, norm=replace(config.norm, **fields))


def feed_forward(**fields):
    return lambda config: replace(
        config, feed_forward=tuple(replace(layer, **fields) for layer in config.feed_forward)
    )


def moe_somewhere(**fields):
    """Change the layers that have experts."""
    return lambda config: replace(
        config,
        feed_forward=tuple(
            replace(layer, **fields) if layer.is_moe else layer for layer in config.feed_forward
        ),
    )


def router(**fields):
    """Change the router of the layers that have one."""
    return lambda config: replace(
        config,
        feed_forward=tuple(
            replace(x, router=replace(x.router, **fields)) if x.is_moe else x
            for x in config.feed_forward
        ),
    )


def rope(**fields):
    """Change every layer's rotary positions, or replace them where `positions` is given."""
    return lambda config: replace(
        config,
        attention=replace(
            config.attention,
            positions=tuple(
                None if position is None else replace(position, **fields)
                for position in config.attention.positions
            ),
        ),
    )


def scaling(**fields):
    return lambda config: rope(scaling=replace(config.attention.positions[0].scaling, **fields))(
        config
    )


def everywhere(config):
    """Rotate in the layers that have no positions too."""
    first = config.attention.positions[0]
    return attention(positions=(first,) * len(config.attention.positions))(config)


def shorter_table(config):
    """A learned table whose first position stands one row earlier."""
    positions = config.embedding.positions
    other = replace(positions, offset=positions.offset - 1, max_length=positions.max_length + 1)
    return embedding(positions=other)(config)


def mixer(kind_of_mixer, **fields):
    """Change the layers of this attention kind."""

    def changed(kind):
        if isinstance(kind, c.HybridHeads):
            return replace(kind, kinds=tuple(map(changed, kind.kinds)))
        return replace(kind, **fields) if isinstance(kind, kind_of_mixer) else kind

    def change(config):
        return replace(config, attention=tuple(changed(x.attention) for x in config.layers))

    return change


def halved_slopes(config):
    """Slopes of lightning attention, which differ from layer to layer."""
    kinds = (layer.attention for layer in config.layers)
    changed = (
        replace(kind, decay=replace(kind.decay, scale=kind.decay.scale / 2))
        if isinstance(kind, c.LinearAttention)
        else kind
        for kind in kinds
    )
    return replace(config, attention=tuple(changed))


def windows_of(window):
    """Another window in the layers that have one."""

    def changed(kind):
        return kind if kind.windows == (None,) else replace(kind, windows=(window,))

    return lambda config: replace(
        config, attention=tuple(changed(layer.attention) for layer in config.layers)
    )


def scaled_queries(**fields):
    """Change the scaling of the layers that have it."""

    def changed(kind):
        scaling = kind.query_scaling
        return kind if scaling is None else replace(kind, query_scaling=replace(scaling, **fields))

    return lambda config: replace(
        config, attention=tuple(changed(layer.attention) for layer in config.layers)
    )


def altup(**fields):
    return lambda config: replace(config, residual=replace(config.residual, **fields))


convolution = partial(mixer, c.ShortConvolution)
linear = partial(mixer, c.LinearAttention)


def sparse(**fields):
    pattern = {"block_size": 3, "local_blocks": 2, "stride": 3} | fields
    return attention(windows=(c.BlockSparse(**pattern), None))


TO_PRE = (("post_", "pre_"),)
TO_POST = (("pre_", "post_"),)
TO_THREE = (("pre_", "post_"), ("feed_forward_norm", "attention_norm"))
TO_TWO = (("pre_norm", "pre_attention_norm"), ("pre_norm", "pre_feed_forward_norm"))
BIASES = ("query", "key", "value")
MUTATIONS = {
    "window one longer": Mutation("mistral", attention(windows=(6,))),
    "windows the other way round": Mutation("gemma2", attention(windows=(None, 5))),
    "sparse blocks": Mutation("ref_phi3_small", sparse(block_size=4)),
    "sparse stride": Mutation("ref_phi3_small", sparse(stride=4)),
    "no positions in full layers": Mutation("cohere2", everywhere),
    "rope base by layer": Mutation("gemma3", everywhere),
    "rope base": Mutation("llama3", rope(base=1e6)),
    "rope halves": Mutation("llama", rope(pairing="neighbours")),
    "rope neighbours": Mutation("gptj", rope(pairing="halves")),
    "rope of queries alone": Mutation("llama", rope(targets=("q",))),
    "rope of values and outputs too": Mutation("llama", rope(targets=("q", "k", "v", "o"))),
    "rope fraction": Mutation("nemotron", rope(fraction=1.0)),
    "rope scaling linear": Mutation("llama_linear", rope(scaling=None)),
    "rope scaling ntk": Mutation("llama_linear", rope(scaling=c.NTKScaling(factor=4.0))),
    "rope scaling dynamic": Mutation("llama_dynamic", rope(scaling=None)),
    "rope scaling of llama 3": Mutation("llama31", rope(scaling=None)),
    "rope scaling yarn": Mutation("llama_yarn", rope(scaling=None)),
    "p-rope": Mutation("gemma4", mixer(c.SharedKV, positions=(c.Rope(base=1e6),))),
    "norm of values": Mutation("gemma4", mixer(c.MultiHead, value_norm=None)),
    "norm of values that are keys": Mutation("gemma4", mixer(c.SharedKV, value_norm=None)),
    "activation of a layer's embedding": Mutation(
        "gemma4_edge", model(layer_embedding=c.LayerEmbedding(dim=7, activation="silu"))
    ),
    "embeddings of a layer in its own stream": Mutation("gemma3n", altup(layer_embedding=None)),
    "map of low rank": Mutation("gemma3n", altup(branches=c.Laurel(rank=5, norm_eps=0.5))),
    "sparse gates": Mutation("gemma3n", feed_forward(sparsity=None)),
    "scalar of a layer": Mutation("gemma4", model(layer_scalar=False)),
    "rope yarn's factor of attention": Mutation("llama_yarn", scaling(attention_factor=1.0)),
    "rope scaling longrope": Mutation("phi3_longrope", scaling(long_factors=(1.0, 1.2, 1.5))),
    "rope longrope's factor of attention": Mutation("phi3_longrope", scaling(attention_factor=1.0)),
    "alibi": Mutation("bloom", attention(positions=(None,))),
    "alibi scale": Mutation("falcon_rw", attention(positions=(c.Alibi(),))),
    "t5 buckets": Mutation("t5", attention(positions=(c.T5Bias(num_buckets=8, max_distance=20),))),
    "transformer-xl, no positions": Mutation("xlnet_uni", attention(positions=(None,))),
    "learned positions": Mutation("gpt2", embedding(positions=None)),
    "a scale for each layer": Mutation(
        "gpt2_scales", lambda config: replace(config, attention=config.attention[::-1])
    ),
    "learned offset": Mutation("opt", shorter_table),
    "sinusoids in turn": Mutation(
        "ref_transformer2017", embedding(positions=c.Sinusoid(layout="halves"))
    ),
    "sinusoids in halves": Mutation("marian", embedding(positions=c.Sinusoid())),
    "sinusoids of tensor2tensor": Mutation(
        "fsmt", embedding(positions=c.Sinusoid(layout="halves", offset=2))
    ),
    "sinusoid offset": Mutation(
        "fsmt", embedding(positions=c.Sinusoid(layout="tensor2tensor", offset=0))
    ),
    "placement post": Mutation("opt_350m", model(norm_placement="pre"), TO_PRE),
    "placement pre": Mutation("gpt_neox_serial", model(norm_placement="post"), TO_POST),
    "placement sandwich": Mutation("gemma2", model(norm_placement="pre")),
    "placement by layer": Mutation("olmo_hybrid", model(norm_placement="pre"), TO_PRE),
    "weights above 1 of the delta rule": Mutation("olmo_hybrid", linear(max_beta=1.0)),
    "no norm before the first attention": Mutation(
        "modernbert_decoder", model(norm_placement=("sandwich", *["pre"] * 3)), TO_THREE
    ),
    "placement res_post": Mutation("olmo2", model(norm_placement="pre"), TO_PRE),
    "block serial": Mutation("bloom", model(block="parallel")),
    "block parallel": Mutation("gpt_neox", model(block="serial")),
    "one norm for both branches": Mutation("falcon_7b", model(block="serial"), TO_TWO),
    "norm after a branch": Mutation("muse_glimmer_text", model(post_norm=None)),
    "kind of the last norm": Mutation("muse_glimmer_text", model(last_norm=None)),
    "final norm": Mutation("llama_biased", model(final_norm=False)),
    "rms norm": Mutation("smollm2", model(norm=c.LayerNorm(parameters="scale"))),
    "layer norm": Mutation("palm_like", model(norm=c.RMSNorm(eps=1e-5))),
    "epsilon outside the root": Mutation("yi_34b", norm(eps=1e-2, eps_position="outside")),
    "epsilon": Mutation("yi_34b", norm(eps=1e-4)),
    "scale of one more": Mutation("nemotron", norm(scale_offset=0.0)),
    "qk norm of heads": Mutation("gemma3", attention(qk_norm=None)),
    "qk norm of each head": Mutation("cohere", attention(qk_norm=None)),
    "qk norm of the width": Mutation("olmo2", attention(qk_norm=None)),
    "qk norm under narrow heads": Mutation("qwen3", attention(qk_norm=None)),
    "qk norm after rope": Mutation("hunyuan_v1_dense", qk_norm(placement="before_rope")),
    "rope scaling with alpha": Mutation("hunyuan_v1_moe", rope(scaling=None)),
    "query scaling": Mutation("ministral3", attention(query_scaling=None)),
    "scaling of a latent's queries": Mutation("mistral4", attention(query_scaling=None)),
    "relu for softmax": Mutation("llama", attention(normalizer="relu")),
    "sinks": Mutation("gpt_oss", attention(sinks=False)),
    "output gate": Mutation("afmoe", attention(output_gate=None)),
    "sinks of layers with a window": Mutation("mimo_v2_flash", mixer(c.MultiHead, sinks=False)),
    "softplus of an output gate": Mutation(
        "laguna", mixer(c.MultiHead, output_gate=c.OutputGate(over="head"))
    ),
    "biases of an output gate": Mutation("beam", mixer(c.MultiHead, output_gate=c.OutputGate())),
    "power of queries": Mutation("beam", scaled_queries(exponent=0.9)),
    "sum scaled by depth": Mutation("beam", model(residual=None)),
    "rope yarn's whole bounds": Mutation("gpt_oss", scaling(truncate=True)),
    "limit of clamped experts": Mutation(
        "gpt_oss", feed_forward(expert=c.ClampedGEGLU(hidden_dim=8, limit=7.0))
    ),
    "slope of clamped experts": Mutation(
        "gpt_oss", feed_forward(expert=c.ClampedGEGLU(hidden_dim=8, limit=0.5, alpha=1.0))
    ),
    "rows of a head": Mutation(
        "ref_baichuan2_7b",
        lambda config: replace(config, head=replace(config.head, unit_rows=False)),
    ),
    "biases of experts": Mutation(
        "gpt_oss", feed_forward(expert=c.ClampedGEGLU(hidden_dim=8, limit=0.5, bias=False))
    ),
    "length of delta's queries": Mutation("qwen3_next", linear(unit_vectors=False)),
    "delta rule": Mutation("qwen3_5", linear(delta_rule=False)),
    "gated norm": Mutation("qwen3_5", linear(output=c.GatedNorm(placement="before_norm"))),
    "biases of a short convolution": Mutation("lfm2", convolution(biases=("in", "out"))),
    "smallest step of a decay": Mutation("bamba", linear(decay=c.StepDecay(max_step=1.1))),
    "skipped values": Mutation("bamba", linear(skip=False)),
    "positions of heads beside a state": Mutation(
        "falcon_h1", mixer(c.MultiHead, positions=(None,))
    ),
    "state beside heads": Mutation("falcon_h1", linear(skip=False)),
    "gate before the norm": Mutation("mamba2", attention(output=c.GatedNorm(over="group"))),
    "norms of a selection": Mutation("falcon_mamba", attention(norm=None)),
    "scaled norms of a selection": Mutation(
        "jamba", mixer(c.SelectiveScan, norm=c.RMSNorm(eps=0.5))
    ),
    "bias of a scan's convolution": Mutation("mamba", attention(biases=("in", "out"))),
    "activation of a recurrence's gate": Mutation(
        "recurrent_gemma", mixer(c.RGLRU, activation="silu")
    ),
    "eps of the last norm": Mutation("rwkv", model(last_norm=None)),
    "decay of a state": Mutation("mamba2", attention(decay=None, beta="one")),
    "decay of each feature": Mutation(
        "kimi_linear", linear(decay=c.StepDecay(over="feature", rank=8, max_step=0.5))
    ),
    "gate of kimi's reads": Mutation(
        "kimi_linear", linear(output=c.GatedNorm(norm=c.RMSNorm(eps=1e-2), rank=8))
    ),
    "slopes of decays": Mutation("minimax", halved_slopes),
    "norm of all heads' reads": Mutation(
        "minimax", linear(output=c.GatedNorm(norm=None, activation="sigmoid"))
    ),
    "multiplier of the stream": Mutation("minimax", model(residual=None)),
    "latent without positions": Mutation("kimi_linear", mixer(c.Latent, positions=(c.Rope(),))),
    "length of a chunk": Mutation("llama4_text", windows_of(c.Chunks(size=6))),
    "chunks that slide": Mutation("llama4_text", windows_of(5)),
    "number of the first query": Mutation("llama4_text", scaled_queries(offset=0)),
    "weights of what experts read": Mutation(
        "llama4_text", moe_somewhere(router=c.Router(score="sigmoid", renormalise=False))
    ),
    "difference of two softmaxes": Mutation(
        "diffllama", model(attention=c.MultiHead(num_heads=8, num_kv_heads=4, head_dim=6))
    ),
    "norm of the difference": Mutation("diffllama", attention(norm=c.RMSNorm(parameters="none"))),
    "softcap of scores": Mutation("gemma2", attention(logit_softcap=None)),
    "multiplier of branches": Mutation("granite", model(residual_multiplier=1.0)),
    "multiplier of recurrent branches": Mutation(
        "granitemoehybrid", model(residual_multiplier=1.0)
    ),
    "softcap of logits": Mutation("gemma2", head(softcap=None)),
    "clip": Mutation("olmo_clip", attention(clip_qkv=None)),
    "scale of scores": Mutation("gpt_neo", attention(scale=None)),
    "scale of latent scores": Mutation("deepseek_v3", attention(scale=None)),
    "rope of a latent's neighbours": Mutation("deepseek_v2", rope(pairing="halves")),
    "rope of a latent's halves": Mutation("deepseek_v3_halves", rope(pairing="neighbours")),
    "rope of a latent's queries alone": Mutation("deepseek_v2_lite", rope(targets=("q",))),
    "norm of latents": Mutation("deepseek_v3", attention(norm=c.RMSNorm(eps=1e-2))),
    "biases of latents": Mutation("deepseek_v2", attention(biases=("out",))),
    "embedding scale": Mutation("ref_phi3_small", embedding(scale=1.0)),
    "embedding norm": Mutation("bloom", embedding(norm=None)),
    "head multiplier": Mutation("command_r", head(multiplier=1.0)),
    "hidden layer of the head": Mutation("modernbert_decoder", head(transform=None)),
    "activation of the head": Mutation(
        "modernbert_decoder",
        head(transform=c.HeadTransform(activation="relu", norm=c.LayerNorm(parameters="scale"))),
    ),
    "head bias": Mutation("gptj", head(bias=False)),
    "head tied": Mutation("t5_v1_1", head(tied=True)),
    "biases of queries, keys, values": Mutation("qwen2", attention(biases=())),
    "bias of the output": Mutation("llama_biased", attention(biases=BIASES)),
    "biases of the feed-forward": Mutation("gptj", feed_forward(bias=False)),
    "gelu": Mutation("falcon", feed_forward(activation="gelu_tanh")),
    "relu": Mutation("opt", feed_forward(activation="relu_squared")),
    "relu_squared": Mutation("nemotron", feed_forward(activation="relu")),
    "gate of t5": Mutation("mt5", feed_forward(activation="gelu")),
    "clamped": Mutation("ref_phi3_small", feed_forward(limit=20.0)),
    "top k": Mutation("mixtral", feed_forward(top_k=3)),
    "router's score": Mutation("minimax_m2", router(score="softmax")),
    "selection bias": Mutation("minimax_m2", router(selection_bias=False)),
    "selection by logits": Mutation("kolibri1", router(selection="scores")),
    "scale of a router": Mutation("deepseek_v2_moe", router(scale=1.0)),
    "groups of experts": Mutation("deepseek_v2_moe", router(groups=None)),
    "score of a group": Mutation(
        "deepseek_v3_moe", router(groups=c.ExpertGroups(num_groups=3, top_k=2, score="max"))
    ),
    "biases of a shared expert": Mutation(
        "ernie4_5_moe", moe_somewhere(shared=c.SharedExpert(expert=c.GLU(hidden_dim=16)))
    ),
    "cap of a router's logits": Mutation("laguna", router(logit_softcap=None)),
    "capacity of experts": Mutation("switch_transformers", router(capacity=9)),
    "sparse mixer": Mutation("phimoe", feed_forward(router=c.Router(renormalise=False))),
    "jitter of a sparse mixer": Mutation("phimoe", router(jitter=0.01)),
    "average with a shared expert": Mutation(
        "cohere2_moe", moe_somewhere(shared=c.SharedExpert(expert=c.GLU(hidden_dim=16)))
    ),
    "norm of a router": Mutation("gemma4_moe", router(norm=None)),
    "scales of experts": Mutation("gemma4_moe", router(expert_scale=False)),
    "norms of experts": Mutation("gemma4_moe", feed_forward(norm=c.RMSNorm(eps=0.5))),
    "norm before the output": Mutation("bitnet", attention(sub_norm=c.RMSNorm())),
    "norm before the last projection": Mutation("bitnet", feed_forward(sub_norm=c.RMSNorm())),
    "norm of the sum of experts": Mutation("axk1", moe_somewhere(output_norm=c.RMSNorm(eps=0.5))),
    "shared expert": Mutation("qwen2_moe", feed_forward(shared=None)),
    "biases of the latent of experts": Mutation(
        "nemotron_h_latent", moe_somewhere(latent=c.ExpertLatent(latent_dim=9))
    ),
    "bias of the choice in layers of experts": Mutation("nemotron_h", router(selection_bias=False)),
    "renormalised": Mutation("mixtral", feed_forward(router=c.Router(renormalise=False))),
}
