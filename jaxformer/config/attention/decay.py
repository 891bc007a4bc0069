"""Decay attention options: a linear recurrence with a state of constant size."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxformer.checks import AboveOne, Checked, Size, require
from jaxformer.config.attention.defaults import RecurrentDefaults
from jaxformer.config.attention.layer_sizes import ActivationWidths, CacheShape, StateCache
from jaxformer.functional.recurrence import RECURRENCE_CHUNK


@dataclass(frozen=True, kw_only=True)
class Angles(Checked):
    """Rotation of the state per token: one angle per feature pair, as RoPE frequencies.

    Attributes:
        base: Ratio of the longest to the shortest wavelength, approximately.
        learned: Whether each head learns its angles, starting from these, as the linear recurrent
            unit does (Orvieto et al., 2023. arXiv:2303.06349, section 3.3).
    """

    base: AboveOne = 10_000.0
    learned: bool = False


@dataclass(frozen=True, kw_only=True)
class Decay(RecurrentDefaults):
    """Attention whose weights gamma ** (i - j) depend on distance only; no queries or keys.

        o[i] = gain * sum over j <= i of gamma ** (i - j) * R[j - i] v[j]

    with a learned gamma for each head and values v projected from the residual stream. It is a
    linear recurrence (see `functional.linear_recurrence`): the cache is one state of the size of a
    token's values. Distances count tokens of a document; there are no other positions and no
    windows. The gain keeps outputs bounded (see `functional.decay_rates`).

    Attributes:
        num_heads: Heads; each has its own gamma.
        head_dim: Width of a head.
        min_memory: Initial memory 1 / (1 - gamma) of the first head, in tokens.
        max_memory: Initial memory of the last head; the heads between are spaced evenly on a
            logarithmic scale. Eight heads from 32 to 4,096 are RetNet's gamma = 1 - 2 ** (-5 - n).
        angles: Rotation of the state per token; None is a real decay without rotation.

    References:
        Su, Transformer upgrade path 19: rotary positions of the second kind, 2025.
        https://spaces.ac.cn/archives/10862
        Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, 2023.
        arXiv:2307.08621, section 2.1
    """

    num_heads: Size
    head_dim: Size
    min_memory: float = 32.0
    max_memory: float = 4096.0
    angles: Angles | None = Angles()

    def __post_init__(self):
        super().__post_init__()
        require(
            1 < self.min_memory <= self.max_memory,
            "Decay needs 1 < min_memory <= max_memory; got min_memory="
            f"{self.min_memory}, max_memory={self.max_memory}.",
        )
        require(
            self.angles is None or self.head_dim % 2 == 0,
            f"Angles rotate pairs of features, so head_dim must be even; got {self.head_dim}.",
        )

    biases = ()
    has_weights = True
    has_decays = True
    linear_projections = None, None, "value"

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer, including its projections."""
        numbers_per_value = 2 * model_dim + min(RECURRENCE_CHUNK, length)
        return 2 * length * numbers_per_value * self.heads_width

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        heads = self.heads_width / tensor
        return ActivationWidths(heads, 4 * heads, heads, heads)

    def empty_layer_cache(self, shape: CacheShape) -> StateCache:
        """Return the empty state of one layer, float32."""
        shape = shape._replace(num_slots=1, dtype=jnp.float32)
        return StateCache(shape.zeros(self.num_heads, self.head_dim))
