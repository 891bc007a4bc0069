"""Activation names used in config.json."""

from collections.abc import Mapping

HF_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "sigmoid": "sigmoid",
    "linear": "identity",
}


def hf_activation_name(activation: str) -> str:
    """First config.json name of an activation.

    Raises:
        ValueError: It has none.
    """
    for name, ours in HF_ACTIVATIONS.items():
        if ours == activation:
            return name
    raise ValueError(f"Hugging Face has no name for the activation {activation!r}.")
