"""Registry of the supported model families by model_type."""

from collections.abc import Mapping

from jaxformer.interop.families import (
    afmoe,
    baichuan,
    bloom,
    cohere,
    dbrx,
    deepseek,
    ernie,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    gptj,
    granite_hybrid,
    lfm2,
    llama,
    mamba,
    marian,
    nanochat,
    nemotron,
    nemotron_h,
    olmo,
    opt,
    phi,
    phimoe,
    qwen,
    qwen3_next,
    stablelm,
    switch,
    t5,
)
from jaxformer.interop.family import Family

# An export uses the first that matches, so the simplest come first.
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        *llama.FAMILIES,
        *olmo.FAMILIES,
        *gemma.FAMILIES,
        *nemotron.FAMILIES,
        *cohere.FAMILIES,
        *deepseek.FAMILIES,
        *phi.FAMILIES,
        *phimoe.FAMILIES,
        *qwen.FAMILIES,
        *stablelm.FAMILIES,
        *nanochat.FAMILIES,
        *dbrx.FAMILIES,
        *ernie.FAMILIES,
        *afmoe.FAMILIES,
        *baichuan.FAMILIES,
        *lfm2.FAMILIES,
        *qwen3_next.FAMILIES,
        *mamba.FAMILIES,
        *granite_hybrid.FAMILIES,
        *nemotron_h.FAMILIES,
        *gpt2.FAMILIES,
        *gptj.FAMILIES,
        *gpt_neox.FAMILIES,
        *bloom.FAMILIES,
        *opt.FAMILIES,
        *falcon.FAMILIES,
        *t5.FAMILIES,
        *switch.FAMILIES,
        *marian.FAMILIES,
    )
}
