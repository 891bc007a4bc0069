"""Llama, and what differs from it in a window, in biases or in its feed-forward.

Pre-norm decoders with RMSNorm, SwiGLU, rotary positions and grouped queries: llama, mistral, qwen2,
mixtral.
"""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families import pieces as p
from jaxformer.interop.families.activations import ACTIVATIONS
from jaxformer.interop.family import Family
from jaxformer.interop.rope import read_rope, write_rope
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, Table
from jaxformer.interop.transforms import Kernel

TABLE = Table(whole=p.WHOLE, stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *p.FEED_FORWARD)})
MOE = f"{p.LAYER}.block_sparse_moe"
EXPERTS = (
    Row(f"{MOE}.gate.weight", "feed_forward/router/kernel", Kernel()),
    Row(f"{MOE}.experts.{{expert}}.w1.weight", "feed_forward/experts/gate/kernel", Kernel()),
    Row(f"{MOE}.experts.{{expert}}.w3.weight", "feed_forward/experts/up/kernel", Kernel()),
    Row(f"{MOE}.experts.{{expert}}.w2.weight", "feed_forward/experts/down/kernel", Kernel()),
)
MIXTRAL = Table(whole=p.WHOLE, stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *EXPERTS)})


def read_llama(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a llama's."""
    return c.TransformerConfig(
        **p.read_sizes(settings),
        attention=c.MultiHead(
            **p.read_heads(settings),
            positions=(read_rope(settings),),
            biases=p.read_biases(settings),
        ),
        feed_forward=(p.read_glu(settings, bias=settings.flag("mlp_bias", False)),),
        norm=c.RMSNorm(eps=settings.number("rms_norm_eps", 1e-6)),
        head=c.Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def write_llama(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A llama's configuration from ours; transformers wants a width that its heads divide."""
    branch = config.feed_forward[0]
    divides = config.model_dim % config.multi_head.num_heads == 0
    if not (p.plain_decoder(config) and isinstance(branch, c.GLU) and divides):
        return None
    return {
        **p.write_sizes(config),
        "attention_bias": "out" in config.multi_head.biases,
        "mlp_bias": branch.bias,
        "rms_norm_eps": config.norm.eps,
        **write_rope(p.rope_of(config)),
    }


def read_mistral(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a mistral's."""
    return c.TransformerConfig(
        **p.read_sizes(settings),
        attention=c.MultiHead(
            **p.read_heads(settings, kv_heads=8),
            positions=(read_rope(settings, max_length=131072),),
            windows=(settings.optional_integer("sliding_window", 4096),),
        ),
        feed_forward=(p.read_glu(settings),),
        norm=c.RMSNorm(eps=settings.number("rms_norm_eps", 1e-6)),
        head=c.Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def write_mistral(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A mistral's configuration from ours."""
    if not (p.plain_decoder(config) and isinstance(config.feed_forward[0], c.GLU)):
        return None
    return {
        **p.write_sizes(config),
        "sliding_window": p.window_of(config),
        "rms_norm_eps": config.norm.eps,
        **write_rope(p.rope_of(config)),
    }


def read_qwen2(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a qwen2's."""
    sizes = p.read_sizes(settings)
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            **p.read_heads(settings, kv_heads=32),
            positions=(read_rope(settings, max_length=32768),),
            windows=p.read_late_windows(settings, sizes["num_layers"]),
            biases=("query", "key", "value"),
        ),
        feed_forward=(p.read_glu(settings),),
        norm=c.RMSNorm(eps=settings.number("rms_norm_eps", 1e-6)),
        head=c.Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def write_qwen2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A qwen2's configuration from ours."""
    if not (p.plain_decoder(config) and isinstance(config.feed_forward[0], c.GLU)):
        return None
    return {
        **p.write_sizes(config),
        **p.write_late_windows(config),
        "rms_norm_eps": config.norm.eps,
        **write_rope(p.rope_of(config)),
    }


def read_mixtral(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a mixtral's."""
    expert = c.GLU(
        hidden_dim=settings.integer("intermediate_size"),
        activation=settings.choice("hidden_act", "silu", ACTIVATIONS),
    )
    count = settings.integer("num_local_experts", settings.integer("num_experts", 8))
    return c.TransformerConfig(
        **p.read_sizes(settings),
        attention=c.MultiHead(
            **p.read_heads(settings, kv_heads=8),
            positions=(read_rope(settings, base=1e6, max_length=131072),),
            windows=(settings.optional_integer("sliding_window"),),
        ),
        feed_forward=(
            c.Experts(
                expert=expert,
                num_experts=count,
                top_k=settings.integer("num_experts_per_tok", 2),
            ),
        ),
        norm=c.RMSNorm(eps=settings.number("rms_norm_eps", 1e-5)),
        head=c.Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def write_mixtral(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A mixtral's configuration from ours."""
    branch = config.feed_forward[0]
    if not (p.plain_decoder(config) and isinstance(branch, c.Experts)):
        return None
    return {
        **p.write_sizes(config),
        "num_local_experts": branch.num_experts,
        "num_experts_per_tok": branch.top_k,
        "sliding_window": p.window_of(config),
        "rms_norm_eps": config.norm.eps,
        **write_rope(p.rope_of(config)),
    }


FAMILIES = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        read=read_llama,
        write=write_llama,
        table=TABLE,
        ignored=p.IGNORED,
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        read=read_mistral,
        write=write_mistral,
        table=TABLE,
        ignored=p.IGNORED,
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        read=read_qwen2,
        write=write_qwen2,
        table=TABLE,
        ignored=p.IGNORED,
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        read=read_mixtral,
        write=write_mixtral,
        table=MIXTRAL,
        ignored=p.IGNORED,
    ),
)
