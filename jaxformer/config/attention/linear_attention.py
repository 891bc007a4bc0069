"""`LinearAttention`: a decaying state of keys and values, with or without the delta rule."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from jaxformer.checks import Checked, Distinct, Positive, Size, require
from jaxformer.config.attention.checks import ConvolutionWidth, indivisibility
from jaxformer.config.attention.defaults import RecurrentDefaults
from jaxformer.config.attention.layer_sizes import (
    ActivationWidths,
    CacheShape,
    ConvolutionCache,
    LinearAttentionCache,
)
from jaxformer.config.norms import Norm, RMSNorm
from jaxformer.config.tiny import shrink, tiny_num_heads
from jaxformer.functional.linear_attention import LINEAR_ATTENTION_CHUNK


@dataclass(frozen=True, kw_only=True)
class StepDecay(Checked):
    """Decay by a step whose size depends on the token: the longer it is, the more is forgotten.

        step = clip(softplus(W x + bias), min_step, max_step);    decay = exp(-exp(rate) * step)

    Attributes:
        over: One step per head, or per feature of its keys. There is one rate per head.
        rank: Width between two projections that replace W; None keeps W.
        min_step: Smallest step.
        max_step: Largest step; None is no limit.

    References:
        Dao and Gu, Transformers are SSMs, 2024. arXiv:2405.21060 (Mamba 2)
        Kimi Team, Kimi Linear, 2025. arXiv:2510.26692 (per feature)
    """

    over: Literal["head", "feature"] = "head"
    rank: Size | None = None
    min_step: float = 0.0
    max_step: float | None = None

    def __post_init__(self):
        super().__post_init__()
        limit = float("inf") if self.max_step is None else self.max_step
        require(
            0 <= self.min_step < limit,
            "StepDecay needs 0 <= min_step < max_step; got min_step="
            f"{self.min_step}, max_step={self.max_step}.",
        )


@dataclass(frozen=True, kw_only=True)
class SlopeDecay(Checked):
    """Decay by a constant of each head, without parameters: the last of N heads forgets least.

        decay of head n = exp(-scale * 2 ** (-8 n / N));    n = 1 ... N

    Attributes:
        scale: Factor of all slopes. In MiniMax it falls from layer to layer, to nearly 0.

    References:
        Qin et al., Lightning Attention-2, 2024. arXiv:2401.04658
        MiniMax, MiniMax-01: Scaling Foundation Models with Lightning Attention, 2025.
        arXiv:2501.08313
    """

    scale: Positive = 1.0

    def slopes(self, num_heads: int) -> tuple[float, ...]:
        """Minus the logarithm of the decay of each head."""
        return tuple(self.scale * 2 ** (-8 * n / num_heads) for n in range(1, num_heads + 1))


@dataclass(frozen=True, kw_only=True)
class GatedNorm(Checked):
    """Norm of the output, and a gate: an activation of a projection of the token.

        placement "after_norm"    norm(y) * activation(W x)
        placement "before_norm"   norm(y * activation(W x))

    Attributes:
        norm: The norm; None is none.
        over: Features that are normalised together: one head, with one scale for all heads; all
            heads that share a key head, each with a scale of its own; or all heads.
        activation: Of the projection; None is no gate.
        placement: Of the gate, before or after the norm.
        rank: Width between two projections in place of W; None is one projection.

    References:
        Dao and Gu, Transformers are SSMs, 2024. arXiv:2405.21060 (before the norm)
        Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024. arXiv:2412.06464
    """

    norm: Norm | None = RMSNorm()
    over: Literal["head", "group", "all"] = "head"
    activation: Literal["silu", "sigmoid"] | None = "silu"
    placement: Literal["after_norm", "before_norm"] = "after_norm"
    rank: Size | None = None


@dataclass(frozen=True, kw_only=True)
class LinearAttention(RecurrentDefaults):
    """Attention without a softmax: tokens write keys and values into a state that decays.

        q, k, v = silu(convolution(W x))
        S[t] = decay[t] S[t-1] + beta[t] k[t] (v[t] - r[t])^T;    y[t] = scale * S[t]^T q[t]
        out = W_out gated_norm(y + skip * v)

    where r is what the decayed state holds for the key under the delta rule, else 0 (see
    `functional.linear_attention`). The cache is S, in float32, and the last inputs of the
    convolutions. Documents do not affect others. The defaults are gated DeltaNet. Mamba 2 has
    `delta_rule=False`, `beta="step"`, `scale=1.0`, `skip=True`, no unit vectors, and a gate before
    the norm of groups: its C, B and x are queries, keys and values. Kimi's delta attention has
    `StepDecay(over="feature")`. Lightning attention has `SlopeDecay()`, `delta_rule=False`,
    `beta="one"`, `scale=1.0`, no unit vectors and no convolution.

    Attributes:
        num_heads: Heads of the values.
        num_key_heads: Heads of queries and keys; each serves num_heads / num_key_heads.
        key_dim: Width of a head of queries and keys.
        value_dim: Width of a head of values.
        decay: How the state decays; None is not at all.
        delta_rule: Whether a token replaces what the state holds for its key.
        beta: Weight of a token: 1, max_beta * sigmoid of a projection, or the step of the decay.
        max_beta: Largest weight of a sigmoid; above 1 the delta rule also changes signs.
        unit_vectors: Whether queries and keys have length 1.
        scale: Factor of the queries; None is key_dim ** -0.5.
        skip: Whether values times a number per head are added to the output.
        convolution_width: Tokens of the convolutions of queries, keys and values; None is none.
        output: Norm and gate of the output.
        biases: Layers with a bias; "in" are all projections of the token except low-rank ones.

    References:
        Yang, Kautz and Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024.
        arXiv:2412.06464
        Dao and Gu, Transformers are SSMs, 2024. arXiv:2405.21060 (Mamba 2)
        Kimi Team, Kimi Linear, 2025. arXiv:2510.26692
        Qin et al., Lightning Attention-2, 2024. arXiv:2401.04658
    """

    num_heads: Size
    num_key_heads: Size
    key_dim: Size
    value_dim: Size
    decay: StepDecay | SlopeDecay | None = StepDecay()
    delta_rule: bool = True
    beta: Literal["one", "sigmoid", "step"] = "sigmoid"
    max_beta: Positive = 1.0
    unit_vectors: bool = True
    scale: Positive | None = None
    skip: bool = False
    convolution_width: ConvolutionWidth | None = 4
    output: GatedNorm = GatedNorm()
    biases: Distinct[Literal["in", "convolution", "out"]] = ()

    has_decays = True

    def __post_init__(self):
        super().__post_init__()
        require(
            self.num_heads % self.num_key_heads == 0,
            "LinearAttention.num_heads must be a multiple of num_key_heads; got num_heads="
            f"{self.num_heads}, num_key_heads={self.num_key_heads}.",
        )
        has_steps = self.steps is not None and self.steps.over == "head"
        require(
            self.beta != "step" or has_steps,
            'LinearAttention.beta="step" needs a decay with one step per head; got decay='
            f"{self.decay}.",
        )

    @property
    def steps(self) -> StepDecay | None:
        """The decay if it depends on the token."""
        return self.decay if isinstance(self.decay, StepDecay) else None

    @property
    def slopes(self) -> tuple[float, ...] | None:
        """Minus the logarithm of the decay of each head if it is a constant."""
        return self.decay.slopes(self.num_heads) if isinstance(self.decay, SlopeDecay) else None

    @property
    def heads_width(self) -> int:
        """Total width of the values, the input of the output projection."""
        return self.num_heads * self.value_dim

    @property
    def keys_width(self) -> int:
        """Total width of the keys, or of the queries."""
        return self.num_key_heads * self.key_dim

    def indivisible_heads(self, tensor: int) -> str | None:
        """Why the key heads cannot be sharded over `tensor`; None if they can."""
        count = self.num_key_heads
        is_joint = count > 1 and self.output.norm is not None and self.output.over == "group"
        joint_norm = "a norm of each group" if is_joint else None
        return indivisibility("num_key_heads", count, tensor, joint_norm)

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer, including its projections."""
        chunk, rule = min(LINEAR_ATTENTION_CHUNK, length), int(self.delta_rule)
        inputs = 2 * self.keys_width + self.heads_width
        has_gate = self.output.activation is not None
        kernels = model_dim * (inputs + self.heads_width)
        kernels += self._projection(model_dim, has_gate, self.output.rank, self.heads_width)
        if (steps := self.steps) is not None:
            per_head = self.key_dim if steps.over == "feature" else 1
            kernels += self._projection(model_dim, True, steps.rank, self.num_heads * per_head)
        kernels += self._projection(model_dim, self.beta == "sigmoid", None, self.num_heads)
        within_chunk = chunk * ((1 + 2 * rule) * self.key_dim + (1 + rule) * self.value_dim)
        within_chunk += rule * 2 * chunk**2 // 3  # the inverse of a triangular matrix
        with_state = (2 + rule) * self.key_dim * self.value_dim
        convolution = (self.convolution_width or 0) * inputs
        per_token = kernels + convolution + self.num_heads * (within_chunk + with_state)
        return 2 * length * per_token

    @staticmethod
    def _projection(model_dim: int, exists: bool, rank: int | None, width: int) -> int:
        """Numbers of a projection's kernels."""
        if not exists:
            return 0
        return model_dim * width if rank is None else rank * (model_dim + width)

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        values = self.heads_width / tensor
        keys = self.keys_width / min(tensor, self.num_key_heads)
        has_gate = self.output.activation is not None
        repeated = self.num_heads * self.key_dim / tensor
        return ActivationWidths(
            2 * keys + (2 if has_gate else 1) * values, 2 * repeated + 2 * values, values, 0
        )

    def empty_layer_cache(self, shape: CacheShape) -> LinearAttentionCache:
        """Return the empty state of one layer, float32, and the inputs of its convolutions."""
        state = shape._replace(num_slots=self.key_dim, dtype=jnp.float32)
        inputs: tuple[ConvolutionCache, ...] = ()
        if self.convolution_width is not None:
            taps = shape._replace(num_slots=self.convolution_width - 1)
            keys = taps.zeros(self.num_key_heads, self.key_dim)
            values = taps.zeros(self.num_heads, self.value_dim)
            inputs = tuple(map(ConvolutionCache, (keys, keys, values)))
        return LinearAttentionCache(state.zeros(self.num_heads, self.value_dim), inputs)

    def tiny(self) -> "LinearAttention":
        """Return the option at test size."""
        heads = tiny_num_heads(self.num_heads)
        shares = {1: heads, self.num_heads: 1}
        key_heads = shares.get(self.num_heads // self.num_key_heads, heads // 2)
        return shrink(self, num_key_heads=key_heads)
