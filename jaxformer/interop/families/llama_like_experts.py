"""How config.json and the tensors of families like Llama have mixtures of experts."""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.param_mapping import MappingRule, linear_rules
from jaxformer.interop.transforms import ExpertKernels, Fused, Identity, Interleaved, LinearKernel


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
            f"{prefix}.experts.{{expert}}.{name}.weight",
            f"feed_forward/experts/{ours}/kernel",
            LinearKernel(),
        )
        for ours, name in names.items()
    )
    kernel = MappingRule(f"{prefix}.{router}.weight", "feed_forward/router/kernel", LinearKernel())
    return (kernel, *experts)


def shared_rules(prefix: str) -> tuple[MappingRule, ...]:
    """Mapping rules of a shared expert."""
    return (
        *linear_rules(f"{prefix}.gate_proj", "feed_forward/shared/gate"),
        *linear_rules(f"{prefix}.up_proj", "feed_forward/shared/up"),
        *linear_rules(f"{prefix}.down_proj", "feed_forward/shared/down"),
    )


PREFIX = f"{p.LAYER_PREFIX}.mlp"
EXPERT_RULES = expert_rules(PREFIX)


# Settings of experts, which have no effect if all layers are dense.
EXPERT_ATTRIBUTES = (
    "moe_intermediate_size moe_layer_freq n_routed_experts n_shared_experts num_experts_per_tok "
    "n_group topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor "
    "aux_loss_alpha seq_aux ep_size num_nextn_predict_layers num_mtp_layers enable_moe_fp32_combine"
).split()
MIXTRAL_PREFIX = f"{p.LAYER_PREFIX}.block_sparse_moe"


def layer_branches(config: c.TransformerConfig) -> tuple[c.MoE, list[int]] | None:
    """The mixture of the layers, and the numbers of the dense ones; None for other models.

    All dense layers are the same gated network.
    """
    branches = [config.layer(i).feed_forward for i in range(config.num_layers)]
    experts = {x for x in branches if isinstance(x, c.MoE)}
    dense = {x for x in branches if isinstance(x, c.GLU)}
    if len(experts) != 1 or len(dense) > 1 or len(experts | dense) < len(set(branches)):
        return None
    return next(iter(experts)), [i for i, x in enumerate(branches) if x in dense]


def dense_width(config: c.TransformerConfig, dense_layers: list[int], moe: c.MoE) -> int:
    """Hidden width of the dense layers; that of an expert without them."""
    branch: Any = config.layer(dense_layers[0]).feed_forward if dense_layers else moe.expert
    return int(branch.hidden_dim)


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
    return first


def has_feed_forward_biases(config: c.TransformerConfig) -> bool:
    """Whether all dense layers and shared experts have biases; routed experts have none."""
    branches = [config.layer(i).feed_forward for i in range(config.num_layers)]
    shared = [x.shared.expert for x in branches if isinstance(x, c.MoE) and x.shared is not None]
    dense = [x for x in branches if not isinstance(x, c.MoE)]
    return all(getattr(x, "bias", False) for x in (*dense, *shared))


@dataclass(frozen=True, kw_only=True)
class MixtralMoE:
    """Mixtral's experts in every layer, of width ``intermediate_size``.

    Attributes:
        num_experts: Default of the number of experts.
        top_k: Default of the experts per token.
        router: The router.
    """

    num_experts: int = 8
    top_k: int = 2
    router: c.Router = c.Router()
    rules = (
        *expert_rules(MIXTRAL_PREFIX, gate="w1", up="w3", down="w2"),
        MappingRule(f"{MIXTRAL_PREFIX}.e_score_correction_bias", "feed_forward/selection_bias"),
    )

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts."""
        count = reader.integer("num_experts", self.num_experts)
        moe = c.MoE(
            expert=p.read_glu(reader),
            num_experts=reader.integer("num_local_experts", count),
            top_k=reader.integer("num_experts_per_tok", self.top_k),
            router=self.router,
        )
        return (moe,)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Numbers of experts."""
        if len(config.feed_forward) > 1 or not isinstance(config.feed_forward[0], c.MoE):
            return None
        moe = config.feed_forward[0]
        return {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}


STACKED_INPUTS = tuple(f"feed_forward/experts/{name}" for name in ("gate", "up"))


@dataclass(frozen=True)
class GptOssMoE:
    """Clamped experts with biases in every layer, all of a layer in one tensor."""

    rules = (
        *linear_rules(f"{PREFIX}.router", "feed_forward/router"),
        MappingRule(
            f"{PREFIX}.experts.gate_up_proj",
            tuple(f"{name}/kernel" for name in STACKED_INPUTS),
            Interleaved(part=Identity(), axis=2),
        ),
        MappingRule(
            f"{PREFIX}.experts.gate_up_proj_bias",
            tuple(f"{name}/bias" for name in STACKED_INPUTS),
            Interleaved(part=Identity(), axis=1),
        ),
        MappingRule(f"{PREFIX}.experts.down_proj", "feed_forward/experts/down/kernel"),
        MappingRule(f"{PREFIX}.experts.down_proj_bias", "feed_forward/experts/down/bias"),
    )

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts."""
        reader.require_value("hidden_act", "silu")
        reader.require_value("swiglu_alpha", 1.702)
        for name in ("experts_per_token", "initial_context_length"):  # without effect
            reader.get(name)
        expert = c.ClampedGEGLU(
            hidden_dim=reader.integer("intermediate_size", 2880),
            limit=reader.number("swiglu_limit", 7.0),
        )
        moe = c.MoE(
            expert=expert,
            num_experts=reader.integer("num_local_experts", 128),
            top_k=reader.integer("num_experts_per_tok", 4),
            router=c.Router(bias=True),
        )
        return (moe,)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Sizes of the experts."""
        if len(config.feed_forward) > 1 or not isinstance(config.feed_forward[0], c.MoE):
            return None
        moe = config.feed_forward[0]
        if not isinstance(moe.expert, c.ClampedGEGLU):
            return None
        return {
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "swiglu_limit": moe.expert.limit,
        }


@dataclass(frozen=True, kw_only=True)
class GraniteMoE(MixtralMoE):
    """Experts of width ``intermediate_size`` in every layer, in two tensors (Granite).

    Attributes:
        has_shared: Whether there may be a shared expert, of width ``shared_intermediate_size``.
    """

    has_shared: bool = False
    rules = (
        *linear_rules(f"{MIXTRAL_PREFIX}.router.layer", "feed_forward/router"),
        MappingRule(
            f"{MIXTRAL_PREFIX}.input_linear.weight",
            ("feed_forward/experts/gate/kernel", "feed_forward/experts/up/kernel"),
            Fused(part=ExpertKernels(), axis=1),
        ),
        MappingRule(
            f"{MIXTRAL_PREFIX}.output_linear.weight",
            "feed_forward/experts/down/kernel",
            ExpertKernels(),
        ),
        MappingRule(
            f"{p.LAYER_PREFIX}.shared_mlp.input_linear.weight",
            ("feed_forward/shared/gate/kernel", "feed_forward/shared/up/kernel"),
            Fused(),
        ),
        *linear_rules(f"{p.LAYER_PREFIX}.shared_mlp.output_linear", "feed_forward/shared/down"),
    )

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts, and the shared one unless its width is 0."""
        (moe,) = super().read(reader, bias=bias)
        width = reader.integer("shared_intermediate_size", 0) if self.has_shared else 0
        if width == 0:
            return (moe,)
        shared = p.read_glu(reader, width_name="shared_intermediate_size")
        return (replace(moe, shared=c.SharedExpert(expert=shared)),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Numbers of experts, and the width of the shared one."""
        fields = super().write(config)
        branch: Any = config.feed_forward[0]
        if fields is None or not self.has_shared:
            return fields
        shared = branch.shared
        width = 0 if shared is None else shared.expert.hidden_dim
        return {**fields, "shared_intermediate_size": width}


@dataclass(frozen=True, kw_only=True)
class HunyuanMoE:
    """Experts and a shared one, all of width ``intermediate_size``, in every layer (Hunyuan)."""

    rules = (*expert_rules(PREFIX, router="gate.wg"), *shared_rules(f"{PREFIX}.shared_mlp"))

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts."""
        expert = p.read_glu(reader)
        moe = c.MoE(
            expert=expert,
            num_experts=self._read_number(reader, "num_experts"),
            top_k=self._read_number(reader, "moe_topk"),
            shared=c.SharedExpert(expert=expert),
        )
        return (moe,)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Numbers of experts."""
        if len(config.feed_forward) > 1 or not isinstance(config.feed_forward[0], c.MoE):
            return None
        moe = config.feed_forward[0]
        return {"num_experts": moe.num_experts, "moe_topk": moe.top_k}

    @staticmethod
    def _read_number(reader: ConfigReader, name: str) -> int:
        """Read a number, or a list with the same number for each layer."""
        if not isinstance(reader.get(name), list):
            return reader.integer(name, 1)
        numbers = set(reader.sequence(name, int) or ())
        if len(numbers) != 1:
            reader.add_problem(name, "expected one number, the same in all layers.")
        return next(iter(numbers), 1)


@dataclass(frozen=True, kw_only=True)
class OlmoMoE:
    """Experts of width ``intermediate_size`` in every layer.

    Attributes:
        num_experts: Default of the number of experts.
        top_k: Default of the experts per token.
        renormalise: Default of ``norm_topk_prob``.
    """

    num_experts: int
    top_k: int
    renormalise: bool = False
    rules = EXPERT_RULES

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts."""
        return (self._read_moe(reader, "intermediate_size"),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Numbers of experts."""
        if len(config.feed_forward) > 1 or not isinstance(config.feed_forward[0], c.MoE):
            return None
        moe = config.feed_forward[0]
        return {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "norm_topk_prob": moe.router.renormalise,
        }

    def _read_moe(self, reader: ConfigReader, width_name: str, width: int | None = None) -> c.MoE:
        count = reader.integer("num_local_experts", self.num_experts)
        return c.MoE(
            expert=p.read_glu(reader, width_name=width_name, hidden_dim=width),
            num_experts=reader.integer("num_experts", count),
            top_k=reader.integer("num_experts_per_tok", self.top_k),
            router=c.Router(renormalise=reader.boolean("norm_topk_prob", self.renormalise)),
        )


@dataclass(frozen=True, kw_only=True)
class QwenMoE(OlmoMoE):
    """Experts of width ``moe_intermediate_size``, and dense layers by number (Qwen 3).

    Attributes:
        width: Default of the width of an expert.
        dense_width: Default of the width of the dense layers.
        shared_width: Default of the width of a shared expert with a gate (Qwen 2); None has none.
    """

    width: int = 768
    dense_width: int = 6144
    shared_width: int | None = None
    rules = (
        *p.FEED_FORWARD,
        *EXPERT_RULES,
        *shared_rules(f"{PREFIX}.shared_expert"),
        *linear_rules(f"{PREFIX}.shared_expert_gate", "feed_forward/shared_gate"),
    )

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """Experts in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` lacks."""
        moe = self._read_moe(reader, "moe_intermediate_size", self.width)
        if self.shared_width is not None:
            name = "shared_expert_intermediate_size"
            shared = p.read_glu(reader, width_name=name, hidden_dim=self.shared_width)
            moe = replace(moe, shared=c.SharedExpert(expert=shared, gated=True))
        dense = p.read_glu(reader, hidden_dim=self.dense_width)
        step = reader.positive_integer("decoder_sparse_step", 1)
        dense_layers = reader.sequence("mlp_only_layers", int) or ()
        layers = range(reader.integer("num_hidden_layers"))
        return shortest_cycle(
            tuple(dense if i in dense_layers or (i + 1) % step else moe for i in layers)
        )

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Experts, and the numbers of the dense layers."""
        branches = layer_branches(config)
        if branches is None or (branches[0].shared is None) != (self.shared_width is None):
            return None
        moe, dense_layers = branches
        fields = {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "norm_topk_prob": moe.router.renormalise,
            "moe_intermediate_size": moe.expert.hidden_dim,
            "intermediate_size": dense_width(config, dense_layers, moe),
            "mlp_only_layers": dense_layers,
            "decoder_sparse_step": 1,
        }
        if moe.shared is not None:
            fields["shared_expert_intermediate_size"] = moe.shared.expert.hidden_dim
        return fields


@dataclass(frozen=True, kw_only=True)
class DeepSeekMoE:
    """Dense layers first, then routed experts and a shared one as wide as several (DeepSeek).

    Attributes:
        first_dense: Default of the number of dense layers.
        first_dense_name: Field of this number.
        num_experts: Default of the number of experts; None has none.
        top_k: Default of the experts per token; None has none.
        num_shared: Default of the width of the shared expert, in experts.
        width: Default of the width of an expert; None has none.
        router: Router with the defaults of its fields.
        reads_renormalise: Whether ``norm_topk_prob`` counts; DeepSeek V2 never renormalises.
        experts_name: Field of the number of experts.
        shared_name: Field of the width of the shared expert, in experts.
        scale_name: Field of the scale.
        has_layer_types: Whether ``mlp_layer_types`` says which layers are dense.
        router_tensor: Name of the router's tensor, without ``.weight``.
        bias_tensor: Name of the selection bias.
        shared_tensor: Name of the shared expert.
    """

    first_dense: int = 0
    first_dense_name: str = "first_k_dense_replace"
    num_experts: int | None = None
    top_k: int | None = None
    num_shared: int = 1
    width: int | None = None
    router: c.Router = c.Router(score="sigmoid", selection_bias=True)
    reads_renormalise: bool = True
    experts_name: str = "n_routed_experts"
    shared_name: str = "n_shared_experts"
    scale_name: str = "routed_scaling_factor"
    has_layer_types: bool = False
    router_tensor: str = "gate"
    bias_tensor: str = "gate.e_score_correction_bias"
    shared_tensor: str = "shared_experts"

    @property
    def rules(self) -> tuple[MappingRule, ...]:
        """Mapping rules of a layer."""
        return (
            *p.FEED_FORWARD,
            *expert_rules(PREFIX, router=self.router_tensor),
            *shared_rules(f"{PREFIX}.{self.shared_tensor}"),
            MappingRule(f"{PREFIX}.{self.bias_tensor}", "feed_forward/selection_bias"),
        )

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The network of each layer, without a cycle."""
        count = reader.integer("num_hidden_layers")
        first = count_dense_layers(
            reader, self.first_dense, name=self.first_dense_name, has_types=self.has_layer_types
        )
        dense = p.read_glu(reader, bias=bias)
        for name in EXPERT_ATTRIBUTES:  # without effect if all layers are dense
            reader.get(name)
        return (
            (dense,) * count
            if first == count
            else (dense,) * first + ((self._read_moe(reader, bias=bias),) * (count - first))
        )

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Numbers of dense layers and of experts, and the router."""
        if all(
            isinstance(x.feed_forward, c.GLU) for x in map(config.layer, range(config.num_layers))
        ):
            return self._write_layers(config.num_layers, 0)
        branches = layer_branches(config)
        if branches is None or (shared_expert := branches[0].shared) is None:
            return None
        moe, dense_layers = branches
        shared, groups = shared_expert.expert.hidden_dim, moe.router.groups
        if dense_layers != [*range(len(dense_layers))] or shared % moe.expert.hidden_dim:
            return None
        return {
            **self._write_layers(len(dense_layers), config.num_layers - len(dense_layers)),
            "intermediate_size": dense_width(config, dense_layers, moe),
            "moe_intermediate_size": moe.expert.hidden_dim,
            self.experts_name: moe.num_experts,
            self.shared_name: shared // moe.expert.hidden_dim,
            "num_experts_per_tok": moe.top_k,
            "n_group": 1 if groups is None else groups.num_groups,
            "topk_group": 1 if groups is None else groups.top_k,
            "norm_topk_prob": moe.router.renormalise,
            self.scale_name: moe.router.scale,
        }

    def _read_moe(self, reader: ConfigReader, *, bias: bool) -> c.MoE:
        router = self.router
        reader.require_value("moe_layer_freq", 1)
        reader.require_value("scoring_func", router.score)
        expert = p.read_glu(reader, width_name="moe_intermediate_size", hidden_dim=self.width)
        shared = reader.integer(self.shared_name, self.num_shared) * expert.hidden_dim
        renormalise = reader.boolean("norm_topk_prob", router.renormalise)
        router = replace(
            router,
            renormalise=renormalise if self.reads_renormalise else False,
            scale=reader.number(self.scale_name, router.scale),
            groups=self._read_groups(reader),
        )
        return c.MoE(
            expert=expert,
            num_experts=reader.integer(self.experts_name, self.num_experts),
            top_k=reader.integer("num_experts_per_tok", self.top_k),
            router=router,
            shared=c.SharedExpert(expert=replace(expert, hidden_dim=shared, bias=bias)),
        )

    def _write_layers(self, dense: int, sparse: int) -> dict[str, Any]:
        kinds = ["dense"] * dense + ["sparse"] * sparse
        return {
            self.first_dense_name: dense,
            **({"mlp_layer_types": kinds} if self.has_layer_types else {}),
        }

    def _read_groups(self, reader: ConfigReader) -> c.ExpertGroups | None:
        default = self.router.groups or c.ExpertGroups(num_groups=1, top_k=1)
        reader.require_value("topk_method", "noaux_tc")
        groups = c.ExpertGroups(
            num_groups=reader.integer("n_group", default.num_groups),
            top_k=reader.integer("topk_group", default.top_k),
            score=default.score,
        )
        return None if groups.num_groups == 1 else groups


@dataclass(frozen=True, kw_only=True)
class HunyuanV3MoE(DeepSeekMoE):
    """Hunyuan 3's, which chooses from all experts and always renormalises."""

    def _read_moe(self, reader: ConfigReader, *, bias: bool) -> c.MoE:
        for name, value in {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}.items():
            reader.require_value(name, value, reason="this family has no such choice")
        return super()._read_moe(reader, bias=bias)


@dataclass(frozen=True, kw_only=True)
class DeepSeekV2MoE(DeepSeekMoE):
    """DeepSeek V2's, whose groups count by their best expert, and only if it says so."""

    def _read_groups(self, reader: ConfigReader) -> c.ExpertGroups | None:
        reader.require_value("topk_method", "greedy", "group_limited_greedy")
        groups, kept = (reader.optional_integer(name) for name in ("n_group", "topk_group"))
        if reader.get("topk_method", "greedy") != "group_limited_greedy":
            return None
        if groups is None or kept is None:
            reader.add_problem("topk_method", "it needs n_group and topk_group.")
            return None
        return c.ExpertGroups(num_groups=groups, top_k=kept, score="max")

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """As DeepSeek V3's, with the method."""
        fields = super().write(config)
        if fields is None or "n_group" not in fields:
            return fields
        is_grouped = fields["n_group"] > 1
        method = "group_limited_greedy" if is_grouped else "greedy"
        return fields | {"topk_method": method, "norm_topk_prob": False}


def with_branches(
    config: c.TransformerConfig, branches: tuple[c.FeedForward, ...]
) -> c.TransformerConfig:
    """The model with these networks; dense layers before all others become `first_layers`."""
    branches = tuple(branches[i % len(branches)] for i in range(config.num_layers))
    last = branches[-1]
    count = next(
        i for i, branch in enumerate(branches) if branches[i:] == (last,) * len(branches[i:])
    )
    attention = config.attention
    varies = max(len(getattr(attention, name, ())) for name in ("positions", "windows")) > 1
    if varies or not count:
        return replace(config, feed_forward=shortest_cycle(branches))
    first = (
        replace(config.layer(0).to_layer(), feed_forward=branch) for branch in branches[:count]
    )
    return replace(config, first_layers=tuple(first), feed_forward=(last,))
