"""Activation functions, gated linear units, and the registry of activations by name.

A gated activation takes two projections of the same input. The nonlinearity applies to ``gate``:
`gate_proj` of a Hugging Face checkpoint, ``xW`` of the GLU paper. ``value`` is `up_proj`, ``xV``.
`jax.nn.glu` and `torch.nn.functional.glu` take both in one array and activate its second half.
"""

from collections.abc import Callable
from functools import partial, wraps
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.checks import named_errors, require, require_like
from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.norms import feature_mean

Activation = Callable[[Array], Array]


@typechecked
def relu(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Rectified linear unit, max(x, 0), with slope 0 at 0.

    Args:
        x: Any float dtype.

    Returns:
        The activations, in the dtype of `x`.
    """
    return jax.nn.relu(x)


@typechecked
def relu_squared(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Squared rectified linear unit, max(x, 0) ** 2.

    Args:
        x: Any float dtype.

    Returns:
        The activations, in the dtype of `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> F.relu_squared(jnp.array([-2.0, 0.0, 3.0]))
        Array([0., 0., 9.], dtype=float32)

    References:
        So et al., Primer: Searching for Efficient Transformers for Language Modeling, 2021.
        arXiv:2109.08668, section 3
    """
    return jnp.square(jax.nn.relu(x))


@typechecked
def sigmoid(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Logistic function, 1 / (1 + exp(-x)).

    Args:
        x: Any float dtype.

    Returns:
        The values, between 0 and 1, in the dtype of `x`.
    """
    return jax.nn.sigmoid(x)


@typechecked
def silu(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Sigmoid linear unit, x * sigmoid(x), also called swish.

    Smooth everywhere, with slope 1/2 at 0.

    Args:
        x: Any float dtype.

    Returns:
        The activations, in the dtype of `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> np.asarray(F.silu(jnp.array([-1.0, 0.0, 1.0, 10.0]))).round(3)
        array([-0.269,  0.   ,  0.731, 10.   ], dtype=float32)

    References:
        Ramachandran, Zoph and Le, Searching for Activation Functions, 2017. arXiv:1710.05941
    """
    return jax.nn.silu(x)


@typechecked
def gelu(x: Float[Array, "*batch"], *, approximate: bool = False) -> Float[Array, "*batch"]:
    """Gaussian error linear unit, x times the standard normal distribution function of x.

        y = x * (1 + erf(x / sqrt(2))) / 2                                        (exact)
        y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2            (approximate)

    Args:
        x: Any float dtype.
        approximate: False is the exact form, the default of PyTorch; True is the tanh form, the
            default of `jax.nn.gelu` and up to 5e-4 away (GPT-2, BLOOM, T5 v1.1, Gemma).

    Returns:
        The activations, computed in float32 (the cube overflows float16 at 41, and its gradient
        with it), in the dtype of `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> x = jnp.array([-1.0, 1.0, 2.0])
        >>> np.asarray(F.gelu(x)).round(4)
        array([-0.1587,  0.8413,  1.9545], dtype=float32)
        >>> np.asarray(F.gelu(x, approximate=True)).round(4)
        array([-0.1588,  0.8412,  1.9546], dtype=float32)

    References:
        Hendrycks and Gimpel, Gaussian Error Linear Units (GELUs), 2016. arXiv:1606.08415, section 2
    """
    return jax.nn.gelu(x.astype(jnp.float32), approximate=approximate).astype(x.dtype)


@typechecked
def quick_gelu(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Sigmoid approximation of `gelu`, x * sigmoid(1.702 * x), up to 0.02 away from it.

    Args:
        x: Any float dtype.

    Returns:
        The activations, in the dtype of `x`.

    References:
        Hendrycks and Gimpel, Gaussian Error Linear Units (GELUs), 2016. arXiv:1606.08415, section 2
    """
    return x * jax.nn.sigmoid(1.702 * x)


@typechecked
def glu(gate: Float[Array, "*batch"], value: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Gated linear unit, sigmoid(gate) * value.

    Args:
        gate: Input of the sigmoid, in any float dtype.
        value: The other factor.

    Returns:
        The products, in the dtype of the inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> gate, value = jnp.array([-100.0, 0.0, 100.0]), jnp.array([6.0, 6.0, 6.0])
        >>> F.glu(gate, value)  # gates of 0, 1/2 and 1
        Array([0., 3., 6.], dtype=float32)

    References:
        Dauphin et al., Language Modeling with Gated Convolutional Networks, 2016.
        arXiv:1612.08083, section 2
    """
    return jax.nn.sigmoid(gate) * value


@typechecked
def bilinear(gate: Float[Array, "*batch"], value: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Gated unit without a nonlinearity, gate * value.

    Args:
        gate: One factor, in any float dtype.
        value: The other factor.

    Returns:
        The products, in the dtype of the inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> F.bilinear(jnp.array([2.0, -1.0]), jnp.array([3.0, 4.0]))
        Array([ 6., -4.], dtype=float32)

    References:
        Shazeer, GLU Variants Improve Transformer, 2020. arXiv:2002.05202, section 2
    """
    return gate * value


@typechecked
def reglu(gate: Float[Array, "*batch"], value: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Gated linear unit with `relu`, max(gate, 0) * value.

    Args:
        gate: Input of `relu`, in any float dtype.
        value: The other factor.

    Returns:
        The products, in the dtype of the inputs.

    References:
        Shazeer, GLU Variants Improve Transformer, 2020. arXiv:2002.05202, section 2
    """
    return relu(gate) * value


@typechecked
def geglu(
    gate: Float[Array, "*batch"], value: Float[Array, "*batch"], *, approximate: bool = False
) -> Float[Array, "*batch"]:
    """Gated linear unit with `gelu`, gelu(gate) * value.

    T5 v1.1 and Gemma use ``approximate=True``.

    Args:
        gate: Input of `gelu`, in any float dtype.
        value: The other factor.
        approximate: As in `gelu`.

    Returns:
        The products, in the dtype of the inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> gate, value = jnp.array([0.0, 1.0, 2.0]), jnp.array([6.0, 6.0, 6.0])
        >>> np.asarray(F.geglu(gate, value)).round(3)
        array([ 0.   ,  5.048, 11.727], dtype=float32)
        >>> np.asarray(F.geglu(gate, value, approximate=True)).round(3)  # T5 v1.1, Gemma
        array([ 0.   ,  5.047, 11.728], dtype=float32)

    References:
        Shazeer, GLU Variants Improve Transformer, 2020. arXiv:2002.05202, section 2
    """
    return gelu(gate, approximate=approximate) * value


@typechecked
def swiglu(gate: Float[Array, "*batch"], value: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Gated linear unit with `silu`, silu(gate) * value.

    The paper's feed-forward layer is ``swiglu(x @ W, x @ V) @ W2``. PaLM and Llama adopted it.

    Args:
        gate: Input of `silu`, in any float dtype.
        value: The other factor.

    Returns:
        The products, in the dtype of the inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> x = jnp.ones((5, 8))  # five tokens of width 8
        >>> W, V, W2 = jnp.ones((8, 24)), jnp.ones((8, 24)), jnp.ones((24, 8))
        >>> y = F.swiglu(x @ W, x @ V) @ W2
        >>> y.shape
        (5, 8)

    References:
        Shazeer, GLU Variants Improve Transformer, 2020. arXiv:2002.05202, section 2
    """
    return silu(gate) * value


@typechecked
def clamped_geglu(
    gate: Float[Array, "*batch"],
    value: Float[Array, "*batch"],
    *,
    limit: float,
    alpha: float = 1.702,
) -> Float[Array, "*batch"]:
    """Gated unit of Phi-3-small: `quick_gelu` with both paths bounded and the value shifted by one.

        g = min(gate, limit)
        y = g * sigmoid(alpha * g) * (clip(value, -limit, limit) + 1)

    Args:
        gate: Even columns of the released up projection.
        value: Odd columns of the released up projection.
        limit: Upper limit of the gate, and of the value's magnitude; 20 in the released model.
        alpha: Slope of the sigmoid's argument; the slope of `quick_gelu` in the released models.

    Returns:
        The activations, in the dtype of `gate`.

    Raises:
        ValueError: If `limit` is not positive.

    References:
        Abdin et al., Phi-3 Technical Report, 2024. arXiv:2404.14219; the released model's code
    """
    require(limit > 0, f"limit must be positive; got {limit}.")
    gate = jnp.minimum(gate, limit)
    return gate * sigmoid(alpha * gate) * (jnp.clip(value, -limit, limit) + 1)


@typechecked
def xielu(
    x: Float[Array, "*batch"],
    alpha_p: Float[Array, "..."],
    alpha_n: Float[Array, "..."],
    *,
    beta: float = 0.5,
) -> Float[Array, "*batch"]:
    """Integral of ELU, xIELU: a parabola above zero, an exponential below, both learned.

        y = softplus(alpha_p) * x ** 2 + beta * x                                  (x > 0)
        y = (beta + softplus(alpha_n)) * (exp(x) - 1 - x) + beta * x               (x <= 0)

    Args:
        x: Any float dtype.
        alpha_p: One number, which says the curvature above zero.
        alpha_n: One number, which says that below.
        beta: Slope at zero.

    Returns:
        The activations, computed in float32, in the dtype of `x`.

    References:
        Huang and Schlag, Deriving Activation Functions Using Integration, 2024. arXiv:2411.13010,
        section 3
    """
    wide = x.astype(jnp.float32)
    alpha_p, alpha_n = (a.astype(jnp.float32).reshape(()) for a in (alpha_p, alpha_n))
    above = jax.nn.softplus(alpha_p) * wide**2
    below = jnp.minimum(wide, 0)  # no overflow where it is not used
    curve = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(below) - below)
    return (jnp.where(wide > 0, above, curve) + beta * wide).astype(x.dtype)


@typechecked
def softplus(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Softplus, ln(1 + exp(x)): a smooth ReLU, and the integral of the sigmoid.

    Args:
        x: Numbers, in any float dtype.

    Returns:
        The positive numbers, computed in float32, in the dtype of `x`.

    References:
        Dugas et al., Incorporating Second-Order Functional Knowledge for Better Option Pricing,
        2000. Advances in Neural Information Processing Systems 13, section 2
    """
    return jax.nn.softplus(x.astype(jnp.float32)).astype(x.dtype)


@typechecked
def gaussian_top_k(
    x: Float[Array, "*batch D"], *, sparsity: float, axis_name: str | None = None
) -> Float[Array, "*batch D"]:
    """Keep what of a vector exceeds a quantile, as if its features were normally distributed.

        y = max(x - mean(x) - q * std(x), 0),  q = quantile(sparsity) of the normal distribution

    Of features that are so distributed, the share `sparsity` becomes 0. Unlike a top-k it needs no
    sorting.

    Args:
        x: Vectors along the last axis, in any float dtype.
        sparsity: Share of the features to become 0, between 0 and 1.
        axis_name: Mesh axis over which the features are sharded; one number per vector and
            statistic is summed over it.

    Returns:
        The excess, computed in float32, in the dtype of `x`.

    Raises:
        ValueError: If `sparsity` is not between 0 and 1.

    References:
        You et al., Spark Transformer: Reactivating Sparsity in FFN and Attention, 2025.
        arXiv:2506.06644, section 3 (statistical top-k); Gemma 3n's released code
    """
    require(0 < sparsity < 1, f"sparsity must be between 0 and 1; got {sparsity}.")
    wide = x.astype(jnp.float32)
    centred = wide - feature_mean(wide, axis_name)
    variance = feature_mean(jnp.square(centred), axis_name)
    deviation = jnp.sqrt(jnp.maximum(variance, jnp.finfo(jnp.float32).tiny))  # has a gradient at 0
    return jax.nn.relu(centred - NormalDist().inv_cdf(sparsity) * deviation).astype(x.dtype)


@typechecked
def soft_cap(x: Float[Array, "*batch"], cap: float) -> Float[Array, "*batch"]:
    """Soft cap: cap * tanh(x / cap), bounded by (-cap, cap).

    It is nearly the identity far below the cap. Gemma 2 caps attention scores at 50, logits at 30.

    Args:
        x: Scores or logits, in any float dtype.
        cap: The bound, positive.

    Returns:
        The capped numbers, computed in float32, in the dtype of `x`.

    Raises:
        ValueError: If `cap` is not positive.

    References:
        Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, 2024.
        arXiv:2408.00118, section 2
    """
    require(cap > 0, f"cap must be positive; got {cap}.")
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


ACTIVATIONS: dict[str, Activation] = {
    "relu": relu,
    "relu_squared": relu_squared,
    "gelu": partial(gelu, approximate=False),
    "gelu_tanh": partial(gelu, approximate=True),
    "quick_gelu": quick_gelu,
    "silu": silu,
    "sigmoid": sigmoid,
    "identity": lambda x: x,
}
BUILTIN_ACTIVATIONS = frozenset(ACTIVATIONS)


def activation(function: Activation) -> Activation:
    """Register an elementwise function as an activation under its name (decorator).

    A function that is defined again in the same module or notebook replaces the earlier one, and
    programs that use it are compiled again.

    Args:
        function: An elementwise function; the result has the shape and dtype of its argument.

    Returns:
        The function.

    Raises:
        ValueError: The function has no name, or another module has registered the name.

    Example:
        >>> from jaxformer import functional as F, options
        >>> from jaxformer.config import GLU
        >>> @options.activation
        ... def cubed_relu(x):
        ...     return F.relu(x) ** 3
        >>> GLU(hidden_dim=704, activation="cubed_relu")
        GLU(hidden_dim=704, activation='cubed_relu', bias=False, sub_norm=None, sparsity=None)
    """
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise ValueError(f"An activation needs a name: define it by def name(x); got {function}.")
    if name in ACTIVATIONS:
        owner = "jaxformer" if name in BUILTIN_ACTIVATIONS else ACTIVATIONS[name].__module__
        registered = f"{owner} has already registered an activation {name!r}"
        require(owner == function.__module__, f"{registered}; choose another name.")
        jax.clear_caches()

    @wraps(function)
    def with_checks(x: Any) -> Any:  # x may be a NumPy array
        giver = f"The activation {name!r}"
        with named_errors(giver):
            y = function(x)
        require_like(giver, "an array", y, x.shape, x.dtype)
        return y

    ACTIVATIONS[name] = with_checks
    return function
