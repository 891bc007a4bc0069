"""Transformers built from orthogonal options, on top of pure functions.

    from jaxformer import functional as F       # pure functions; loads jax, no flax
    from jaxformer import Transformer           # the Flax linen module
    from jaxformer.config import TransformerConfig

Subpackages are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxformer.config import TransformerConfig as TransformerConfig
    from jaxformer.generation import generate as generate
    from jaxformer.interop import load_pretrained as load_pretrained
    from jaxformer.interop import save_pretrained as save_pretrained
    from jaxformer.layers import RotaryEmbedding as RotaryEmbedding
    from jaxformer.layers import Transformer as Transformer

_LAZY_ATTRIBUTES = {
    "RotaryEmbedding": "jaxformer.layers",
    "Transformer": "jaxformer.layers",
    "TransformerConfig": "jaxformer.config",
    "generate": "jaxformer.generation",
    "load_pretrained": "jaxformer.interop",
    "save_pretrained": "jaxformer.interop",
}

_LAZY_SUBMODULES = (
    "config",
    "costs",
    "data",
    "functional",
    "generation",
    "inspect",
    "interop",
    "layers",
    "options",
    "parallel",
    "run",
    "training",
    "zoo",
)

__all__ = [
    "RotaryEmbedding",
    "Transformer",
    "TransformerConfig",
    "generate",
    "load_pretrained",
    "save_pretrained",
]


def __getattr__(name: str):
    if name in _LAZY_ATTRIBUTES:
        return getattr(importlib.import_module(_LAZY_ATTRIBUTES[name]), name)
    if name in _LAZY_SUBMODULES:
        return importlib.import_module(f"jaxformer.{name}")
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY_ATTRIBUTES, *_LAZY_SUBMODULES])
