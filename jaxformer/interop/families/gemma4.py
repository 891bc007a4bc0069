"""Gemma 4: E2B, E4B, 31B and 26B-A4B.

Full layers have other heads and another RoPE than those with a window, and may have one projection
for key and value. E2B and E4B have embeddings for each layer, and their last layers read keys and
values of earlier ones. `gemma4` is the text part of a model that also reads images; it can be read,
and is written as `gemma4_text`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import gemma
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.llama_like_experts import SHARED, stacked_rules
from jaxformer.interop.families.llama_like_options import RopeByLayerType, WindowsByInterval
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.family import OLD_AND_NEW_PREFIX, Family, with_images
from jaxformer.interop.param_mapping import MappingRule, glu_rules, linear_rules, norm_rules
from jaxformer.interop.rope_config import read_rope_section

NORMS = {  # beside those of the layer
    "pre_feedforward_layernorm": "pre_shared_norm",
    "post_feedforward_layernorm_1": "post_shared_norm",
    "pre_feedforward_layernorm_2": "pre_experts_norm",
    "post_feedforward_layernorm_2": "post_experts_norm",
}
EXPERTS = (
    *glu_rules(f"{p.LAYER_PREFIX}.mlp", SHARED),
    *(
        rule
        for theirs, ours in NORMS.items()
        for rule in norm_rules(f"{p.LAYER_PREFIX}.{theirs}", f"feed_forward/{ours}")
    ),
    *linear_rules(f"{p.LAYER_PREFIX}.router.proj", "feed_forward/router"),
    MappingRule(f"{p.LAYER_PREFIX}.router.scale", "feed_forward/router_norm/scale"),
    MappingRule(f"{p.LAYER_PREFIX}.router.per_expert_scale", "feed_forward/expert_scale"),
    *stacked_rules(f"{p.LAYER_PREFIX}.experts.gate_up_proj", f"{p.LAYER_PREFIX}.experts.down_proj"),
)
LAYER_EMBEDDINGS = (
    MappingRule("model.embed_tokens_per_layer.weight", "layer_embedding/tokens/embedding"),
    *linear_rules("model.per_layer_model_projection", "layer_embedding/projection"),
    *norm_rules("model.per_layer_projection_norm", "layer_embedding/norm"),
)
LAYER_EMBEDDING_BRANCH = (
    *linear_rules(f"{p.LAYER_PREFIX}.per_layer_input_gate", "layer_embedding/gate"),
    *linear_rules(f"{p.LAYER_PREFIX}.per_layer_projection", "layer_embedding/down"),
    *norm_rules(f"{p.LAYER_PREFIX}.post_per_layer_input_norm", "layer_embedding/norm"),
)
P_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
ROPES: dict[str, dict[str, Any]] = {
    "full_attention": P_ROPE,
    "sliding_attention": {"rope_theta": 1e4},
}


@dataclass(frozen=True)
class Gemma4Windows(WindowsByInterval):
    """Windows of all layers but the last, which transformers takes for a full one."""

    def read(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        """The windows."""
        windows = super().read(reader, num_layers)
        first = (windows[i % len(windows)] for i in range(num_layers - 1))
        return (*first, None)

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """The window, which transformers requires even if no layer has it, and the types."""
        fields = super().write(config)
        return {**fields, "sliding_window": fields["sliding_window"] or self.default}

    def _read_window(self, reader: ConfigReader) -> int | None:
        return reader.integer("sliding_window", self.default)


@dataclass(frozen=True, kw_only=True)
class Gemma4Ropes(RopeByLayerType):
    """RoPE for layers with a window, p-RoPE for those without."""

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """The RoPE of each layer."""
        sections = reader.section("rope_parameters") or ConfigReader(ROPES)
        for kind in ("full_attention", *("sliding_attention",) * any(windows)):
            if sections.section(kind) is None:
                sections.add_problem(kind, "expected an object.")
        length = reader.positive_integer("max_position_embeddings", self.max_length)
        full, local = (
            read_rope_section(sections.part(kind), base=rope["rope_theta"], max_length=length)
            for kind, rope in ROPES.items()
        )
        return tuple(full if window is None else local for window in windows)


@dataclass(frozen=True)
class Gemma4Branch:
    """A gated network, beside experts if ``enable_moe_block``."""

    rules = (*p.FEED_FORWARD, *EXPERTS)

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The networks."""
        dense = p.read_glu(reader, name="hidden_activation", activation="gelu_pytorch_tanh")
        names = "moe_intermediate_size", "num_experts", "top_k_experts"
        if not reader.boolean("enable_moe_block", False):
            for name in names:  # without effect
                reader.get(name)
            return (dense,)
        width, num_experts, top_k = map(reader.integer, names)
        norm = c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-6))
        moe = c.MoE(
            expert=replace(dense, hidden_dim=width),
            num_experts=num_experts,
            top_k=top_k,
            router=c.Router(norm=norm, expert_scale=True),
            shared=c.SharedExpert(expert=dense),
            norm=norm,
        )
        return (moe,)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of the network and of the experts; None for another one."""
        branch: Any = config.feed_forward[0]
        experts: Any = branch if isinstance(branch, c.MoE) and branch.shared is not None else None
        dense = branch if experts is None else experts.shared.expert
        if not isinstance(dense, c.GLU):
            return None
        return {
            "intermediate_size": dense.hidden_dim,
            "hidden_activation": hf_activation_name(dense.activation),
            "enable_moe_block": experts is not None,
            "moe_intermediate_size": experts and experts.expert.hidden_dim,
            "num_experts": experts and experts.num_experts,
            "top_k_experts": experts and experts.top_k,
        }


@dataclass(frozen=True)
class Gemma4(gemma.Gemma):
    """Full layers whose heads differ from those of the layers with a window."""

    def family(self) -> Family:
        """The family."""
        return replace(super().family(), attention_types=(c.MultiHead, c.SharedKV))

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        reader.require_value("use_bidirectional_attention", False, "vision")  # of tokens of images
        config = super().read(reader)
        heads = p.heads_of(config)
        common: dict[str, Any] = {
            "scale": 1.0,
            "qk_norm": heads.qk_norm,
            "value_norm": replace(config.norm, parameters="none"),
        }
        local = replace(heads, **common)
        shares = reader.boolean("attention_k_eq_v", False)
        full_layers = [i for i, layer in enumerate(config.layers) if layer.window is None]
        full_heads = _read_full_heads(reader, full_layers, shares, heads)
        full: Any = replace(local, **full_heads)
        if shares:
            biases: Any = ("query", "key_value", "out") if local.biases else ()
            full = c.SharedKV(num_heads=local.num_heads, **full_heads, **common, biases=biases)
        kinds = [
            replace(
                full if layer.window is None else local,
                positions=(layer.positions,),
                windows=(layer.window,),
            )
            for layer in config.layers
        ]
        branches = [layer.feed_forward for layer in config.layers]
        is_wide = reader.boolean("use_double_wide_mlp", False)
        first = config.num_layers - _read_num_shared(reader, kinds)
        kinds[first:] = map(_with_source, kinds[first:])
        if is_wide:
            branches[first:] = map(_double, branches[first:])
        return replace(
            config,
            attention=tuple(kinds),
            feed_forward=tuple(branches),
            layer_scalar=True,
            layer_embedding=_read_layer_embedding(reader, config.vocab_size),
        )

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        layers = config.layers
        sources = [layer for layer in layers if not layer.attention.cross_layer_kv]
        full: Any = [layer.attention for layer in sources if layer.window is None]
        local: Any = [layer.attention for layer in sources if layer.window is not None] or full
        if not full or not all(isinstance(x[0], c.MultiHead | c.SharedKV) for x in (full, local)):
            return None
        attention = c.MultiHead(
            num_heads=local[0].num_heads,
            num_kv_heads=local[0].num_kv_heads,
            head_dim=local[0].head_dim,
            positions=tuple(layer.positions for layer in layers),
            windows=tuple(layer.window for layer in layers),
            biases=p.ALL_BIASES if "out" in local[0].biases else (),
        )
        branches = layers[0].feed_forward, layers[-1].feed_forward
        plain = replace(config, attention=attention, feed_forward=branches[:1])
        fields, shares = super().write(plain), isinstance(full[0], c.SharedKV)
        return fields and {
            **fields,
            "global_head_dim": full[0].head_dim,
            "num_global_key_value_heads": full[0].num_kv_heads if shares else None,
            "attention_k_eq_v": shares,
            "num_kv_shared_layers": len(layers) - len(sources),
            "use_double_wide_mlp": branches[0] != branches[1],
            "hidden_size_per_layer_input": getattr(config.layer_embedding, "dim", 0),
            "vocab_size_per_layer_input": config.vocab_size,
        }


def _read_num_shared(reader: ConfigReader, kinds: Sequence[Any]) -> int:
    """Number of the last layers that read keys and values of earlier ones."""
    count = reader.integer("num_kv_shared_layers", 0)
    if count == 0:
        return 0
    windows = [kind.windows for kind in kinds]
    if not 0 < count < len(kinds):
        problem = f"expected 0 or more, and fewer than the {len(kinds)} layers."
    elif set(windows[-count:]) - set(windows[:-count]):
        problem = "each of these layers needs an earlier one of its type, whose keys it reads."
    elif any(isinstance(kind, c.SharedKV) for kind in kinds):
        problem = "attention_k_eq_v, one projection for key and value, cannot be combined with it."
    else:
        return count
    reader.add_problem("num_kv_shared_layers", problem)
    return 0


def _with_source(kind: Any) -> Any:
    """The option of a layer that reads keys and values of an earlier one."""
    biases = ("query", "out") if kind.biases else ()
    return replace(kind, cross_layer_kv=True, value_norm=None, biases=biases)


def _double(branch: Any) -> Any:
    """The branch with twice as many features, apart from experts."""
    if branch.is_moe:
        return replace(branch, shared=c.SharedExpert(expert=_double(branch.shared.expert)))
    return replace(branch, hidden_dim=2 * branch.hidden_dim)


def _read_layer_embedding(reader: ConfigReader, vocab_size: int) -> c.LayerEmbedding | None:
    """The embeddings of each layer, if there are any."""
    dim = reader.integer("hidden_size_per_layer_input", 256)
    num_ids = reader.integer("vocab_size_per_layer_input", 262_144)
    if dim == 0:
        return None
    if num_ids != vocab_size:
        problem = f"must be vocab_size, which is {vocab_size}."
        reader.add_problem("vocab_size_per_layer_input", problem)
    activation = reader.choice("hidden_activation", "gelu_pytorch_tanh", HF_ACTIVATIONS)
    return c.LayerEmbedding(dim=dim, activation=activation)


def _read_full_heads(
    reader: ConfigReader, layers: list[int], shares: bool, heads: c.MultiHead
) -> dict[str, Any]:
    """Heads of the full layers: released files have two fields, later ones an entry for a layer."""
    released = {
        "num_kv_heads": reader.integer("num_global_key_value_heads", heads.num_kv_heads),
        "head_dim": reader.integer("global_head_dim", 512),
    }
    by_layer = reader.part("per_layer_config")  # transformers leaves out what does not differ
    if reader.get("per_layer_config") is None:
        return released if shares else released | {"num_kv_heads": heads.num_kv_heads}
    names = {int(x): x for x in by_layer.values if x.isdecimal()}  # "05" of 60 layers
    parts = [by_layer.part(names[i]) if i in names else ConfigReader({}) for i in layers]
    entries = [
        {
            "num_kv_heads": part.integer("num_key_value_heads", heads.num_kv_heads),
            "head_dim": part.integer("head_dim", heads.head_dim),
        }
        for part in parts
    ]
    if any(entry != entries[0] for entry in entries):
        reader.add_problem("per_layer_config", "full layers must have the same heads.")
    return entries[0]


TEXT = Gemma4(
    "gemma4_text",
    "Gemma4ForCausalLM",
    sizes={"num_attention_heads": 8},
    kv_heads=4,
    head_dim=256,
    norm_placement="sandwich",
    norm_rules=gemma.GEMMA["norm_rules"],
    tied=True,
    biases=gemma.GEMMA["biases"],
    qk_norm=c.QKNorm(),
    attention_rules=(
        *p.ATTENTION,
        *linear_rules(f"{p.SELF_ATTENTION}.k_proj", "attention/key_value"),
        MappingRule(f"{p.LAYER_PREFIX}.layer_scalar", "layer_scalar"),
        *LAYER_EMBEDDING_BRANCH,
    ),
    top_level=(*p.TOP_LEVEL, *LAYER_EMBEDDINGS),
    windows=Gemma4Windows(512, period=6),
    positions=Gemma4Ropes(max_length=131_072),
    branch=Gemma4Branch(),
    fields=(Field("final_logit_softcapping", "head.softcap", None, ConfigReader.optional_number),),
    not_written=("hidden_act",),
).family()
FAMILIES = (
    TEXT,
    with_images(
        TEXT,
        lambda reader, tied: tied,
        unused=(
            *("vision_config", "audio_config", "vision_soft_tokens_per_image"),
            *("eoa_token_index", "tie_word_embeddings"),
        ),
        modules=r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\..*",
        key_renames=OLD_AND_NEW_PREFIX,
    ),
)
