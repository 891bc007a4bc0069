"""Registry of the supported model families by model_type."""

from collections.abc import Mapping

from jaxformer.interop.families import (
    afmoe,
    apertus,
    aria,
    baichuan,
    beam,
    bloom,
    cohere,
    dbrx,
    deepseek,
    diffllama,
    ernie,
    falcon,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    gpt2,
    gpt_neox,
    gptj,
    granite_hybrid,
    heads_by_layer,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mamba,
    mamba1,
    marian,
    minimax,
    modernbert,
    muse,
    nemotron_h,
    olmo_hybrid,
    opt,
    phi,
    qwen,
    qwen3_next,
    recurrent_gemma,
    rwkv,
    switch,
    t5,
)
from jaxformer.interop.family import Family

# An export uses the first that matches, so the simplest come first.
MODULES = (
    *(llama, gemma, gemma4, cohere, deepseek, phi, qwen, dbrx, ernie, afmoe, baichuan, lfm2),
    *(recurrent_gemma, qwen3_next, mamba, mamba1, granite_hybrid, nemotron_h, kimi_linear),
    *(minimax, falcon_h1, diffllama, llama4),
    *(olmo_hybrid, heads_by_layer, gpt2, gptj, gpt_neox, bloom, opt, falcon, t5, switch, marian),
    *(aria, apertus, modernbert, beam, muse, rwkv, gemma3n),
)
FAMILIES: Mapping[str, Family] = {
    family.model_type: family for module in MODULES for family in module.FAMILIES
}
