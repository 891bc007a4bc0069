"""AFMoE (Trinity): gated heads, sandwich norms, RoPE in the layers with a window, experts."""

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import (
    DeepSeekMoE,
    deepseek_experts,
    deepseek_rules,
)
from jaxformer.interop.families.llama_like_family import BiasField, LlamaLike
from jaxformer.interop.families.llama_like_options import RopeOfWindows, WindowsByInterval
from jaxformer.interop.param_mapping import layer_norm_rules

NAMES = {  # of DeepSeek's fields in this family
    "first_k_dense_replace": "num_dense_layers",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "route_scale",
}
NORMS = layer_norm_rules(
    p.LAYER_PREFIX,
    pre_attention_norm="input_layernorm",
    post_attention_norm="post_attention_layernorm",
    pre_feed_forward_norm="pre_mlp_layernorm",
    post_feed_forward_norm="post_mlp_layernorm",
)


@dataclass(frozen=True, kw_only=True)
class AfmoeMoE(DeepSeekMoE):
    """Dense layers first, then experts chosen by sigmoid and a bias, always renormalised."""

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The network of each layer; a file of the released code says more than transformers'."""
        reader.require_value("score_func", "sigmoid")
        for name in ("route_norm", "norm_topk_prob"):
            reader.require_value(name, True)
        for name in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
            reader.require_value(name, 1)
        for name in ("load_balance_coeff", "use_grouped_mm"):  # of training, and of speed
            reader.get(name)
        for name in NAMES.values():
            reader.get(name)  # without effect if all layers are dense
        return super().read(reader, bias=bias)


@dataclass(frozen=True)
class Afmoe(LlamaLike):
    """Embeddings are multiplied by the root of their width if ``mup_enabled``."""

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        config = super().read(reader)
        scale = math.sqrt(config.model_dim) if reader.boolean("mup_enabled", False) else 1.0
        return replace(config, embedding=c.Embedding(scale=scale))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        fields = super().write(config)
        return fields and {**fields, "mup_enabled": config.embedding.scale != 1}


FAMILIES = (
    Afmoe(
        "afmoe",
        "AfmoeForCausalLM",
        head_dim=128,
        norm=c.RMSNorm(eps=1e-5),
        positions=RopeOfWindows(max_length=16_384, without_windows=False),
        windows=WindowsByInterval(1024, fields=("global_attn_every_n_layers",)),
        biases=(BiasField("attention_bias", p.ALL_BIASES),),
        qk_norm=c.QKNorm(),
        norm_placement="sandwich",
        norm_rules=NORMS,
        output_gate=c.OutputGate(),
        not_written=("n_group", "topk_group", "norm_topk_prob"),
        branch=AfmoeMoE(
            first_dense=1,
            num_shared=2,
            rules=deepseek_rules("router.gate", "expert_bias"),
            **deepseek_experts(64, 6, width=1408, names=NAMES),
        ),
    ).family(),
)
