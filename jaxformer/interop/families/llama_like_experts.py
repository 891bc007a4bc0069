"""How config.json and the tensors of families like Llama have mixtures of experts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.option_fields import (
    Field,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.param_mapping import MappingRule, fused_rules, glu_rules, linear_rules
from jaxformer.interop.transforms import ExpertKernels, Fused, Identity, Interleaved, LinearKernel

PREFIX = f"{p.LAYER_PREFIX}.mlp"
MIXTRAL_PREFIX = f"{p.LAYER_PREFIX}.block_sparse_moe"
SHARED, EXPERTS = "feed_forward/shared", "feed_forward/experts"
SELECTION_BIAS = "feed_forward/selection_bias"


def expert_rules(
    prefix: str,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    router: str = "gate",
) -> tuple[MappingRule, ...]:
    """Mapping rules of a router and of experts with a tensor each."""
    names = {"gate": gate, "up": up, "down": down}
    experts = (
        MappingRule(
            f"{prefix}.experts.{{expert}}.{name}.weight", f"{EXPERTS}/{ours}/kernel", LinearKernel()
        )
        for ours, name in names.items()
    )
    kernel = MappingRule(f"{prefix}.{router}.weight", "feed_forward/router/kernel", LinearKernel())
    return (kernel, *experts)


def deepseek_rules(
    router: str = "gate", bias: str = "gate.e_score_correction_bias", shared: str = "shared_experts"
) -> tuple[MappingRule, ...]:
    """Mapping rules of dense networks, of experts, a shared one and a selection bias."""
    return (
        *p.FEED_FORWARD,
        *expert_rules(PREFIX, router=router),
        *glu_rules(f"{PREFIX}.{shared}", SHARED),
        MappingRule(f"{PREFIX}.{bias}", SELECTION_BIAS),
    )


EXPERT_RULES = expert_rules(PREFIX)
MIXTRAL_RULES = (
    *expert_rules(MIXTRAL_PREFIX, gate="w1", up="w3", down="w2"),
    MappingRule(f"{MIXTRAL_PREFIX}.e_score_correction_bias", SELECTION_BIAS),
)
QWEN_RULES = (
    *p.FEED_FORWARD,
    *EXPERT_RULES,
    *glu_rules(f"{PREFIX}.shared_expert", SHARED),
    *linear_rules(f"{PREFIX}.shared_expert_gate", "feed_forward/shared_gate"),
)
GPT_OSS_RULES = (
    *linear_rules(f"{PREFIX}.router", "feed_forward/router"),
    *(
        MappingRule(
            f"{PREFIX}.experts.gate_up_proj{end}",
            (f"{EXPERTS}/gate/{leaf}", f"{EXPERTS}/up/{leaf}"),
            Interleaved(part=Identity(), axis=axis),
        )
        for end, leaf, axis in (("", "kernel", 2), ("_bias", "bias", 1))
    ),
    MappingRule(f"{PREFIX}.experts.down_proj", f"{EXPERTS}/down/kernel"),
    MappingRule(f"{PREFIX}.experts.down_proj_bias", f"{EXPERTS}/down/bias"),
)


def stacked_rules(gate_up: str, down: str, *, alternative: bool = False) -> tuple[MappingRule, ...]:
    """Mapping rules of all experts of a layer in two tensors."""
    inputs = f"{EXPERTS}/gate/kernel", f"{EXPERTS}/up/kernel"
    fused = Fused(part=ExpertKernels(), axis=1)
    return (
        MappingRule(gate_up, inputs, fused, alternative=alternative),
        MappingRule(down, f"{EXPERTS}/down/kernel", ExpertKernels(), alternative=alternative),
    )


GRANITE_RULES = (
    *linear_rules(f"{MIXTRAL_PREFIX}.router.layer", "feed_forward/router"),
    *stacked_rules(
        f"{MIXTRAL_PREFIX}.input_linear.weight", f"{MIXTRAL_PREFIX}.output_linear.weight"
    ),
    *fused_rules(f"{p.LAYER_PREFIX}.shared_mlp.input_linear", SHARED, ("gate", "up")),
    *linear_rules(f"{p.LAYER_PREFIX}.shared_mlp.output_linear", f"{SHARED}/down"),
)
# Settings of experts, which have no effect if all layers are dense.
EXPERT_ATTRIBUTES = (
    "moe_intermediate_size moe_layer_freq n_routed_experts n_shared_experts num_experts_per_tok "
    "n_group topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor "
    "aux_loss_alpha seq_aux ep_size num_nextn_predict_layers num_mtp_layers enable_moe_fp32_combine"
).split()


def layer_branches(config: c.TransformerConfig) -> tuple[c.MoE, list[int]] | None:
    """The mixture of the layers, and the numbers of the dense ones; None for other models.

    All dense layers are the same gated network.
    """
    branches = [layer.feed_forward for layer in config.layers]
    experts = {x for x in branches if isinstance(x, c.MoE)}
    dense = {x for x in branches if isinstance(x, c.GLU)}
    if len(experts) != 1 or len(dense) > 1 or len(experts | dense) < len(set(branches)):
        return None
    return next(iter(experts)), [i for i, x in enumerate(branches) if x in dense]


def count_dense_layers(
    reader: ConfigReader,
    default: int,
    *,
    name: str = "first_k_dense_replace",
    has_types: bool = True,
) -> int:
    """Number of dense layers, which come first.

    Args:
        reader: The whole config.json.
        default: The number if the file lacks it.
        name: Field of the number.
        has_types: Whether ``mlp_layer_types`` takes precedence.
    """
    count = reader.integer("num_hidden_layers")
    first = min(count, reader.integer(name, default))
    kinds = reader.sequence("mlp_layer_types", str) if has_types else None
    if kinds is None:
        return first
    first = sum(kind == "dense" for kind in kinds)
    if kinds != ("dense",) * first + ("sparse",) * (count - first):
        reader.add_problem(
            "mlp_layer_types", f"expected dense, then sparse for all {count} layers."
        )
        return min(first, count)
    return first


def has_feed_forward_biases(config: c.TransformerConfig) -> bool:
    """Whether all dense layers and shared experts have biases; routed experts have none."""
    branches = [layer.feed_forward for layer in config.layers]
    shared = [x.shared.expert for x in branches if isinstance(x, c.MoE) and x.shared is not None]
    dense = [x for x in branches if not isinstance(x, c.MoE)]
    return all(getattr(x, "bias", False) for x in (*dense, *shared))


MOE = c.MoE(expert=c.GLU(hidden_dim=1), num_experts=2)  # fields say its sizes
WIDTH = Field("intermediate_size", "expert.hidden_dim")
ACTIVATION = Field("hidden_act", "expert.activation", "silu")


def shared_fields(width_name: str, default: int | None = None) -> tuple[Field, ...]:
    """Fields of a shared expert."""
    return (
        Field(width_name, "shared.expert.hidden_dim", default),
        Field("hidden_act", "shared.expert.activation", "silu"),
    )


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The same experts in every layer.

    Attributes:
        moe: The experts, with any sizes.
        fields: Fields that say options of the experts.
        rules: Mapping rules of a layer.
        shared_field: Field of the width of a shared expert, counted in experts; None has no such
            field.
        num_shared: Its default.
        constants: Fields that must be absent, null, or this value.
        unused: Fields without effect.
    """

    moe: c.MoE = MOE
    fields: tuple[Field, ...]
    rules: tuple[MappingRule, ...]
    shared_field: str | None = None
    num_shared: int = 0
    constants: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts."""
        return (self.read_moe(reader, bias=bias),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of the experts."""
        moe = config.feed_forward[0]
        is_same = isinstance(moe, c.MoE) and len(config.feed_forward) == 1
        return self.write_moe(moe) if is_same else None

    def read_moe(self, reader: ConfigReader, *, bias: bool) -> c.MoE:
        """The experts; `bias` is that of a shared one."""
        for name, value in self.constants.items():
            reader.require_value(name, value)
        for name in self.unused:
            reader.get(name)
        moe: Any = with_options(self.moe, read_options(reader, self.fields))
        if self.shared_field is None:
            return moe
        count = reader.integer(self.shared_field, self.num_shared)
        if not count:
            return moe
        wide = replace(moe.expert, hidden_dim=count * moe.expert.hidden_dim, bias=bias)
        return replace(moe, shared=c.SharedExpert(expert=wide))

    def write_moe(self, moe: Any) -> dict[str, Any] | None:
        """Fields of the experts; None for other kinds."""

        def kinds(moe: c.MoE) -> tuple[type, ...]:
            return type(moe.expert), type(moe.router), type(moe.shared)

        shared_fields = {}
        if self.shared_field is not None:
            width = 0 if moe.shared is None else moe.shared.expert.hidden_dim
            if width % moe.expert.hidden_dim:
                return None
            shared_fields = {self.shared_field: width // moe.expert.hidden_dim}
            moe = replace(moe, shared=None)
        if kinds(moe) != kinds(self.moe):
            return None
        return {**write_options(moe, self.fields), **shared_fields}


def mixtral_experts(num_experts: int = 8, top_k: int = 2, **more: Any) -> Experts:
    """Mixtral's experts, of width ``intermediate_size``, with these defaults."""
    fields = (
        WIDTH,
        ACTIVATION,
        Field("num_local_experts", "num_experts", num_experts, alias="num_experts"),
        Field("num_experts_per_tok", "top_k", top_k),
    )
    return Experts(**{"fields": fields, "rules": MIXTRAL_RULES} | more)


def olmo_fields(
    num_experts: int, top_k: int, *, renormalise: bool = False, width: Field = WIDTH
) -> tuple[Field, ...]:
    """Fields of OLMo's and Qwen's experts, with these defaults."""
    return (
        width,
        ACTIVATION,
        Field("num_experts", "num_experts", num_experts, alias="num_local_experts"),
        Field("num_experts_per_tok", "top_k", top_k),
        Field("norm_topk_prob", "router.renormalise", renormalise),
    )


GPT_OSS_EXPERTS = Experts(
    moe=c.MoE(
        expert=c.ClampedGEGLU(hidden_dim=1), num_experts=4, top_k=4, router=c.Router(bias=True)
    ),
    fields=(
        Field("intermediate_size", "expert.hidden_dim", 2880),
        Field("swiglu_limit", "expert.limit", 7.0),
        Field("swiglu_alpha", "expert.alpha", 1.702),
        Field("num_local_experts", "num_experts", 128),
        Field("num_experts_per_tok", "top_k", 4),
    ),
    rules=GPT_OSS_RULES,
    constants={"hidden_act": "silu"},
    unused=("experts_per_token", "initial_context_length"),
)
GRANITE_EXPERTS = mixtral_experts(rules=GRANITE_RULES)


@dataclass(frozen=True, kw_only=True)
class GraniteSharedExperts(Experts):
    """Granite's experts and a shared one, unless ``shared_intermediate_size`` is 0."""

    def read_moe(self, reader: ConfigReader, *, bias: bool) -> c.MoE:
        """The experts."""
        moe, name = super().read_moe(reader, bias=bias), "shared_intermediate_size"
        if reader.integer(name, 0) == 0:
            return moe
        return replace(moe, shared=c.SharedExpert(expert=p.read_glu(reader, width_name=name)))

    def write_moe(self, moe: Any) -> dict[str, Any] | None:
        """Fields of the experts, and the width of the shared one."""
        fields = super().write_moe(replace(moe, shared=None))
        width = 0 if moe.shared is None else moe.shared.expert.hidden_dim
        return fields and {**fields, "shared_intermediate_size": width}


def _read_same_number(reader: ConfigReader, name: str, default: int) -> int:
    """Read a number, or a list with the same number for each layer."""
    if not isinstance(reader.get(name), list):
        return reader.integer(name, default)
    numbers = set(reader.sequence(name, int) or ())
    if len(numbers) != 1:
        reader.add_problem(name, "expected one number, the same in all layers.")
    return next(iter(numbers), default)


@dataclass(frozen=True, kw_only=True)
class HunyuanExperts(Experts):
    """Experts and a shared one, all of width ``intermediate_size``, in every layer (Hunyuan)."""

    moe: c.MoE = replace(MOE, shared=c.SharedExpert(expert=MOE.expert))
    fields: tuple[Field, ...] = (
        WIDTH,
        ACTIVATION,
        *shared_fields("intermediate_size"),
        Field("num_experts", "num_experts", 1, _read_same_number),
        Field("moe_topk", "top_k", 1, _read_same_number),
    )
    rules: tuple[MappingRule, ...] = (
        *expert_rules(PREFIX, router="gate.wg"),
        *glu_rules(f"{PREFIX}.shared_mlp", SHARED),
    )


@dataclass(frozen=True, kw_only=True)
class ExpertsInSomeLayers(Experts):
    """Experts in some layers, the same gated network in the others.

    Attributes:
        dense_width: Default of the width of the dense layers; None has none.
    """

    dense_width: int | None = None

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The networks of the layers."""
        is_sparse = self.read_layers(reader, reader.integer("num_hidden_layers"))
        dense = p.read_glu(reader, hidden_dim=self.dense_width, bias=bias)
        moe = self.read_moe(reader, bias=bias)
        return tuple(moe if sparse else dense for sparse in is_sparse)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Which layers have experts, and the experts."""
        branches = layer_branches(config)
        if branches is None:
            return None
        moe, dense_layers = branches
        fields = self.write_moe(moe)
        layers = self.write_layers([i not in dense_layers for i in range(config.num_layers)])
        if fields is None or layers is None:
            return None
        dense: Any = config.layers[dense_layers[0]].feed_forward if dense_layers else moe.expert
        return {**fields, **layers, "intermediate_size": dense.hidden_dim}

    def read_layers(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        """Whether each layer has experts."""
        raise NotImplementedError

    def write_layers(self, is_sparse: list[bool]) -> dict[str, Any] | None:
        """The fields that say so; None if none do."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class QwenMoE(ExpertsInSomeLayers):
    """Experts in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` lacks (Qwen)."""

    rules: tuple[MappingRule, ...] = QWEN_RULES

    def read_layers(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        """Whether each layer has experts."""
        step = reader.positive_integer("decoder_sparse_step", 1)
        dense_layers = reader.sequence("mlp_only_layers", int) or ()
        return [i not in dense_layers and (i + 1) % step == 0 for i in range(num_layers)]

    def write_layers(self, is_sparse: list[bool]) -> dict[str, Any]:
        """The numbers of the dense layers."""
        dense_layers = [i for i, sparse in enumerate(is_sparse) if not sparse]
        return {"mlp_only_layers": dense_layers, "decoder_sparse_step": 1}


def qwen_experts(
    num_experts: int,
    top_k: int,
    *,
    renormalise: bool = False,
    width: int = 768,
    dense_width: int = 6144,
    shared_width: int | None = None,
) -> dict[str, Any]:
    """Arguments of `QwenMoE`: defaults of its fields, and of a shared expert with a gate."""
    expert_width = Field("moe_intermediate_size", "expert.hidden_dim", width)
    fields = olmo_fields(num_experts, top_k, renormalise=renormalise, width=expert_width)
    if shared_width is None:
        return {"fields": fields, "dense_width": dense_width}
    shared = c.SharedExpert(expert=MOE.expert, gated=True)
    return {
        "moe": replace(MOE, shared=shared),
        "fields": (*fields, *shared_fields("shared_expert_intermediate_size", shared_width)),
        "dense_width": dense_width,
    }


ONE_GROUP = c.ExpertGroups(num_groups=1, top_k=1)


def read_groups(
    reader: ConfigReader, default: c.ExpertGroups = ONE_GROUP, *, name: str = "n_group"
) -> c.ExpertGroups | None:
    """Groups of experts, of which some are chosen first; None if there is one."""
    groups = c.ExpertGroups(
        num_groups=reader.integer(name, default.num_groups),
        top_k=reader.integer("topk_group", default.top_k),
        score=default.score,
    )
    return None if groups.num_groups == 1 else groups


def write_groups(groups: c.ExpertGroups | None) -> dict[str, Any]:
    """Fields of groups of experts."""
    groups = groups or ONE_GROUP
    return {"n_group": groups.num_groups, "topk_group": groups.top_k}


@dataclass(frozen=True, kw_only=True)
class DeepSeekMoE(ExpertsInSomeLayers):
    """Dense layers first, then routed experts and a shared one as wide as several (DeepSeek).

    Attributes:
        first_dense: Default of the number of dense layers.
        groups: Defaults of the groups of experts.
        names: Other names of DeepSeek's fields in this family.
        has_layer_types: Whether ``mlp_layer_types`` says which layers are dense.
    """

    rules: tuple[MappingRule, ...] = deepseek_rules()
    num_shared: int = 1
    first_dense: int = 0
    groups: c.ExpertGroups = ONE_GROUP
    names: Mapping[str, str] = field(default_factory=dict)
    has_layer_types: bool = False

    def name(self, field_name: str) -> str:
        """Name of one of DeepSeek's fields in this family."""
        return self.names.get(field_name, field_name)

    def read_layers(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        """Whether each layer has experts."""
        for name in EXPERT_ATTRIBUTES:  # without effect if all layers are dense
            reader.get(name)
        name = self.name("first_k_dense_replace")
        first = count_dense_layers(
            reader, self.first_dense, name=name, has_types=self.has_layer_types
        )
        return [i >= first for i in range(num_layers)]

    def write_layers(self, is_sparse: list[bool]) -> dict[str, Any] | None:
        """The number of dense layers."""
        first = is_sparse.count(False)
        if is_sparse != sorted(is_sparse):
            return None
        kinds = ["sparse" if sparse else "dense" for sparse in is_sparse]
        types = {"mlp_layer_types": kinds} if self.has_layer_types else {}
        return {self.name("first_k_dense_replace"): first, **types}

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The networks of the layers."""
        if any(self.read_layers(reader, reader.integer("num_hidden_layers"))):
            return super().read(reader, bias=bias)
        return (p.read_glu(reader, bias=bias),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Numbers of dense layers and of experts, and the router."""
        if all(isinstance(layer.feed_forward, c.GLU) for layer in config.layers):
            return self.write_layers([False] * config.num_layers)
        return super().write(config)

    def read_moe(self, reader: ConfigReader, *, bias: bool) -> c.MoE:
        """The experts."""
        router: Any = self.moe.router
        reader.require_value("moe_layer_freq", 1)
        reader.require_value(self.name("scoring_func"), router.score)
        if self.shared_field is not None:
            reader.positive_integer(self.shared_field, self.num_shared)
        moe = super().read_moe(reader, bias=bias)
        return with_options(moe, {"router.groups": self.read_groups(reader)})

    def write_moe(self, moe: Any) -> dict[str, Any] | None:
        """Fields of the experts."""
        fields = None if moe.shared is None else super().write_moe(moe)
        if fields is None:
            return None
        groups = write_groups(moe.router.groups)
        return {**fields, **{self.name(name): value for name, value in groups.items()}}

    def read_groups(self, reader: ConfigReader) -> c.ExpertGroups | None:
        """Groups of experts, of which some are chosen first."""
        reader.require_value("topk_method", "noaux_tc")
        return read_groups(reader, self.groups, name=self.name("n_group"))


def deepseek_experts(
    num_experts: int | None = None,
    top_k: int | None = None,
    *,
    width: int | None = None,
    router: c.Router | None = None,
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Arguments of `DeepSeekMoE`: defaults of its fields, which may have other names."""
    names, router = names or {}, router or c.Router(score="sigmoid", selection_bias=True)
    fields = (
        Field("moe_intermediate_size", "expert.hidden_dim", width),
        ACTIVATION,
        Field("n_routed_experts", "num_experts", num_experts),
        Field("num_experts_per_tok", "top_k", top_k),
        Field("norm_topk_prob", "router.renormalise", router.renormalise),
        Field("routed_scaling_factor", "router.scale", router.scale),
    )
    return {
        "moe": replace(MOE, router=router),
        "fields": tuple(replace(row, name=names.get(row.name, row.name)) for row in fields),
        "shared_field": names.get("n_shared_experts", "n_shared_experts"),
        "names": names,
    }


@dataclass(frozen=True, kw_only=True)
class HunyuanV3MoE(DeepSeekMoE):
    """Hunyuan 3's, which chooses from all experts and always renormalises."""

    def read_moe(self, reader: ConfigReader, *, bias: bool) -> c.MoE:
        """The experts."""
        for name, value in {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}.items():
            reader.require_value(name, value, reason="this family has no such choice")
        return super().read_moe(reader, bias=bias)


@dataclass(frozen=True, kw_only=True)
class DeepSeekV2MoE(DeepSeekMoE):
    """DeepSeek V2's, never renormalised, whose groups count by their best expert, if at all."""

    def read_moe(self, reader: ConfigReader, *, bias: bool) -> c.MoE:
        """The experts."""
        return with_options(super().read_moe(reader, bias=bias), {"router.renormalise": False})

    def read_groups(self, reader: ConfigReader) -> c.ExpertGroups | None:
        """Groups of experts."""
        reader.require_value("topk_method", "greedy", "group_limited_greedy")
        num_groups, top_k = (reader.optional_integer(name) for name in ("n_group", "topk_group"))
        if reader.get("topk_method", "greedy") != "group_limited_greedy":
            return None
        if num_groups is None or top_k is None:
            reader.add_problem("topk_method", "it needs n_group and topk_group.")
            return None
        return c.ExpertGroups(num_groups=num_groups, top_k=top_k, score="max")

    def write_moe(self, moe: Any) -> dict[str, Any] | None:
        """As DeepSeek V3's, with the method."""
        fields = super().write_moe(moe)
        method = "greedy" if moe.router.groups is None else "group_limited_greedy"
        return fields and fields | {"topk_method": method, "norm_topk_prob": False}
