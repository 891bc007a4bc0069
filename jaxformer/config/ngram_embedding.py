"""`NgramEmbedding`: embeddings of hashed n-grams, which a layer adds to the stream (Engram)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from jaxformer.checks import Checked, Count, Must, Size, require
from jaxformer.config.attention.checks import ConvolutionWidth
from jaxformer.config.attention.layer_sizes import CacheShape, ConvolutionCache
from jaxformer.functional.ngrams import MAX_NGRAM_ROWS

Multiplier = Annotated[int, Must("be from 1 to 2**63 - 1", lambda number: 0 < number < 2**63)]
HeadRows = Annotated[
    Size, Must(f"be at most {MAX_NGRAM_ROWS}", lambda rows: rows <= MAX_NGRAM_ROWS)
]
MASK64 = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class NgramEmbedding(Checked):
    """Hashed n-grams of the last tokens, looked up and added before a layer's attention (Engram).

        e = the rows of all heads in the layer's table, joined          (`F.ngram_ids`)
        u[i] = sigmoid(root(norm(x[i]) . norm(K[i] e) / sqrt(model_dim))) * V e
        x[i] = x[i] + u[i] + silu(conv(norm(u[i])))

    for each stream i of the residual option, or the one stream. The table, V and the convolution's
    taps are the layer's; taps are as far apart as the longest n-gram is long, and begin at zero.
    The norms have the model's type, with a scale for each stream.

    Multipliers and rows are given, since released models have them in their files; `draw` makes
    them. Engram first maps token ids that spell alike to one id, which is left to the tokenizer.

    Attributes:
        dim: Features of all heads' rows together.
        multipliers: Factors of a token and of those before it, one for each token of the longest
            n-gram.
        vocab_sizes: Rows of each head, distinct primes; first the heads of 2-grams, then as many of
            3-grams, and so on.
        start_token: Id that ends documents, such as eos; it stands for tokens before the text.
        width: Taps of the convolution.
        row_multiple: The table has a multiple of so many rows; the last ones are unused.

    References:
        Cheng et al., Conditional Memory via Scalable Lookup: A New Axis of Sparsity for Large
        Language Models, 2026. arXiv:2601.07372, section 2
        Qwen, Qwen 4 (experimental), 2026 (released code)
    """

    dim: Size
    multipliers: tuple[Multiplier, ...]
    vocab_sizes: tuple[HeadRows, ...]
    start_token: Count
    width: ConvolutionWidth = 4
    row_multiple: Size = 128

    def __post_init__(self):
        super().__post_init__()
        heads, size = len(self.vocab_sizes), len(self.multipliers)
        require(size >= 2, f"multipliers must have at least 2 entries; got {size}.")
        require(
            heads > 0 and heads % (size - 1) == 0,
            f"vocab_sizes needs equally many heads for each of {size - 1} lengths of n-grams; got "
            f"{heads}.",
        )
        require(
            self.dim % heads == 0,
            f"dim must be a multiple of the number of heads, {heads}; got {self.dim}.",
        )

    @staticmethod
    def draw(
        count: int,
        *,
        vocab_size: int,
        rows: int = 20_000_000,
        size: int = 3,
        heads: int = 8,
        seed: int = 1234,
        **options: Any,
    ) -> tuple[NgramEmbedding, ...]:
        """Draw the multipliers of several layers, and take the next primes as rows, as Qwen 4 does.

        Args:
            count: Layers that have n-grams.
            vocab_size: Token ids of the model.
            rows: Least rows of a head; no two heads of these layers have as many.
            size: Tokens of the longest n-gram.
            heads: Heads of each length of n-grams.
            seed: Seed of the multipliers.
            **options: The other fields.

        Returns:
            An option for each layer.

        Example:
            >>> from jaxformer.config import NgramEmbedding
            >>> first, _ = NgramEmbedding.draw(2, vocab_size=96, rows=20, heads=2, dim=8,
            ...                                start_token=0)
            >>> first.vocab_sizes
            (23, 29, 31, 37)
        """
        primes, per_layer = filter(_is_prime, itertools.count(rows)), (size - 1) * heads
        bound = max(1, (2**63 - 1) // vocab_size // 2)

        def multiplier(layer: int, place: int) -> int:
            state = seed + 10007 * layer + 0x9E3779B97F4A7C15 * (place + 1)
            return 2 * (_splitmix64(state) % bound) + 1

        return tuple(
            NgramEmbedding(
                multipliers=tuple(multiplier(layer, place) for place in range(size)),
                vocab_sizes=tuple(itertools.islice(primes, per_layer)),
                **options,
            )
            for layer in range(count)
        )

    @property
    def size(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def head_dim(self) -> int:
        """Features of a row."""
        return self.dim // len(self.vocab_sizes)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return math.ceil(sum(self.vocab_sizes) / self.row_multiple) * self.row_multiple

    @property
    def num_unread(self) -> int:
        """Numbers of the table that a token does not read."""
        return self.num_rows * self.head_dim - self.dim

    def tiny(self) -> NgramEmbedding:
        """Return the option at test size: as many heads, with few rows."""
        heads = len(self.vocab_sizes)
        primes = filter(_is_prime, itertools.count(23))
        return replace(
            self,
            dim=2 * heads,
            vocab_sizes=tuple(itertools.islice(primes, heads)),
            start_token=min(self.start_token, 1),
            row_multiple=8,
        )

    def flops(self, width: int, model_dim: int, length: int) -> int:
        """FLOPs of one layer over a sequence; `width` is of all streams."""
        return 2 * length * (self.dim * (width + model_dim) + self.width * width)

    def activation_width(self, width: int, model_dim: int, remat: str) -> int:
        """Numbers per token that one layer saves for the backward pass; of all streams `width`."""
        match remat:
            case "full":
                return 0
            case "dots":
                return width + model_dim
        return self.dim + 7 * width + model_dim

    def empty_cache(self, width: int, shape: CacheShape) -> ConvolutionCache:
        """Return the empty cache of one layer's convolution; `width` is of all streams."""
        inputs = shape._replace(num_slots=(self.width - 1) * self.size)
        return ConvolutionCache(inputs.zeros(1, width))


def _is_prime(number: int) -> bool:
    return number > 1 and not (number % np.arange(2, math.isqrt(number) + 1) == 0).any()


def _splitmix64(state: int) -> int:
    """One number of the generator of Steele et al., Fast Splittable Pseudorandom Generators."""
    state = (state + 0x9E3779B97F4A7C15) & MASK64
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & MASK64
    return state ^ state >> 31
