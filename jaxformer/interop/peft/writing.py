"""Write a folder of adapters that PEFT loads onto the base model."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

from jaxformer import config as c
from jaxformer.interop import safetensors_files as files
from jaxformer.interop.param_mapping import EMBEDDING_PATH, HEAD_PATH, TensorMapping
from jaxformer.interop.peft.modules import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MERGED,
    NAMES_OF_EXPERTS,
    NOT_ADAPTED,
    PREFIX,
    ModuleAdapter,
    adaptable_modules,
    family_of,
    is_conv1d,
    is_inside,
    tensor_mappings,
)
from jaxformer.interop.save import atomic_folder, check_output_folder
from jaxformer.interop.tensor_checks import check_finite
from jaxformer.layers.layouts import layout_of
from jaxformer.layers.lora import LORA_A, LORA_B, MAGNITUDE, is_adapter, split_parameters
from jaxformer.layers.parameter_metadata import check_parameters, parameter_metadata
from jaxformer.layers.parameters import LISTED

MERGE = "merge the adapter and save the whole model."


def save_adapter(
    folder: str | Path,
    config: c.TransformerConfig,
    params: Mapping[str, Any],
    *,
    base: str | None = None,
    dtype: DTypeLike | None = None,
    overwrite: bool = False,
) -> None:
    """Save the adapters of a model as a folder that PEFT loads onto the base model.

        model = AutoPeftModelForCausalLM.from_pretrained(folder)

    A tensor that holds several of our kernels (a fused query, key and value) gets the adapters of
    all as one of the sum of their ranks. Parameters that `LoRA.trained` names are saved whole, as
    PEFT's modules_to_save. Modules whose names PEFT takes for experts (``gate_proj`` of DeepSeek's
    dense layers) are its target_parameters, which have no dropout.

    Args:
        folder: Output folder; it must be absent or empty, unless `overwrite` is True.
        config: A model with `TransformerConfig.adapter`.
        params: Its parameters.
        base: Name or folder of the base model, which PEFT looks up.
        dtype: Dtype of the saved tensors; None keeps each parameter's dtype.
        overwrite: Whether to replace a folder.

    Raises:
        ValueError: The model has no adapter, PEFT has no form of it, or parameters do not fit.
    """
    with atomic_folder(check_output_folder(folder, overwrite=overwrite)) as partial:
        write_adapter(partial, config, params, base=base, dtype=dtype)


def write_adapter(
    folder: Path,
    config: c.TransformerConfig,
    params: Mapping[str, Any],
    *,
    base: str | None,
    dtype: DTypeLike | None,
) -> None:
    """Write the two files of `save_adapter` into a folder."""
    if (lora := config.adapter) is None:
        raise ValueError(
            "save_adapter needs a model with an adapter; got TransformerConfig.adapter=None."
        )
    check_parameters(config, params)
    layout, arrays = layout_of(params), flatten_dict(params, sep="/")
    mappings = tensor_mappings(config, layout)
    adaptable = adaptable_modules(config, mappings, layout)
    modules = [m for m in adaptable if any(path in arrays for path, _ in m.paths(LORA_A))]
    written = {path for m in modules for path, _ in m.paths(LORA_A)}
    if missing := sorted(x for x in arrays if x.endswith(LORA_A) and x not in written):
        raise ValueError(f"PEFT has no form of the adapters {', '.join(missing)}; {MERGE}")
    tensors, saved = _whole_tensors(config, mappings, arrays, {m.name for m in modules})
    by_weight = _targeted_by_weight(config, modules)
    for module in modules:
        tensors |= _module_tensors(module, arrays)
    entries = [
        files.TensorSpec(PREFIX + name, x.dtype if dtype is None else np.dtype(dtype), x.shape)
        for name, x in sorted(tensors.items())
    ]
    for entry, (_, x) in zip(entries, sorted(tensors.items()), strict=True):
        check_finite(x, entry.dtype, entry.name)
    files.write_file(folder / ADAPTER_WEIGHTS, entries, (x for _, x in sorted(tensors.items())))
    settings = {
        **_settings(lora, modules, arrays),
        "task_type": "SEQ_2_SEQ_LM" if config.topology.is_encoder_decoder else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "lora_dropout": 0.0 if by_weight else lora.dropout,
        "target_modules": _short_names([m for m in modules if m not in by_weight], mappings),
        "target_parameters": [f"{module.name}.weight" for module in by_weight] or None,
        "modules_to_save": saved or None,
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def _settings(
    lora: c.LoRA, modules: list[ModuleAdapter], arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of adapter_config.json, with the ranks of the modules that hold several kernels."""
    counts = {m.name: sum(path in arrays for path, _ in m.paths(LORA_A)) for m in modules}
    ranks = {name: lora.rank * count for name, count in counts.items() if count > 1}
    return {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "rank_pattern": ranks,
        "alpha_pattern": {
            name: lora.scale * (math.sqrt(rank) if lora.rslora else rank)
            for name, rank in ranks.items()
        },
        "bias": "none",
        "fan_in_fan_out": any(is_conv1d(module) for module in modules),
        "inference_mode": True,
    }


def _targeted_by_weight(
    config: c.TransformerConfig, modules: list[ModuleAdapter]
) -> list[ModuleAdapter]:
    """Modules that PEFT would take for experts by their names: their weights are its targets."""
    kind = family_of(config)[0].model_type
    names, refused = (x.get(kind, ()) for x in (NAMES_OF_EXPERTS, NOT_ADAPTED))
    if not_adapted := [m.name for m in modules if m.name.rpartition(".")[2] in refused]:
        raise ValueError(
            f"PEFT adapts no {', '.join(refused)} of {kind} models; got adapters of "
            f"{not_adapted[0]}. Choose other LoRA.targets, or {MERGE}"
        )
    as_experts = [module for module in modules if module.name.rpartition(".")[2] in names]
    if as_experts and config.adapter is not None and config.adapter.dora:
        raise ValueError(
            f"PEFT takes the targets {', '.join(names)} of this model for experts, and adapts the "
            f"weights of {as_experts[0].name} and {len(as_experts) - 1} more modules without DoRA; "
            f"{MERGE}"
        )
    return as_experts


def _whole_tensors(
    config: c.TransformerConfig,
    mappings: list[TensorMapping],
    arrays: Mapping[str, Any],
    adapted: set[str],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Tensors and names of the modules that PEFT saves whole: of parameters in `LoRA.trained`."""
    stacked = split_parameters(config.adapter, parameter_metadata(config))  # which names say
    trained = {path for path in flatten_dict(stacked.trained, sep="/") if not is_adapter(path)}
    arrays = dict(arrays)
    if config.head.tied:  # PEFT trains a copy of the table, which the head does not read
        arrays[HEAD_PATH] = np.asarray(arrays[EMBEDDING_PATH]).T
        trained |= {HEAD_PATH} if EMBEDDING_PATH in trained else set()
    chosen = [
        x for x in tensor_mappings(config) if trained.intersection(slot.path for slot in x.slices)
    ]
    inner = {mapping.hf_name.rpartition(".")[0] for mapping in chosen}
    modules = sorted(x for x in inner if not any(x.startswith(f"{outer}.") for outer in inner))
    inside = [mapping for mapping in mappings if is_inside(mapping.hf_name, modules)]
    left = trained - {slot.path for mapping in chosen for slot in mapping.slices}
    merged = [x.hf_name for x in inside if re.search(MERGED, x.hf_name)]
    if problems := sorted(left) + merged:
        raise ValueError(
            f"transformers has no tensor of its own of {', '.join(problems[:LISTED])} "
            f"({len(problems)} in all), which LoRA.trained names; {MERGE}"
        )
    if both := sorted(name for name in adapted if is_inside(f"{name}.weight", modules)):
        raise ValueError(
            f"PEFT either adapts a module or trains it; got both for {', '.join(both)}; {MERGE}"
        )
    family, values = family_of(config)
    constants = family.constant_tensors(values) if family.constant_tensors else {}
    tensors = {
        mapping.hf_name: mapping.transform.to_hf(
            [np.asarray(arrays[path][at]) for path, at in mapping.slices]
        )
        for mapping in inside
    } | {name: x for name, x in constants.items() if is_inside(name, modules)}
    return tensors, modules


def _module_tensors(module: ModuleAdapter, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """PEFT's tensors of one module; several kernels make a block-diagonal B."""
    a_parts, b_parts, magnitudes = (
        [np.asarray(arrays[path][at]) if path in arrays else None for path, at in module.paths(x)]
        for x in (LORA_A, LORA_B, MAGNITUDE)
    )
    present = [a for a in a_parts if a is not None]
    rank = present[0].shape[-1]
    a = np.concatenate([x.reshape(-1, rank).T for x in present])
    zeros = [np.zeros(shape, present[0].dtype) for shape in module.b_shapes(rank)]
    blocks = [
        module.to_hf.to_hf([*zeros[:i], x, *zeros[i + 1 :]])
        for i, x in enumerate(b_parts)
        if x is not None
    ]
    b = np.concatenate(blocks, axis=1)
    if module.is_embedding:
        return {f"{module.name}.lora_embedding_A": a, f"{module.name}.lora_embedding_B": b}
    tensors = {f"{module.name}.lora_A.weight": a, f"{module.name}.lora_B.weight": b}
    if any(x is not None for x in magnitudes):
        lengths = module.lengths(arrays)
        rows = [y if x is None else x for x, y in zip(magnitudes, lengths, strict=True)]
        magnitude = module.to_hf.to_hf([x[None] for x in rows])
        tensors[f"{module.name}.lora_magnitude_vector"] = magnitude.reshape(-1)
    return tensors


def _short_names(chosen: list[ModuleAdapter], mappings: list[TensorMapping]) -> list[str]:
    """target_modules: last parts of the names where all modules of these are adapted."""
    names = {m.name for m in chosen}
    by_end: dict[str, set[str]] = {}
    for name in (x.hf_name.rpartition(".")[0] for x in mappings):
        by_end.setdefault(name.rpartition(".")[2], set()).add(name)
    ends = {end for end, every in by_end.items() if every <= names}
    return sorted(ends | {name for name in names if name.rpartition(".")[2] not in ends})
