"""How config.json and the tensors of families like Llama have mixtures of experts."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    EMPTY,
    ConfigField,
    Field,
    Fields,
    Fixed,
    OldName,
    Options,
    Unused,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.windows import PerLayer
from jaxformer.interop.param_mapping import (
    EMBEDDING_PATH,
    HEAD_PATH,
    MappingRule,
    MultiTokenNames,
    fused_rules,
    glu_rules,
    linear_rules,
)
from jaxformer.interop.transforms import LINEAR

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
            f"{prefix}.experts.{{expert}}.{name}.weight", f"{EXPERTS}/{ours}/kernel", LINEAR
        )
        for ours, name in names.items()
    )
    kernel = MappingRule(f"{prefix}.{router}.weight", "feed_forward/router/kernel", LINEAR)
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


DEEPSEEK_MULTI_TOKEN = MultiTokenNames(
    prefix=f"{p.LAYER_PREFIX}.",
    layer=p.LAYER_PREFIX,
    parts={
        "embedding_norm": f"{p.LAYER_PREFIX}.enorm",
        "hidden_norm": f"{p.LAYER_PREFIX}.hnorm",
        "projection": f"{p.LAYER_PREFIX}.eh_proj",
        "decoder/final_norm": f"{p.LAYER_PREFIX}.shared_head.norm",
    },
    copies={
        f"{p.LAYER_PREFIX}.embed_tokens.weight": EMBEDDING_PATH,
        f"{p.LAYER_PREFIX}.shared_head.head.weight": HEAD_PATH,
    },
    count="num_nextn_predict_layers",
    has_experts=True,
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
            pattern,
        )
        for end, leaf, pattern in (
            ("", "kernel", "e i o -> e i (o +)"),
            ("_bias", "bias", "e o -> e (o +)"),
        )
    ),
    MappingRule(f"{PREFIX}.experts.down_proj", f"{EXPERTS}/down/kernel"),
    MappingRule(f"{PREFIX}.experts.down_proj_bias", f"{EXPERTS}/down/bias"),
)


def stacked_rules(gate_up: str, down: str, *, alternative: bool = False) -> tuple[MappingRule, ...]:
    """Mapping rules of all experts of a layer in two tensors."""
    inputs = f"{EXPERTS}/gate/kernel", f"{EXPERTS}/up/kernel"
    pattern = "e i o -> e +o i"
    return (
        MappingRule(gate_up, inputs, pattern, alternative=alternative),
        MappingRule(down, f"{EXPERTS}/down/kernel", pattern, alternative=alternative),
    )


GRANITE_SHARED_RULES = (
    *fused_rules(f"{p.LAYER_PREFIX}.shared_mlp.input_linear", SHARED, ("gate", "up")),
    *linear_rules(f"{p.LAYER_PREFIX}.shared_mlp.output_linear", f"{SHARED}/down"),
)
# As some folders are published; transformers writes a tensor per expert.
STACKED_EXPERTS = stacked_rules(
    f"{PREFIX}.experts.gate_up_proj", f"{PREFIX}.experts.down_proj", alternative=True
)
GRANITE_RULES = (
    *linear_rules(f"{MIXTRAL_PREFIX}.router.layer", "feed_forward/router"),
    *stacked_rules(
        f"{MIXTRAL_PREFIX}.input_linear.weight", f"{MIXTRAL_PREFIX}.output_linear.weight"
    ),
    *GRANITE_SHARED_RULES,
)
MOE = c.MoE(expert=c.GLU(hidden_dim=1), num_experts=2)  # fields say its sizes
WIDTH = Field("intermediate_size", "expert.hidden_dim")
ACTIVATION = Field("hidden_act", "expert.activation", "silu")


def shared_fields(width_name: str, default: int | None = None) -> tuple[Field, ...]:
    """Fields of a shared expert."""
    return (
        Field(width_name, "shared.expert.hidden_dim", default),
        Field("hidden_act", "shared.expert.activation", "silu"),
    )


SIGMOID = c.Router(score="sigmoid", selection_bias=True)
ONE_GROUP = c.ExpertGroups(num_groups=1, top_k=1)


def dense_fields(width: int | None = None, bias: str | None = None) -> tuple[Field, ...]:
    """Fields of a gated network: default of its width, and the field of its biases."""
    biases = () if bias is None else (Field(bias, "bias", False),)
    return (
        Field("intermediate_size", "hidden_dim", width),
        Field("hidden_act", "activation", "silu"),
        *biases,
    )


DENSE = dense_fields()
# Settings of experts that some files have without effect.
EXPERT_ATTRIBUTES = (
    "moe_intermediate_size moe_layer_freq n_routed_experts n_shared_experts num_experts_per_tok "
    "n_group topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor "
    "aux_loss_alpha seq_aux ep_size num_nextn_predict_layers num_mtp_layers enable_moe_fp32_combine"
).split()


@runtime_checkable
class SparseLayers(Protocol):
    """The fields that say which layers have experts."""

    def read(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        """Whether each layer has experts."""
        ...

    def write(self, is_sparse: list[bool]) -> Options | None:
        """The fields that say so; None if none do."""
        ...


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in every layer, or in some beside a gated network in the others.

    Attributes:
        moe: The mixture, with any sizes.
        fields: Its fields, with options relative to it. The option "bias" before them says whether
            dense networks have biases.
        layers: Which layers have it; None is all.
        dense: Fields of the network of the others, with options relative to it.
    """

    moe: c.MoE = MOE
    fields: Fields
    layers: SparseLayers | None = None
    dense: Fields = DENSE

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The networks of the layers, as a cycle."""
        if self.layers is None:
            return {"feed_forward": (self.read_moe(reader),)}
        is_sparse = self.layers.read(reader, options["num_layers"])
        dense: Any = with_options(c.GLU(hidden_dim=1), read_options(reader, self.dense))
        if not any(is_sparse):
            unused = ConfigReader(reader.values)
            with suppress(ValueError):  # the values have no effect
                read_options(unused, self.fields)
            reader.names_read |= unused.names_read
            return {"feed_forward": (dense,)}
        moe = self.read_moe(reader, {"bias": dense.bias})
        return {"feed_forward": tuple(moe if sparse else dense for sparse in is_sparse)}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The fields of the mixture, of the dense network, and which layers have which."""
        networks = [layer.feed_forward for layer in model.layers]
        mixtures = {x for x in networks if isinstance(x, c.MoE)}
        dense = {x for x in networks if isinstance(x, c.GLU)}
        if len(mixtures) > 1 or len(dense) > 1 or len(mixtures | dense) < len({*networks}):
            return None
        entries = self.write_moe(*mixtures) if mixtures else {}
        if self.layers is None:
            return None if dense else entries
        layers = self.layers.write([isinstance(x, c.MoE) for x in networks])
        network = next(iter(dense)) if dense else _dense_expert(*mixtures)
        widths = write_options(network, self.dense)
        if entries is None or layers is None or widths is None:
            return None
        return {**entries, **layers, **widths}

    def read_moe(self, reader: ConfigReader, context: Options = EMPTY) -> c.MoE:
        """The mixture."""
        return with_options(self.moe, read_options(reader, self.fields, context))

    def write_moe(self, moe: c.MoE) -> dict[str, Any] | None:
        """Fields of the mixture; None for other kinds."""
        pairs = ((moe.expert, self.moe.expert), (moe.router, self.moe.router))
        lacks_shared = moe.shared is None and self.moe.shared is not None
        if lacks_shared or any(type(a) is not type(b) for a, b in pairs):
            return None
        return write_options(moe, self.fields)


def _dense_expert(moe: c.MoE) -> c.FeedForward:
    """A dense network like the experts, with the biases of the shared one."""
    expert: Any = moe.expert
    return replace(expert, bias=moe.shared is not None and moe.shared.expert.bias)


@dataclass(frozen=True)
class SharedExperts:
    """A shared expert, whose width is counted in experts.

    Attributes:
        name: The field.
        default: Its default.
        required: Whether there always is one.
    """

    name: str
    default: int = 0
    required: bool = False

    def read(self, reader: ConfigReader, options: Options) -> Options:
        parse = reader.positive_integer if self.required else reader.integer
        count = parse(self.name, self.default)
        if not count:
            return {"shared": None}
        names = {"activation": "expert.activation", "bias": "bias"}
        expert_options = {ours: options[path] for ours, path in names.items() if path in options}
        expert = c.GLU(hidden_dim=count * options["expert.hidden_dim"], **expert_options)
        return {"shared": c.SharedExpert(expert=expert)}

    def write(self, model: c.MoE) -> Options | None:
        width = 0 if model.shared is None else model.shared.expert.hidden_dim
        if width % model.expert.hidden_dim or (self.required and not width):
            return None
        return {self.name: width // model.expert.hidden_dim}


@dataclass(frozen=True)
class SharedWidth:
    """A shared expert, unless the field of its width is 0.

    Attributes:
        name: The field.
    """

    name: str

    def read(self, reader: ConfigReader, options: Options) -> Options:
        width = reader.integer(self.name, 0)
        expert = c.GLU(hidden_dim=max(1, width), activation=options["expert.activation"])
        return {"shared": c.SharedExpert(expert=expert) if width else None}

    def write(self, model: c.MoE) -> Options:
        return {self.name: 0 if model.shared is None else model.shared.expert.hidden_dim}


@dataclass(frozen=True)
class Groups:
    """Groups of experts: some groups are chosen first, then experts in them.

    Attributes:
        name: Field of their number.
        default: Their defaults.
    """

    name: str = "n_group"
    default: c.ExpertGroups = ONE_GROUP

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The groups; None if there is one."""
        groups = c.ExpertGroups(
            num_groups=reader.integer(self.name, self.default.num_groups),
            top_k=reader.integer("topk_group", self.default.top_k),
            score=self.default.score,
        )
        return {"router.groups": None if groups.num_groups == 1 else groups}

    def write(self, model: Any) -> Options:
        groups = model.router.groups or ONE_GROUP
        return {self.name: groups.num_groups, "topk_group": groups.top_k}


@dataclass(frozen=True)
class DenseFirst:
    """Dense layers first, then experts.

    Attributes:
        default: Number of dense layers, if the file lacks it.
        name: Field of the number.
        has_types: Whether ``mlp_layer_types`` takes precedence.
    """

    default: int = 0
    name: str = "first_k_dense_replace"
    has_types: bool = False

    def read(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        first = min(num_layers, reader.integer(self.name, self.default))
        types = reader.sequence(MLP_TYPES, str) if self.has_types else None
        if types is not None:
            first = types.count("dense")
            if [*types] != _mlp_types(i >= first for i in range(num_layers)):
                expected = f"expected dense, then sparse for all {num_layers} layers."
                reader.add_problem(MLP_TYPES, expected)
        return [i >= first for i in range(num_layers)]

    def write(self, is_sparse: list[bool]) -> Options | None:
        if is_sparse != sorted(is_sparse):
            return None
        types = {MLP_TYPES: _mlp_types(is_sparse)} if self.has_types else {}
        return {self.name: is_sparse.count(False), **types}


MLP_TYPES = "mlp_layer_types"


@dataclass(frozen=True)
class LayersByType:
    """The layers that ``mlp_layer_types`` calls sparse have experts.

    Attributes:
        num_dense: How many of the first layers have none in a file without the field.
    """

    num_dense: int = 0
    types = PerLayer(MLP_TYPES, {"sparse": True, "dense": False})

    def read(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        """Whether each layer has experts."""
        return [*self.types.read(reader, num_layers, lambda i: i >= self.num_dense)]

    def write(self, is_sparse: list[bool]) -> Options:
        """The words."""
        return self.types.write(is_sparse)


def _mlp_types(is_sparse: Iterable[bool]) -> list[str]:
    return ["sparse" if sparse else "dense" for sparse in is_sparse]


@dataclass(frozen=True)
class QwenLayers:
    """Experts in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` lacks.

    Attributes:
        dense: Default of ``mlp_only_layers``.
    """

    dense: tuple[int, ...] = ()

    def read(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        step = reader.positive_integer("decoder_sparse_step", 1)
        dense_layers = reader.sequence("mlp_only_layers", int)
        dense_layers = self.dense if dense_layers is None else dense_layers
        return [i not in dense_layers and (i + 1) % step == 0 for i in range(num_layers)]

    def write(self, is_sparse: list[bool]) -> Options | None:
        dense_layers = [i for i, sparse in enumerate(is_sparse) if not sparse]
        entries = {"mlp_only_layers": dense_layers, "decoder_sparse_step": 1}
        return entries if any(is_sparse) else None


def mixtral_experts(num_experts: int = 8, top_k: int = 2, **more: Any) -> Experts:
    """Mixtral's experts, of width ``intermediate_size``, with these defaults."""
    fields = (
        WIDTH,
        ACTIVATION,
        Field("num_local_experts", "num_experts", num_experts, alias="num_experts"),
        Field("num_experts_per_tok", "top_k", top_k),
    )
    return Experts(**{"fields": fields} | more)


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


def qwen_experts(
    num_experts: int,
    top_k: int,
    *,
    renormalise: bool = False,
    width: int = 768,
    dense_width: int = 6144,
    shared_width: int | None = None,
) -> Experts:
    """Qwen's experts, with these defaults of their fields, and of a shared one with a gate."""
    expert_width = Field("moe_intermediate_size", "expert.hidden_dim", width)
    fields = olmo_fields(num_experts, top_k, renormalise=renormalise, width=expert_width)
    dense = dense_fields(dense_width)
    if shared_width is None:
        return Experts(fields=fields, layers=QwenLayers(), dense=dense)
    return Experts(
        moe=replace(MOE, shared=c.SharedExpert(expert=MOE.expert, gated=True)),
        fields=(*fields, *shared_fields("shared_expert_intermediate_size", shared_width)),
        layers=QwenLayers(),
        dense=dense,
    )


def deepseek_experts(
    num_experts: int | None = None,
    top_k: int | None = None,
    *,
    width: int | None = None,
    router: c.Router | None = None,
    groups: ConfigField | c.ExpertGroups = ONE_GROUP,
    shared: int = 1,
    names: Mapping[str, str] | None = None,
    layers: DenseFirst | None = None,
    more: Fields = (),
    dense: Fields = DENSE,
) -> Experts:
    """DeepSeek's experts: dense layers first, then routed experts and a shared one.

    Args:
        num_experts: Default of their number.
        top_k: Default of the number that a token chooses.
        width: Default of their width.
        router: The router, with the defaults of its options.
        groups: Defaults of the groups of experts, or another field of them.
        shared: Default of the number of experts that are as wide as the shared one.
        names: Other names of DeepSeek's fields in this family.
        layers: Which layers are dense.
        more: Other fields.
        dense: As in `Experts`.
    """
    names, router = names or {}, router or SIGMOID
    layers = layers or DenseFirst()

    def name(theirs: str) -> str:
        return names.get(theirs, theirs)

    fields = (
        *more,
        Unused(*EXPERT_ATTRIBUTES),
        Field(name("moe_intermediate_size"), "expert.hidden_dim", width),
        ACTIVATION,
        Field(name("n_routed_experts"), "num_experts", num_experts),
        Field(name("num_experts_per_tok"), "top_k", top_k),
        Field(name("norm_topk_prob"), "router.renormalise", router.renormalise),
        Field(name("routed_scaling_factor"), "router.scale", router.scale),
        SharedExperts(name("n_shared_experts"), shared, required=True),
        Fixed("moe_layer_freq", (1,)),
        Fixed(name("scoring_func"), (router.score,)),
        *(
            (Fixed("topk_method", ("noaux_tc",)), Groups(name("n_group"), groups))
            if isinstance(groups, c.ExpertGroups)
            else (groups,)
        ),
    )
    return Experts(moe=replace(MOE, router=router), fields=fields, layers=layers, dense=dense)


def with_old_names(experts: Experts) -> Experts:
    """DeepSeek's experts whose numbers have other names in old files (Sarvam)."""
    old = (
        OldName(Field("num_experts", "num_experts")),
        OldName(SharedExperts("num_shared_experts", required=True)),
    )
    return replace(experts, fields=(*experts.fields, *old))


GRANITE_SHARED_EXPERTS = mixtral_experts(
    fields=(*mixtral_experts().fields, SharedWidth("shared_intermediate_size"))
)
