"""Modules of a Hugging Face model that hold our kernels: names, tensors and shapes."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from jaxformer import config as c
from jaxformer.interop import transforms as t
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import EMBEDDING_PATH, HEAD_PATH, TensorMapping, expand_mapping
from jaxformer.interop.parameter_shapes import parameter_shapes
from jaxformer.interop.save import choose_family
from jaxformer.layers.layouts import Layout
from jaxformer.layers.parameter_metadata import parameter_metadata

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
AS_MLP = (r"\.block_sparse_moe\.", ".mlp.")
PLAIN_ROUTER = ((r"\.router\.layer\.", ".router."),)
# Modules that transformers 5 names otherwise than the files: patterns and replacements.
MODULE_RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "axk1": ((r"\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm."),),
    "ernie4_5_moe": ((r"\.mlp\.moe_statics\.", ".mlp.gate.moe_statics."),),
    "exaone": (
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.ln_f\.", "model.norm."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.c_fc_0\.", ".gate_proj."),
        (r"\.c_fc_1\.", ".up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ),
    "exaone_moe": ((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),),
    "flint": ((r"\.softmax_offset$", ".sinks"),),
    "gpt_neox": ((r"^embed_out\.", "lm_head."),),
    "granitemoe": PLAIN_ROUTER,
    "granitemoehybrid": PLAIN_ROUTER,
    "granitemoeshared": PLAIN_ROUTER,
    "hy_v3": (
        (r"\.shared_mlp\.", ".shared_experts."),
        (r"\.router\.gate\.", ".gate."),
        (r"\.expert_bias$", ".e_score_correction_bias"),
    ),
    "lfm3": ((r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),),
    "kimi_linear": (AS_MLP, (r"\.(f_[ab]_proj\.|A_log$|dt_bias$)", r".forget_gate.\1")),
    "laguna": (
        (r"\.shared_expert\.", ".shared_experts."),
        (r"\.experts\.e_score_correction_bias$", ".gate.e_score_correction_bias"),
    ),
    "kolibri1": (
        (r"\.post_attn_norm\.", ".post_self_attn_layernorm."),
        (r"\.post_ffn_norm\.", ".post_mlp_layernorm."),
        (r"\.moe\.router\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    ),
    "lara_mini": ((r"\.linear_attn\.out_norm\.", ".linear_attn.norm."),),
    "mimo_v2_flash": ((r"\.attention_sink_bias$", ".sinks"),),
    "minimax": (AS_MLP,),
    "minimax_m2": (AS_MLP,),
    "mixtral": (AS_MLP,),
    "nemotron_h": ((r"^backbone\.", "model."),),
    "olmo_hybrid": (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
    "sarvam_moe": (
        (r"\.word_embeddings\.", ".embed_tokens."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.query_key_value\.", ".self_attn."),  # which is split
        (r"\.attention\.(key|query)_layernorm\.", r".self_attn.\1_norm."),
        (r"\.(k)ey_norm\.|\.(q)uery_norm\.", r".\1\2_norm."),
        (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    ),
    "phimoe": (AS_MLP, (r"\.gate\.", ".router.")),
}

# Names in target_modules that PEFT takes for experts and routers, by the type of the model.
NAMES_OF_EXPERTS = dict.fromkeys(
    "afmoe beam cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo "
    "glm4_moe glm4_moe_lite hunyuan_v1_moe mellum olmoe qwen3_moe qwen3_next sarvam_mla "
    "solar_open".split(),
    ("gate", "gate_proj", "up_proj", "down_proj"),
) | dict.fromkeys(("minimax", "minimax_m2", "mixtral"), ("gate", "w1", "w2", "w3"))
# Names of modules that PEFT does not adapt, since fast kernels read their weights, by the type.
MAMBA_TYPES = "falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"
NOT_ADAPTED = dict.fromkeys(MAMBA_TYPES, ("out_proj",))
# Modules that read a table, which no computation reads under its own name.
SHARED_TABLES = {
    f"{prefix}shared.weight": tuple(f"{prefix}{x}coder.embed_tokens.weight" for x in ("en", "de"))
    for prefix in ("", "model.")
}
# Tensors that are several modules: what follows the name of each, and how many kernels it has.
SPLIT_TENSORS = {
    ".linear_attn.in_proj": (("_qkv", 3), ("_z", 1), ("_b", 1), ("_a", 1)),
    ".self_attn": ((".q_proj", 1), (".k_proj", 1), (".v_proj", 1)),
}

# Tensors of files that transformers 5 holds as one with others.
MERGED = r"\.experts\.(\d+|fc\d)\.|\.block_sparse_moe\.(in|out)put_linear\.|\.[kqv]_conv1d\."


class ModuleAdapter(NamedTuple):
    """A module of the Hugging Face model, and our kernels that it holds."""

    name: str
    mapping: TensorMapping
    num_input_axes: tuple[int, ...]
    to_hf: t.Transform

    @property
    def is_embedding(self) -> bool:
        """Whether the module is a table of rows."""
        return self.mapping.slices[0].path.endswith("/embedding")

    def paths(self, name: str) -> list[tuple[str, tuple[int, ...]]]:
        """Path and index of one adapter parameter of each kernel."""
        return [(f"{p.rpartition('/')[0]}/{name}", at) for p, at in self.mapping.slices]

    def b_shapes(self, rank: int) -> list[tuple[int, ...]]:
        """Shape of the B of each kernel."""
        return [
            (rank, *shape[n:])
            for shape, n in zip(self.mapping.slice_shapes, self.num_input_axes, strict=True)
        ]

    def lengths(self, arrays: Mapping[str, Any]) -> list[np.ndarray]:
        """Length of each column of each kernel: the magnitudes of DoRA before its training."""
        kernels = [np.asarray(arrays[path][at], np.float32) for path, at in self.mapping.slices]
        return [
            np.sqrt(np.square(kernel).sum(axis=tuple(range(n))))
            for kernel, n in zip(kernels, self.num_input_axes, strict=True)
        ]


def tensor_mappings(
    config: c.TransformerConfig, layout: Layout = "stacked", *, stored: Container[str] = ()
) -> list[TensorMapping]:
    """Mapping of every tensor of the Hugging Face model; of a head also where it is tied.

    Args:
        config: The model.
        layout: Layout of its parameters.
        stored: Adapted modules and whole tensors of a folder, which of transformers 4 are named as
            in the files.
    """
    base = replace(config, adapter=None)
    family, values = choose_family(base, {})
    rules, untied = family.mapping_for(values), with_own_head(base)
    mappings = []
    for mapping in expand_mapping(rules, untied, parameter_shapes(untied, layout)):
        name = mapping.hf_name
        if name not in stored and name.rpartition(".")[0] not in stored:
            for pattern, replacement in MODULE_RENAMES.get(family.model_type, ()):
                name = re.sub(pattern, replacement, name)
        for part in _split(mapping._replace(hf_name=name)):
            names = SHARED_TABLES.get(part.hf_name, (part.hf_name,))
            mappings += [part._replace(hf_name=each) for each in names]
    return mappings


def _split(mapping: TensorMapping) -> Iterator[TensorMapping]:
    """The mapping of each module that has a part of the tensor."""
    module, _, last = mapping.hf_name.rpartition(".")
    parts, first = next((x for end, x in SPLIT_TENSORS.items() if module.endswith(end)), None), 0
    if parts is None or last not in ("weight", "bias"):
        yield mapping
        return
    for ending, count in parts:
        kernels = slice(first, first + count)
        shapes, first = mapping.slice_shapes[kernels], first + count
        yield TensorMapping(
            hf_name=f"{module}{ending}.{last}",
            hf_shape=mapping.transform.hf_shape(shapes),
            slices=mapping.slices[kernels],
            slice_shapes=shapes,
            transform=mapping.transform,
        )


def family_of(config: c.TransformerConfig) -> tuple[Family, dict[str, Any]]:
    """The family of the Hugging Face model, and its config.json."""
    return choose_family(replace(config, adapter=None), {})


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor is in a module that modules_to_save names: by the end of its name."""
    outer = accumulate(name.split(".")[:-1], "{}.{}".format)
    return any(module.endswith(tuple(modules)) for module in outer)


def with_own_head(config: c.TransformerConfig) -> c.TransformerConfig:
    """Return the model whose head is not the table of tokens."""
    return replace(config, head=replace(config.head, tied=False))


def adaptable_modules(
    config: c.TransformerConfig, mappings: list[TensorMapping], layout: Layout
) -> list[ModuleAdapter]:
    """Modules of the Hugging Face model whose weights are kernels of ours.

    PEFT adapts the table of tokens and a head that is tied to it one by one: a model with a tied
    head has neither.
    """
    untied = with_own_head(replace(config, adapter=None))
    metadata = flatten_dict(parameter_metadata(untied, layout), sep="/")
    modules = []
    for mapping in mappings:
        paths = [slot.path for slot in mapping.slices]
        is_weight = mapping.hf_name.endswith(".weight")
        if not is_weight or not all(p.endswith(("/kernel", "/embedding")) for p in paths):
            continue
        counts = tuple(len(metadata[path].input_and_output_axes[0]) for path in paths)
        transform = _of_outputs(mapping.transform, counts[0])
        if transform is None or any("experts" in metadata[p].logical_axes for p in paths):
            continue
        if config.head.tied and {EMBEDDING_PATH, HEAD_PATH} & set(paths):
            continue
        modules.append(
            ModuleAdapter(mapping.hf_name.removesuffix(".weight"), mapping, counts, transform)
        )
    return modules


def _of_outputs(transform: t.Transform, num_inputs: int) -> t.Transform | None:
    """Transform of B, whose input is the rank; None if the inputs would change as well."""
    match transform:
        case t.Rearrange(t.SAME):
            return t.Rearrange(t.LINEAR)
        case t.Rearrange():
            return transform.of_outputs(num_inputs)
        case t.SwapHeadHalves() | t.Scaled():
            part = _of_outputs(transform.part, num_inputs)
            return None if part is None else replace(transform, part=part)
    return None


def is_conv1d(module: ModuleAdapter) -> bool:
    """Whether the module is GPT-2's Conv1D, whose weight has its inputs first."""
    transform: Any = module.mapping.transform
    transform = getattr(transform, "part", transform)
    return transform in (t.Rearrange(t.CONV1D), t.Rearrange(t.CONV1D_OF_HEADS))
