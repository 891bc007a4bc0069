"""Gemma 4: layers without a window have other heads and another RoPE than layers with one.

The models are E2B, E4B, 12B, 31B and 26B-A4B. Layers without a window may have one projection for
key and value. E2B and E4B have embeddings for each layer, and their last layers read keys and
values of earlier ones. `gemma4` is the text part of a model that also reads images; it can be read,
and is written as `gemma4_text`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    OPTIONAL_NUMBER,
    Change,
    Field,
    Fixed,
    Options,
    Unused,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import gemma
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.experts import SHARED, stacked_rules
from jaxformer.interop.families.ropes import RopeByLayerType
from jaxformer.interop.families.windows import Rule, Windows, all_but_every
from jaxformer.interop.family import Family
from jaxformer.interop.hf_activations import HF_ACTIVATIONS
from jaxformer.interop.param_mapping import (
    MappingRule,
    decoder_mapping,
    glu_rules,
    linear_rules,
    norm_rules,
)
from jaxformer.interop.rope_config import read_rope_section
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

NORMS = {  # beside the layer's norms
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
class Gemma4Windows(Windows):
    """Windows of all layers but the last, which transformers takes for a full one."""

    default: int | None = 512
    rule: Rule | None = all_but_every(6)
    needs_size: bool = True

    def read_windows(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        return (*super().read_windows(reader, num_layers)[:-1], None)


@dataclass(frozen=True)
class Gemma4Ropes:
    """RoPE for layers with a window, p-RoPE for layers without.

    Attributes:
        defaults: ``rope_parameters`` if the file lacks them.
        max_length: Default of ``max_position_embeddings``.
    """

    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: ROPES)
    max_length: int = 131_072

    def read(self, reader: ConfigReader, options: Options) -> Options:
        windows = options["attention.windows"]
        sections = reader.section("rope_parameters") or ConfigReader(self.defaults)
        for kind in ("full_attention", *("sliding_attention",) * any(windows)):
            if sections.section(kind) is None:
                sections.add_problem(kind, "expected an object.")
        length = reader.positive_integer("max_position_embeddings", self.max_length)
        full, local = (
            read_rope_section(sections.part(kind), base=rope["rope_theta"], max_length=length)
            for kind, rope in self.defaults.items()
        )
        each = tuple(full if window is None else local for window in windows)
        return {"attention.positions": each}

    def write(self, model: c.TransformerConfig) -> Options | None:
        return RopeByLayerType().write(model)


class DenseNetwork:
    """A gated network."""

    dense = (
        Field("intermediate_size", "hidden_dim"),
        Field("hidden_activation", "activation", "gelu_pytorch_tanh"),
    )

    def read(self, reader: ConfigReader, options: Options) -> Options:
        return {
            "feed_forward": (with_options(c.GLU(hidden_dim=1), read_options(reader, self.dense)),)
        }

    def write(self, model: c.TransformerConfig) -> Options | None:
        """Its fields; None for another network."""
        network = model.feed_forward[0]
        return write_options(network, self.dense) if isinstance(network, c.GLU) else None


class Gemma4Network(DenseNetwork):
    """A gated network, beside experts if ``enable_moe_block``."""

    experts = (
        Field("moe_intermediate_size", "expert.hidden_dim"),
        Field("num_experts", "num_experts"),
        Field("top_k_experts", "top_k"),
    )

    def read(self, reader: ConfigReader, options: Options) -> Options:
        (dense,) = super().read(reader, options)["feed_forward"]
        if not reader.boolean("enable_moe_block", False):
            Unused(*(row.name for row in self.experts)).read(reader, options)
            return {"feed_forward": (dense,)}
        norm = c.RMSNorm(eps=options["norm.eps"])
        moe = c.MoE(
            expert=dense,
            num_experts=2,
            router=c.Router(norm=norm, expert_scale=True),
            shared=c.SharedExpert(expert=dense),
            norm=norm,
        )
        return {"feed_forward": (with_options(moe, read_options(reader, self.experts)),)}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """Fields of the network and of the experts; None for another one."""
        network: Any = model.feed_forward[0]
        experts: Any = network if network.is_moe and network.shared is not None else None
        dense = network if experts is None else experts.shared.expert
        widths = write_options(dense, self.dense) if isinstance(dense, c.GLU) else None
        sizes = write_options(experts, self.experts) or {row.name: None for row in self.experts}
        return widths and {**widths, "enable_moe_block": experts is not None, **sizes}


class FullHeads:
    """Heads of the layers without a window, and layers that read keys and values of others."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention of the layers, which may differ, and their networks."""
        shares = reader.boolean("attention_k_eq_v", False)
        full, windows = _read_full_heads(reader, options, shares), options["attention.windows"]
        count, networks = read_num_shared(reader, windows, shares), options["feed_forward"]
        if reader.boolean("use_double_wide_mlp", False):
            networks = (*networks * (len(windows) - count), *map(_double, networks * count))
        kinds = partial(_kinds_of_layers, full_heads=full, shares=shares, num_shared=count)
        return {"attention": Change(kinds), "feed_forward": networks}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The heads of both kinds of layers, and how many of the last layers read others' keys."""
        layers = model.layers
        sources = [layer for layer in layers if not layer.attention.cross_layer_kv]
        full: Any = [layer.attention for layer in sources if layer.window is None]
        local: Any = [layer.attention for layer in sources if layer.window is not None] or full
        if not full:
            return None
        shares = isinstance(full[0], c.SharedKV)
        return {
            "num_attention_heads": local[0].num_heads,
            "num_key_value_heads": local[0].num_kv_heads,
            "head_dim": local[0].head_dim,
            "attention_bias": "out" in local[0].biases,
            "global_head_dim": full[0].head_dim,
            "num_global_key_value_heads": full[0].num_kv_heads if shares else None,
            "attention_k_eq_v": shares,
            "num_kv_shared_layers": len(layers) - len(sources),
            "use_double_wide_mlp": layers[0].feed_forward != layers[-1].feed_forward,
        }


def _read_full_heads(reader: ConfigReader, options: Options, shares: bool) -> dict[str, Any]:
    """Heads of the full layers: released files have two fields, later ones an entry for a layer."""
    num_kv_heads, head_dim = options["attention.num_kv_heads"], options["attention.head_dim"]
    released = {
        "num_kv_heads": reader.integer("num_global_key_value_heads", num_kv_heads),
        "head_dim": reader.integer("global_head_dim", 512),
    }
    by_layer = reader.part("per_layer_config")  # transformers leaves out what does not differ
    if reader.get("per_layer_config") is None:
        return released if shares else released | {"num_kv_heads": num_kv_heads}
    names = {int(x): x for x in by_layer.values if x.isdecimal()}  # "05" of 60 layers
    layers = [i for i, window in enumerate(options["attention.windows"]) if window is None]
    parts = [by_layer.part(names[i]) if i in names else ConfigReader({}) for i in layers]
    entries = [
        {
            "num_kv_heads": part.integer("num_key_value_heads", num_kv_heads),
            "head_dim": part.integer("head_dim", head_dim),
        }
        for part in parts
    ]
    if any(entry != entries[0] for entry in entries):
        reader.add_problem("per_layer_config", "full layers must have the same heads.")
    return entries[0]


def read_num_shared(
    reader: ConfigReader, windows: tuple[Any, ...], shares: bool, default: int = 0
) -> int:
    """Number of the last layers that read keys and values of earlier ones."""
    count = reader.integer("num_kv_shared_layers", default)
    if count == 0:
        return 0
    if not 0 < count < len(windows):
        problem = f"expected 0 or more, and fewer than the {len(windows)} layers."
    elif {*windows[-count:]} - {*windows[:-count]}:
        problem = "each of these layers needs an earlier one of its type, whose keys it reads."
    elif shares:
        problem = "attention_k_eq_v, one projection for key and value, cannot be combined with it."
    else:
        return count
    reader.add_problem("num_kv_shared_layers", problem)
    return 0


def _kinds_of_layers(
    local: c.MultiHead, *, full_heads: dict[str, Any], shares: bool, num_shared: int
) -> tuple[Any, ...]:
    """The attention of each layer; the last layers read keys and values of earlier ones."""
    full: Any = replace(local, **full_heads)
    if shares:
        common = {name: getattr(local, name) for name in ("num_heads", "scale", "qk_norm")}
        biases: Any = ("query", "key_value", "out") if local.biases else ()
        full = c.SharedKV(**common, **full_heads, value_norm=local.value_norm, biases=biases)
    kinds = [
        replace(full if window is None else local, positions=(rope,), windows=(window,))
        for rope, window in zip(local.positions, local.windows, strict=True)
    ]
    first = len(kinds) - num_shared
    return (*kinds[:first], *map(with_source, kinds[first:]))


def with_source(kind: Any) -> Any:
    """The option of a layer that reads keys and values of an earlier one."""
    biases = ("query", "out") if kind.biases else ()
    return replace(kind, cross_layer_kv=True, value_norm=None, biases=biases)


def _double(branch: Any) -> Any:
    """The branch with twice as many features, apart from experts."""
    if branch.is_moe:
        return replace(branch, shared=c.SharedExpert(expert=_double(branch.shared.expert)))
    return replace(branch, hidden_dim=2 * branch.hidden_dim)


class LayerEmbeddings:
    """The embeddings of each layer, unless their width is 0."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The embeddings, with the activation of the network."""
        dim = reader.integer("hidden_size_per_layer_input", 256)
        num_ids = reader.integer("vocab_size_per_layer_input", 262_144)
        if dim == 0:
            return {}
        if num_ids != options["vocab_size"]:
            problem = f"must be vocab_size, which is {options['vocab_size']}."
            reader.add_problem("vocab_size_per_layer_input", problem)
        activation = reader.choice("hidden_activation", "gelu_pytorch_tanh", HF_ACTIVATIONS)
        return {"layer_embedding": c.LayerEmbedding(dim=dim, activation=activation)}

    def write(self, model: c.TransformerConfig) -> Options:
        """Their width, and the size of the vocabulary."""
        return {
            "hidden_size_per_layer_input": getattr(model.layer_embedding, "dim", 0),
            "vocab_size_per_layer_input": getattr(model.layer_embedding, "vocab_size", None)
            or model.vocab_size,
        }


FIELDS = (
    Fixed("use_bidirectional_attention", (False, "vision")),  # of tokens of images
    *(*p.decoder(heads=8, kv_heads=4, head_dim=256, tied=True), p.ATTENTION_BIAS),
    Field("rms_norm_eps", "attention.value_norm.eps", 1e-6),
    Field("final_logit_softcapping", "head.softcap", parse=OPTIONAL_NUMBER),
    gemma.MULTIPLIER,
)
TEXT = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    like(
        LLAMA,
        norm_placement="sandwich",
        layer_scalar=True,
        scale=1.0,
        qk_norm=c.QKNorm(),
        value_norm=c.RMSNorm(parameters="none"),
    ),
    (*FIELDS, Gemma4Windows(), Gemma4Ropes(), Gemma4Network(), FullHeads(), LayerEmbeddings()),
    decoder_mapping(
        *(*p.TOP_LEVEL, *LAYER_EMBEDDINGS, *gemma.SANDWICH, *p.ATTENTION),
        *linear_rules(f"{p.SELF_ATTENTION}.k_proj", "attention/key_value"),
        MappingRule(f"{p.LAYER_PREFIX}.layer_scalar", "layer_scalar"),
        *(*LAYER_EMBEDDING_BRANCH, *p.QK_NORMS, *p.FEED_FORWARD, *EXPERTS),
    ),
    attention_types=(c.MultiHead, c.SharedKV),
)
FAMILIES = (
    TEXT,
    # As Gemma 4, except: no embeddings for each layer, no experts.
    replace(
        TEXT,
        model_type="gemma4_unified_text",
        architecture="Gemma4UnifiedForCausalLM",
        fields=(
            *(*FIELDS, Gemma4Windows(1024), Gemma4Ropes(max_length=262_144)),
            *(DenseNetwork(), FullHeads()),
        ),
    ),
)
