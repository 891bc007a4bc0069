"""Registry of all presets by name."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from jaxformer import config as c
from jaxformer.zoo import (
    apertus,
    arcee,
    baichuan,
    bigcode,
    bloom,
    codegen,
    cohere,
    dbrx,
    deepseek,
    eleuther,
    ernie,
    exaone,
    falcon,
    gemma,
    glm,
    gopher,
    gpt,
    gpt_oss,
    granite,
    grok,
    hunyuan,
    lamda,
    lfm,
    llama,
    mamba,
    minimax,
    mistral,
    mpt,
    nanochat,
    nemotron,
    olmo,
    opt,
    palm,
    phi,
    qwen,
    rwkv,
    seed,
    smollm,
    stablelm,
    starcoder,
    switch,
    t5,
    transformer_2017,
    translators,
)

FAMILIES = (
    *(transformer_2017, gpt, t5, switch, eleuther, lamda, gopher, bloom, opt, palm),
    *(translators, codegen, bigcode, mpt),
    *(llama, mistral, olmo, gemma, nemotron, qwen, falcon, phi, starcoder, cohere),
    *(baichuan, deepseek, grok, dbrx, stablelm, glm, ernie, smollm, exaone, arcee, seed),
    *(minimax, nanochat, hunyuan, gpt_oss, granite, lfm, mamba, rwkv, apertus),
)
PRESETS: Mapping[str, c.TransformerConfig] = MappingProxyType(
    {name: config for family in FAMILIES for name, config in family.PRESETS.items()}
)


def names() -> tuple[str, ...]:
    """Names of all presets, by age of their families.

    Returns:
        The names, for `get`.

    Example:
        >>> from jaxformer import zoo
        >>> [name for name in zoo.names() if name.startswith("llama-3")]
        ['llama-3-8b', 'llama-3-70b', 'llama-3.1-8b', 'llama-3.1-70b']
    """
    return tuple(PRESETS)


def get(name: str) -> c.TransformerConfig:
    """Return the configuration of a published model.

    Initialisation and dropout are the defaults of `TransformerConfig`.

    Args:
        name: Family, version and size, such as "llama-2-70b".

    Returns:
        The configuration at its published size.

    Raises:
        ValueError: There is no such preset; the message lists similar names.

    Example:
        >>> from jaxformer import costs, zoo
        >>> config = zoo.get("llama-2-70b")
        >>> config.num_layers, config.model_dim, config.attention.num_kv_heads
        (80, 8192, 8)
        >>> config.attention.positions
        (Rope(base=10000.0, fraction=1.0, pairing='halves', scaling=None, targets=('q', 'k')),)
        >>> f"{costs.num_parameters(config.tiny()):,}"  # the same architecture, for tests
        '75,072'
    """
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(str(name).lower(), PRESETS, n=3, cutoff=0.5)
    hint = f" Similar: {', '.join(close)}." if close else ""
    raise ValueError(
        f"There is no preset {name!r}.{hint} zoo.names() and `jaxformer zoo --list` "
        f"give all {len(PRESETS)}."
    )
