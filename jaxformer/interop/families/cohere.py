"""Command R, Command A and Command A+: parallel blocks with one shared norm, scaled logits.

Command A (cohere2) rotates only in its layers with a window; the others see everything and no
positions. Command A+ (cohere2_moe) has experts after some dense layers, which may rotate without a
window.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import (
    EXPERT_RULES,
    PREFIX,
    SHARED,
    count_dense_layers,
    layer_branches,
)
from jaxformer.interop.families.llama_like_family import BiasField, LlamaLike
from jaxformer.interop.families.llama_like_options import OneRope, RopeOfWindows, WindowsByInterval
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.param_mapping import glu_rules, norm_rules

SCORES: Mapping[str, Any] = {"softmax": "softmax", "sigmoid": "sigmoid"}
COMBINATIONS: Mapping[str, Any] = {"average": "average", "sum": "sum"}


@dataclass(frozen=True)
class Cohere2(LlamaLike):
    """Command A; its first files say once more whether the head is tied."""

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        tied = reader.boolean("tie_word_embeddings", True)
        reader.require_value("use_embedding_sharing", tied)
        return super().read(reader)


@dataclass(frozen=True)
class PrefixWindows(WindowsByInterval):
    """Windows that the first layers have by another interval."""

    def read(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        """The windows."""
        first = reader.integer("first_k_dense_replace", 0)  # whatever mlp_layer_types says
        dense_every = reader.positive_integer("prefix_dense_sliding_window_pattern", 1)
        every = reader.positive_integer("sliding_window_pattern", self.period)

        def slides(layer: int) -> bool:
            if layer < first:
                return (layer + 1) % dense_every != 0
            return (layer - first + 1) % every != 0

        sliding = p.read_layer_types(reader, num_layers, slides)
        return p.window_cycle(reader, sliding, self._read_window(reader))


@dataclass(frozen=True, kw_only=True)
class PrefixRope(RopeOfWindows):
    """RoPE in the layers with a window, and in the dense ones where none of these has one."""

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """RoPE or nothing."""
        rope = self.read_rope(reader)
        other_fields = {name: x for name, x in reader.values.items() if name != "rope_scaling"}
        if rope != self.read_rope(ConfigReader(other_fields)):
            reason = "transformers ignores it in this family, and the other fields say otherwise."
            reader.add_problem("rope_scaling", reason)
        all_rotate = reader.positive_integer("prefix_dense_sliding_window_pattern", 1) == 1
        dense = count_dense_layers(reader, 0) if all_rotate else 0
        layers = range(reader.integer("num_hidden_layers"))
        return tuple(
            rope if windows[i % len(windows)] is not None or i < dense else None for i in layers
        )


@dataclass(frozen=True)
class CohereMoE:
    """Dense layers first, then experts and shared ones."""

    rules = (*p.FEED_FORWARD, *EXPERT_RULES, *glu_rules(f"{PREFIX}.shared_experts", SHARED))

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The network of each layer."""
        dense, count = count_dense_layers(reader, 0), reader.integer("num_hidden_layers")
        prefix = "prefix_dense_intermediate_size"
        width = "intermediate_size" if reader.get(prefix) is None else prefix
        experts = (self._read_moe(reader),) * (count - dense)
        return (*(p.read_glu(reader, width_name=width),) * dense, *experts)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Which layers have experts, and the experts."""
        branches = layer_branches(config)
        if branches is None:
            return None
        moe, dense_layers = branches
        width = moe.expert.hidden_dim
        dense: Any = config.layers[dense_layers[0]].feed_forward if dense_layers else moe.expert
        shared = moe.shared or c.SharedExpert(expert=moe.expert, combination="average")
        kinds = ["dense" if i in dense_layers else "sparse" for i in range(config.num_layers)]
        return {
            "intermediate_size": width,
            "prefix_dense_intermediate_size": dense.hidden_dim,
            "mlp_layer_types": kinds,
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "num_shared_experts": 0 if moe.shared is None else shared.expert.hidden_dim // width,
            "shared_expert_combination_strategy": shared.combination,
            "expert_selection_fn": moe.router.score,
            "norm_topk_prob": moe.router.renormalise,
        }

    @staticmethod
    def _read_moe(reader: ConfigReader) -> c.MoE:
        expert = p.read_glu(reader)
        score = reader.choice("expert_selection_fn", "softmax", SCORES)
        combination = reader.choice("shared_expert_combination_strategy", "average", COMBINATIONS)
        renormalise = reader.boolean("norm_topk_prob", True)  # of sigmoids alone
        shared, num_shared = None, reader.integer("num_shared_experts", 0)
        if num_shared:
            wide = replace(expert, hidden_dim=num_shared * expert.hidden_dim)
            shared = c.SharedExpert(expert=wide, combination=combination)
        return c.MoE(
            expert=expert,
            num_experts=reader.integer("num_experts", 8),
            top_k=reader.integer("num_experts_per_tok", 2),
            router=c.Router(score=score, renormalise=renormalise or score == "softmax"),
            shared=shared,
        )


@dataclass(frozen=True)
class Cohere2MoE(Cohere2):
    """Command A+; its norm is an RMSNorm where the file has an eps of one."""

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        config, eps = super().read(reader), reader.optional_number("rms_norm_eps")
        return config if eps is None else replace(config, norm=c.RMSNorm(eps=eps))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        fields, branches = super().write(config), layer_branches(config)
        if fields is None or branches is None:
            return None
        dense = (config.layers[i] for i in branches[1])
        rotated = any(layer.rope is not None and layer.window is None for layer in dense)
        return fields | {
            "rms_norm_eps": config.norm.eps if isinstance(config.norm, c.RMSNorm) else None,
            "prefix_dense_sliding_window_pattern": 1 if rotated else 2,
        }


COHERE: dict[str, Any] = dict(
    norm=c.LayerNorm(parameters="scale"),
    norm_field="layer_norm_eps",
    norm_rules=norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_norm"),
    tied=True,
    block="parallel_shared_norm",
    biases=(BiasField("attention_bias", p.ALL_BIASES),),
    fields=(Field("logit_scale", "head.multiplier", 0.0625),),
)
CONSTANTS = {  # what the first files say of themselves, and what no file says otherwise
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
FAMILIES = (
    LlamaLike(
        "cohere",
        "CohereForCausalLM",
        positions=OneRope(base=5e5, max_length=8192, pairing="neighbours"),
        qk_norm=c.QKNorm(norm=c.LayerNorm(parameters="scale"), over="each_head"),
        qk_norm_field="use_qk_norm",
        **COHERE,
    ).family(),
    Cohere2(
        "cohere2",
        "Cohere2ForCausalLM",
        windows=WindowsByInterval(4096, fields=("layer_switch", "sliding_window_pattern")),
        positions=RopeOfWindows(max_length=8192, pairing="neighbours", without_windows=False),
        constants=CONSTANTS,
        **COHERE,
    ).family(),
    Cohere2MoE(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        head_dim=128,
        windows=PrefixWindows(4096),
        positions=PrefixRope(max_length=8192, pairing="neighbours", without_windows=False),
        branch=CohereMoE(),
        constants=CONSTANTS,
        **COHERE,
    ).family(),
)
