"""Residual options that read earlier layers: the embedding, skips, averages and attention."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer import functional as F
from jaxformer.checks import Size
from jaxformer.config.parameter import Parameter
from jaxformer.config.registry import unimplemented_method
from jaxformer.config.residual.protocol import Params, Place, Residual


@dataclass(frozen=True, kw_only=True)
class EmbeddingSkip(Residual):
    """Each layer runs on a sum of the stream and the embedding x0, with the plain sum inside.

        x = layer(stream_weight * x + embedding_weight * x0)

    At first the weights are one and zero.

    References:
        Jordan et al., modded-nanogpt, 2024 (released code); Karpathy, nanochat, 2025 (released
        code)
    """

    per = "layer"

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """The two weights."""
        starts = {"stream_weight": 1.0, "embedding_weight": 0.0}
        return {name: Parameter((1,), "features", start) for name, start in starts.items()}

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, None]:
        """Return the sum of stream and embedding."""
        stream, embedding = (params[f"{name}_weight"][0] for name in ("stream", "embedding"))
        return stream * state + embedding * place.embedding, None

    def write(self, state: Array, held: None, y: Array, params: Params, place: Place) -> Array:
        """Return the layer's output."""
        return y


class History(Residual, protocol=True):
    """What layers hand on to later ones, in a buffer whose shape the number of layers says."""

    num_layers: Size

    def resized(self, num_layers: int) -> Any:
        """Return the option for another number of layers."""
        return replace(self, num_layers=num_layers)

    def saved_width(self, model_dim: int) -> int:
        """Nothing: a layer's input is the stream."""
        return 0

    def shared_width(self, model_dim: int) -> int:
        """The buffer and its gradient."""
        return 2 * (self.state_width(model_dim) - model_dim)


class Sent(History, protocol=True):
    """Layers send weighted outputs to later layers; a buffer has the sums of what was sent.

    `weights(params, place)` are those of a layer's output in what each layer hands on. The sums are
    linear in the outputs, so the backward pass needs no buffer of any layer: memory has it once,
    also under `remat` and in a loop over layers.
    """

    per = "layer"
    weights = unimplemented_method("weights", "the model")

    def begin(self, x: Array, params: Params) -> tuple[Array, Array]:
        """Return the embedding, and sums of what it sends, ``[*batch, T, layers, D]``."""
        return x, _outer(jnp.zeros(self.num_layers), x)

    def read(self, state: Any, params: Params, place: Place) -> tuple[Array, Array]:
        """Return the stream; hold the sums."""
        return state

    def write(self, state: Any, held: Array, y: Array, params: Params, place: Place) -> Any:
        """Return the output and what was sent here, and the sums with what the output sends."""
        sums = held + _outer(self.weights(params, place), y)
        return y + jax.lax.dynamic_index_in_dim(sums, place.layer, -2, keepdims=False), sums

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the products of the output with the weights."""
        return 2 * length * model_dim * self.num_layers

    def end(self, state: Any, params: Params) -> Array:
        """Return the stream."""
        return state[0]


def _outer(weights: Array, y: Array) -> Array:
    """The vectors, times each weight."""
    return jnp.einsum("i,...d->...id", weights.astype(y.dtype), y)


@dataclass(frozen=True, kw_only=True)
class DepthWeightedAverage(Sent):
    """The stream after each layer is a weighted sum of all outputs and the embedding (DenseFormer).

        x = X[i] + sum over j <= i of weights[j, i] X[j],  X[0] the embedding, X[i] = layer_i(x)

    At first the weights are zero, which leaves the layer's own output. The weights of output j are
    parameters of layer j, of the embedding in the stack; weights for earlier layers are unused.

    Attributes:
        num_layers: Layers of the model.

    References:
        Pagliardini et al., DenseFormer: Enhancing Information Flow in Transformers via Depth
        Weighted Averaging, 2024. arXiv:2402.02622, section 3
    """

    num_layers: Size

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Weights of the layer's output after each layer."""
        return {"weights": Parameter((self.num_layers,), "features", 0.0)}

    model_parameters = parameters

    def begin(self, x: Array, params: Params) -> tuple[Array, Array]:
        """Return the embedding, and what it is in the stream after each layer."""
        return x, _outer(params["weights"], x)

    def weights(self, params: Params, place: Place) -> Array:
        """Those of this layer and later ones."""
        return jnp.where(jnp.arange(self.num_layers) >= place.layer, params["weights"], 0)


@dataclass(frozen=True, kw_only=True)
class UNetSkips(Sent):
    """Layers of the first half send their output to the layers of the second half, last to first.

        x = layer_i(x + weight[j] X[j]),  j = num_layers - 1 - i,  for i in the second half

    Weights are one at first. They are parameters of the layers that send; layers of the second half
    do not use theirs.

    Attributes:
        num_layers: Layers of the model; with an odd number the middle one sends and reads nothing.

    References:
        Ronneberger, Fischer and Brox, U-Net: Convolutional Networks for Biomedical Image
        Segmentation, 2015. arXiv:1505.04597; in decoders: Jordan et al., modded-nanogpt, 2024
        (released code)
    """

    num_layers: Size

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """The weight of the output."""
        return {"weight": Parameter((1,), "features", 1.0)}

    def weights(self, params: Params, place: Place) -> Array:
        """That of the layer before the one that reads, whose output it then is part of."""
        reader = self.num_layers - 1 - place.layer
        is_sent = (jnp.arange(self.num_layers) == reader - 1) & (place.layer < reader)
        return jnp.where(is_sent, params["weight"][0], 0)


@dataclass(frozen=True, kw_only=True)
class AttentionResiduals(History):
    """Each branch reads by attention over depth: over sums of blocks of layers (Inkling 2).

        K = rms_norm of [S[0], S[1], ..., p]
        x = sum over i of softmax(query . K / sqrt(D))[i] K[i]

    Within a block of layers the branches are added to p. The first attention of a block ends the
    sum before it, which becomes the next S, and begins a new p; S[0] is the embedding. The first
    branch of all reads the embedding as it is, and a last query reads what the final norm gets.
    Queries, weights and sums over depth are in float32. At first queries are zero: the mean.

    Attributes:
        num_layers: Layers of the model.
        block_layers: Layers of a block.
        norm_eps: Epsilon of the norm.

    References:
        Kimi Team, Attention Residuals, 2026. arXiv:2603.15031 (which sums S, and not K);
        Thinking Machines, Inkling 2, 2026 (released code)
    """

    in_float32 = True

    num_layers: Size
    block_layers: Size = 6
    norm_eps: float = 1e-6

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """The query."""
        return {"query": Parameter((model_dim,), "model", 0.0)}

    model_parameters = parameters

    def begin(self, x: Array, params: Params) -> tuple[Array, Array, Array]:
        """Return the embedding as the sum, and no blocks, ``[*batch, T, blocks, D]``."""
        blocks = -(-self.num_layers // self.block_layers)
        zeros = jnp.zeros((*x.shape[:-1], blocks, x.shape[-1]), x.dtype)
        return x, zeros, zeros  # the last for the backward pass

    def read(self, state: Any, params: Params, place: Place) -> tuple[Array, Array]:
        """Return the mean over depth by attention."""
        query, offset = params["query"], self.block_layers - int(self._is_first(place))
        count = jnp.int32((place.layer + offset) // self.block_layers)
        total, blocks, later = state
        x, later = F.attend_to_history(total, blocks, later, query, count, eps=self.norm_eps)
        is_plain = jnp.asarray(self._is_first(place) & (place.layer == 0), x.dtype)
        return is_plain * total + (1 - is_plain) * x, later

    def write(self, state: Any, held: Array, y: Array, params: Params, place: Place) -> Any:
        """Add the branch to the sum, or end the sum as a block and begin one with the branch."""
        total, blocks, _ = state
        is_start = self._is_first(place) & (place.layer % self.block_layers == 0)
        is_slot = jnp.arange(blocks.shape[-2]) == place.layer // self.block_layers
        begins, ends = (jnp.asarray(x, y.dtype) for x in (is_start, is_start & is_slot))
        return y + (1 - begins) * total, blocks + _outer(ends, total), held

    def end(self, state: Any, params: Params) -> Array:
        """Return the mean over all blocks by attention."""
        (total, blocks, later), query = state, params["query"]
        history, count = F.history_at_end(blocks, later), blocks.shape[-2]
        return F.attend_to_depth(total, history, query, num_blocks=count, eps=self.norm_eps)

    def _is_first(self, place: Place) -> bool:
        """Whether the branch is the first of its layer."""
        return place.branch in ("attention", "branches") or not place.attention.parts

    def saved_width(self, model_dim: int) -> int:
        """What both branches read."""
        return 2 * model_dim

    def shared_width(self, model_dim: int) -> int:
        """The blocks and their gradient, twice, and three copies while a branch reads."""
        return 7 * (self.state_width(model_dim) - model_dim) // 2

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of scores and weighted sums over all blocks."""
        return 4 * length * model_dim * (1 - (-self.num_layers // self.block_layers))
