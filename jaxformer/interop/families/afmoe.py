"""AFMoE (Trinity): gated heads, sandwich norms, RoPE in the layers with a window, experts."""

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import DeepSeekMoE
from jaxformer.interop.families.llama_like_family import BiasField, LlamaLike
from jaxformer.interop.families.llama_like_options import OneRope
from jaxformer.interop.param_mapping import norm_rules

NORMS = (
    *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_attention_norm"),
    *norm_rules(f"{p.LAYER_PREFIX}.post_attention_layernorm", "post_attention_norm"),
    *norm_rules(f"{p.LAYER_PREFIX}.pre_mlp_layernorm", "pre_feed_forward_norm"),
    *norm_rules(f"{p.LAYER_PREFIX}.post_mlp_layernorm", "post_feed_forward_norm"),
)


@dataclass(frozen=True)
class WindowsByInterval:
    """A window for the layers that ``layer_types`` names; without it, all but every n-th.

    n is ``global_attn_every_n_layers``.
    """

    def read(self, reader: ConfigReader) -> tuple[Any, ...]:
        """The windows."""
        interval = max(1, reader.integer("global_attn_every_n_layers", 4))
        count = reader.integer("num_hidden_layers")
        sliding = p.read_layer_types(reader, count, lambda i: (i + 1) % interval > 0)
        return p.window_cycle(reader, sliding, reader.optional_integer("sliding_window", 1024))

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """The window and the types."""
        return p.write_layer_types(config)


@dataclass(frozen=True, kw_only=True)
class RopeWithWindow(OneRope):
    """RoPE in the layers that have a window; no positions in the others."""

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """RoPE or nothing, as the windows."""
        rope = self._read_rope(reader)
        return tuple(None if window is None else rope for window in windows)


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
        for name in (self.experts_name, self.shared_name, self.scale_name):
            reader.get(name)  # without effect if all layers are dense
        return super().read(reader, bias=bias)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Without the fields of DeepSeek that this family does not have."""
        fields = super().write(config)
        unknown = "n_group", "topk_group", "norm_topk_prob"
        return fields and {name: value for name, value in fields.items() if name not in unknown}


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
        eps=1e-5,
        positions=RopeWithWindow(max_length=16_384),
        windows=WindowsByInterval(),
        biases=(BiasField("attention_bias", p.ALL_BIASES),),
        qk_norm="head",
        norm_placement="sandwich",
        norm_rules=NORMS,
        output_gate=c.OutputGate(),
        branch=AfmoeMoE(
            first_dense=1,
            first_dense_name="num_dense_layers",
            num_experts=64,
            top_k=6,
            num_shared=2,
            width=1408,
            experts_name="num_experts",
            shared_name="num_shared_experts",
            scale_name="route_scale",
            router_tensor="router.gate",
            bias_tensor="expert_bias",
        ),
    ).family(),
)
