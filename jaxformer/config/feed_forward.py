"""Feed-forward options: MLP, GLU, clamped GEGLU, MoE, and the `FeedForward` protocol."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, TypeVar

from jaxtyping import Array

from jaxformer import functional as F
from jaxformer.checks import Checked, Must, Positive, Size, require
from jaxformer.config.norms import Norm
from jaxformer.config.parameter import Parameter, projected_width
from jaxformer.config.registry import Option, unimplemented_method
from jaxformer.config.tiny import TINY_NUM_EXPERTS, shrink
from jaxformer.functional.activations import ACTIVATIONS

Dense = TypeVar("Dense", bound="DenseFeedForward")


class FeedForward(Option, protocol=True):
    """A feed-forward network applied to each token separately.

    A custom option implements these methods; `flops` is optional:

        parameters(self, model_dim)      dict from names to `Parameter`
        __call__(self, params, x)        from [*batch, T, D] to [*batch, T, D]
        flops(self, model_dim, length)   FLOPs of the matrix products for `length` tokens

    `params` are the arrays by name, in the dtype of the computation. Under tensor parallelism each
    device gets its shard of the axes "hidden" and "heads", and the outputs of the devices are
    summed: so the last matrix product must contract the sharded axis, with no bias after it.
    """

    is_branch = True  # whether the layer has this branch at all
    is_moe = False
    input_projections: tuple[str, ...] = ()  # names of the linear layers of `DenseFeedForward`
    parameters = unimplemented_method("parameters", "the model")
    __call__ = unimplemented_method("__call__", "the model")
    flops = unimplemented_method("flops", "costs")

    @property
    def has_norms(self) -> bool:
        """Whether it has norms of its own in place of the layer's norm before it."""
        return False

    @property
    def has_hidden_dropout(self) -> bool:
        """Whether it supports `Dropout.feed_forward`."""
        return self.is_moe or bool(self.input_projections)

    def hidden_width(self, model_dim: int) -> int:
        """Outputs per token of the projections from the model width."""
        return projected_width(self.parameters(model_dim))

    def routed_width(self, model_dim: int) -> int:
        """Outputs per token of the experts that it chose."""
        return 0


Activation = Annotated[
    str,
    Must(
        f"be one of {', '.join(map(repr, ACTIVATIONS))}, or your own, registered by "
        "@options.activation in a module that is imported first (--import MODULE)",
        ACTIVATIONS.__contains__,
    ),
]


Sparsity = Annotated[float, Must("be between 0 and 1", lambda share: 0 < share < 1)]


class DenseFeedForward(FeedForward, protocol=True):
    """Linear layers to `hidden_dim` features, an activation, and a linear layer back."""

    hidden_dim: int
    bias: bool
    input_projections: tuple[str, ...] = ("gate", "up")
    learned_numbers: Mapping[str, float] = MappingProxyType({})  # of the activation, at the start
    sub_norm: Norm | None = None  # of what the last linear layer reads
    sparsity: float | None = None  # of the first input projection

    def hidden(self, projections: Mapping[str, Array], *, axis_name: str | None = None) -> Array:
        """`activate`, after `F.gaussian_top_k` of the first projection if there is a sparsity.

        The features are sharded over the mesh axis `axis_name`.
        """
        if self.sparsity is not None:
            name = self.input_projections[0]
            sparse_gate = F.gaussian_top_k(
                projections[name], sparsity=self.sparsity, axis_name=axis_name
            )
            projections = {**projections, name: sparse_gate}
        return self.activate(projections)

    def activate(self, projections: Mapping[str, Array]) -> Array:
        """Apply the activation, and the gate if there is one, to the input projections.

        The mapping has the learned numbers too.
        """
        raise NotImplementedError

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the matrix products for `length` tokens."""
        products = len(self.input_projections) + 1
        return products * 2 * length * model_dim * self.hidden_dim

    def num_parameters(self, model_dim: int) -> int:
        """Numbers in kernels and biases."""
        num_biases = len(self.input_projections) * self.hidden_dim + model_dim
        kernels = self.flops(model_dim, 1) // 2
        return kernels + self.bias * num_biases + len(self.learned_numbers)

    def hidden_width(self, model_dim: int) -> int:
        """Outputs per token of the projections from the model width."""
        return len(self.input_projections) * self.hidden_dim

    def tiny(self: Dense) -> Dense:
        """Return the option at test size."""
        return shrink(self)


@dataclass(frozen=True, kw_only=True)
class MLP(DenseFeedForward):
    """Two linear layers with an activation between them.

    Attributes:
        hidden_dim: Number of hidden features.
        activation: A name in `functional.activations.ACTIVATIONS`; `options.activation` adds
            others.
        bias: Whether the linear layers have biases.
        sparsity: Share of zeros of what the activation reads, by `F.gaussian_top_k`; None leaves
            it as it is.
    """

    hidden_dim: Size
    activation: Activation = "gelu_tanh"
    bias: bool = False
    sparsity: Sparsity | None = None

    input_projections = ("up",)

    def activate(self, projections: Mapping[str, Array]) -> Array:
        """activation(up)."""
        return ACTIVATIONS[self.activation](projections["up"])


@dataclass(frozen=True, kw_only=True)
class GLU(DenseFeedForward):
    """Gated linear unit: down(activation(gate(x)) * up(x)).

    Attributes:
        hidden_dim: Number of hidden features.
        activation: Activation of the gate, a name as in `MLP`.
        bias: Whether the linear layers have biases.
        sub_norm: Norm of the hidden features, before `down` (BitNet). Experts have none.
        sparsity: Share of zeros of the gate, by `F.gaussian_top_k` before the activation (Gemma
            3n); None leaves it as it is.
    """

    hidden_dim: Size
    activation: Activation = "silu"
    bias: bool = False
    sub_norm: Norm | None = None
    sparsity: Sparsity | None = None

    def activate(self, projections: Mapping[str, Array]) -> Array:
        """activation(gate) * up."""
        return ACTIVATIONS[self.activation](projections["gate"]) * projections["up"]


@dataclass(frozen=True, kw_only=True)
class ClampedGEGLU(DenseFeedForward):
    """Quick-GELU gate times (value + 1), both clamped (Phi-3-small, gpt-oss).

    Attributes:
        hidden_dim: Number of hidden features.
        limit: Upper limit of the gate, and of the value's magnitude.
        alpha: Slope of the argument of the gate's sigmoid.
        bias: Whether the linear layers have biases.
    """

    hidden_dim: Size
    limit: Positive = 20.0
    alpha: float = 1.702
    bias: bool = True

    def activate(self, projections: Mapping[str, Array]) -> Array:
        """`F.clamped_geglu` of gate and up."""
        gate, up = projections["gate"], projections["up"]
        return F.clamped_geglu(gate, up, limit=self.limit, alpha=self.alpha)


@dataclass(frozen=True, kw_only=True)
class XIELU(DenseFeedForward):
    """Two linear layers with `F.xielu` between them, whose curvatures are learned (Apertus).

    Attributes:
        hidden_dim: Number of hidden features.

    References:
        Huang and Schlag, Deriving Activation Functions Using Integration, 2024. arXiv:2411.13010
    """

    hidden_dim: Size

    bias = False
    input_projections = ("up",)
    # Softplus makes them 0.8, and 0.8 less the usual beta.
    learned_numbers = MappingProxyType(
        {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
    )

    def activate(self, projections: Mapping[str, Array]) -> Array:
        """`F.xielu` of up."""
        numbers = projections["alpha_p"], projections["alpha_n"]
        return F.xielu(projections["up"], *numbers)


@dataclass(frozen=True, kw_only=True)
class ExpertGroups(Checked):
    """Groups of experts with consecutive numbers; a token chooses experts of the best groups only.

    Attributes:
        num_groups: Number of groups, all of the same size.
        top_k: Groups that are kept for each token.
        score: Score of a group: "max" is the largest score of its experts (DeepSeek V2), "top_2"
            the sum of the two largest (DeepSeek V3).
    """

    num_groups: Size
    top_k: Size
    score: F.GroupScore = "top_2"

    def __post_init__(self):
        super().__post_init__()
        require(
            self.top_k <= self.num_groups,
            "ExpertGroups.top_k must be at most num_groups; "
            f"got top_k={self.top_k}, num_groups={self.num_groups}.",
        )


@dataclass(frozen=True, kw_only=True)
class Router(Checked):
    """Scores the experts of a mixture, chooses top_k of them and weighs their outputs.

        scores = score(x @ kernel + bias)
        choice = top_k of (scores + selection_bias), in the groups that are kept
        weights = scale * scores[choice] / sum(scores[choice]) * expert_scale[choice]

    Attributes:
        score: Scores of the logits: "softmax" over the experts, or "sigmoid" of each.
        bias: Whether the logits have a bias.
        selection_bias: Whether a bias per expert is added to the scores that choose experts, but
            not to the weights. Training moves it to balance the load without an auxiliary loss
            (DeepSeek V3).
        selection: What chooses, the bias included: the "scores", or the "logits" (Kolibri 1).
        groups: Groups of experts; None chooses from all.
        renormalise: Whether the scores of the choice are divided by their sum.
        scale: Multiplies the weights.
        expert_scale: Whether a learned scale of each expert multiplies its weights (Gemma 4).
        norm: Norm of what the router reads, which is then divided by the root of the model width:
            x becomes norm(x) * model_dim ** -0.5 (Gemma 4). None reads x as it is.
        logit_softcap: Cap c of the logits: l becomes c * tanh(l / c); None has none (Laguna).
        capacity: Tokens of a row that an expert accepts, in order, whatever they are; later ones
            skip it. Each call counts from zero, so steps of decoding drop none. None accepts all.
    """

    score: F.ExpertScore = "softmax"
    bias: bool = False
    selection_bias: bool = False
    selection: F.ExpertSelection = "scores"
    groups: ExpertGroups | None = None
    renormalise: bool = True
    scale: float = 1.0
    expert_scale: bool = False
    norm: Norm | None = None
    logit_softcap: Positive | None = None
    capacity: Size | None = None

    weighs_inputs = False

    def route(self, logits: Array, *, top_k: int, selection_bias: Array | None) -> F.Routing:
        """`F.route`, and `F.drop_late_tokens`."""
        groups = self.groups or ExpertGroups(num_groups=1, top_k=1)
        routing = F.route(
            logits,
            top_k=top_k,
            score=self.score,
            selection_bias=selection_bias,
            selection=self.selection,
            num_groups=groups.num_groups,
            top_k_groups=groups.top_k,
            group_score=groups.score,
            renormalise=self.renormalise,
            scale=self.scale,
        )
        if self.capacity is None:
            return routing
        weights = F.drop_late_tokens(*routing, num_experts=logits.shape[-1], capacity=self.capacity)
        return routing._replace(weights=weights)


@dataclass(frozen=True, kw_only=True)
class SparseMixer(Checked):
    """Chooses one expert after another and weighs each among its rivals (Phi-3.5 MoE).

    Attributes:
        jitter: Half the relative distance to the best logit up to which an expert is a rival.
    """

    jitter: Positive = 0.01

    # What it has of the fields of `Router`.
    score = "softmax"  # of the load-balancing loss
    bias = selection_bias = renormalise = expert_scale = False
    groups = norm = capacity = logit_softcap = None
    scale = 1.0
    weighs_inputs = False

    def route(self, logits: Array, *, top_k: int, selection_bias: Array | None) -> F.Routing:
        """`F.sparse_mixer`."""
        return F.sparse_mixer(logits, top_k=top_k, jitter=self.jitter)


@dataclass(frozen=True, kw_only=True)
class InputRouter:
    """Weighs what the experts read instead of what they answer, by sigmoids (Llama 4).

    y = sum over the top_k experts e of expert_e(sigmoid(logit[e]) * x)
    """

    # What it has of the fields of `Router`.
    score = "sigmoid"
    bias = selection_bias = renormalise = expert_scale = False
    groups = norm = capacity = logit_softcap = None
    scale = 1.0
    weighs_inputs = True

    def route(self, logits: Array, *, top_k: int, selection_bias: Array | None) -> F.Routing:
        """`F.route` by sigmoids, which are not renormalised."""
        return F.route(logits, top_k=top_k, score="sigmoid", renormalise=False)


@dataclass(frozen=True, kw_only=True)
class SharedExpert(Checked):
    """An expert that every token meets beside the chosen ones.

    Attributes:
        expert: Its network.
        gated: Whether its output is multiplied by the sigmoid of a projection to one feature.
        combination: "sum" adds its output to the output of the chosen experts, "average" takes the
            mean of the two (Command A+).
    """

    expert: MLP | GLU | ClampedGEGLU
    gated: bool = False
    combination: Literal["sum", "average"] = "sum"


@dataclass(frozen=True, kw_only=True)
class ExpertLatent(Checked):
    """Projections around the experts, which read and write a latent narrower than the model.

        y = up(sum of weights * expert(down(x)))

    The router and a shared expert read x.

    Attributes:
        latent_dim: Width of the latent.
        bias: Whether both projections have biases.

    References:
        NVIDIA, NVIDIA Nemotron 3: Efficient and Open Intelligence, 2025. arXiv:2512.20856
        (LatentMoE)
    """

    latent_dim: Size
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoE(FeedForward):
    """Mixture of experts (MoE): a router sends each token to top_k experts and sums their outputs.

    With a `norm`, the router reads the stream x, and each part has norms of its own (Gemma 4):

        y = post_experts(experts(pre_experts(x))) + post_shared(shared(pre_shared(x)))

    Attributes:
        expert: The network of each expert.
        num_experts: Number of experts.
        top_k: Experts per token; they have the largest scores.
        router: How experts are chosen and weighed: `Router`, `SparseMixer` or `InputRouter`.
        shared: An expert that every token meets; None has none.
        latent: Latent that the experts read and write; None is the model width.
        norm: Norm before and after the chosen experts and before and after the shared one. The
            layer's norm before the feed-forward network is then left out, not one after it.
        output_norm: Norm of the sum of the chosen experts and the shared one (A.X K1).
    """

    expert: MLP | GLU | ClampedGEGLU
    num_experts: Size
    top_k: Size = 2
    router: Router | SparseMixer | InputRouter = Router()
    shared: SharedExpert | None = None
    latent: ExpertLatent | None = None
    norm: Norm | None = None
    output_norm: Norm | None = None

    def __post_init__(self):
        super().__post_init__()
        require(
            self.top_k <= self.num_experts,
            "MoE.top_k must be at most num_experts; "
            f"got top_k={self.top_k}, num_experts={self.num_experts}.",
        )
        require(
            self.expert.sub_norm is None,
            f"Experts cannot have a sub_norm; got {self.expert.sub_norm}.",
        )
        if (groups := self.router.groups) is not None:
            require(
                self.num_experts % groups.num_groups == 0,
                "MoE.num_experts must be a multiple of num_groups; "
                f"got num_experts={self.num_experts}, num_groups={groups.num_groups}.",
            )
            size = self.num_experts // groups.num_groups
            require(
                self.top_k <= groups.top_k * size,
                f"MoE.top_k must be at most the {groups.top_k * size} experts of the "
                f"{groups.top_k} groups that are kept; got top_k={self.top_k}.",
            )
            require(
                groups.score == "max" or size >= 2,
                f"ExpertGroups.score='top_2' needs groups of two experts or more; got {size}.",
            )

    is_moe = True

    @property
    def has_norms(self) -> bool:
        """Whether `norm` is given."""
        return self.norm is not None

    def expert_model_dim(self, model_dim: int) -> int:
        """Width of the vectors that the experts read and write."""
        return model_dim if self.latent is None else self.latent.latent_dim

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the router, the top_k experts and the shared one for `length` tokens."""
        flops = 2 * length * model_dim * self.num_experts + self.expert_flops(model_dim, length)
        if self.latent is not None:
            flops += 4 * length * model_dim * self.latent.latent_dim
        if self.shared is not None:
            flops += self.shared.expert.flops(model_dim, length)
            flops += 2 * length * model_dim * self.shared.gated
        return flops

    def expert_flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the top_k experts for `length` tokens."""
        return self.top_k * self.expert.flops(self.expert_model_dim(model_dim), length)

    def hidden_width(self, model_dim: int) -> int:
        """Outputs per token of the projections of a token's experts from the model width."""
        shared = 0 if self.shared is None else self.shared.expert.hidden_width(model_dim)
        latent = 0 if self.latent is None else self.latent.latent_dim
        return self.top_k * self.expert.hidden_width(model_dim) + shared + latent

    def routed_width(self, model_dim: int) -> int:
        """Outputs per token of the experts that it chose."""
        return self.top_k * self.expert_model_dim(model_dim)

    def tiny(self) -> "MoE":
        """Return the option at test size."""
        num_experts = min(self.num_experts, TINY_NUM_EXPERTS)
        top_k = min(self.top_k, TINY_NUM_EXPERTS - 1, self.num_experts)
        if self.router.groups is not None:
            num_experts = 2 * TINY_NUM_EXPERTS
        return shrink(self, num_experts=num_experts, top_k=top_k)


@dataclass(frozen=True, kw_only=True)
class NoFeedForward(FeedForward):
    """A layer without a feed-forward network: x + attention(norm(x))."""

    is_branch = False
    has_hidden_dropout = True

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """No parameters."""
        return {}

    def flops(self, model_dim: int, length: int) -> int:
        """0."""
        return 0
