"""Read a folder of adapters that PEFT saved."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer import config as c
from jaxformer.interop import safetensors_files as files
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.load import Pretrained
from jaxformer.interop.param_mapping import EMBEDDING_PATH, HEAD_PATH, TensorMapping
from jaxformer.interop.parameter_shapes import parameter_shapes
from jaxformer.interop.peft.modules import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PREFIX,
    ModuleAdapter,
    adaptable_modules,
    family_of,
    is_inside,
    tensor_mappings,
    with_own_head,
)
from jaxformer.interop.tensor_checks import check_finite
from jaxformer.json_files import read_json
from jaxformer.layers.layouts import Layout, layout_of
from jaxformer.layers.lora import LORA_A, LORA_B, MAGNITUDE, is_adapter
from jaxformer.layers.parameter_metadata import check_parameters
from jaxformer.layers.runtime import target_name

# Fields of adapter_config.json that change the outputs, unless null or of these values.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "trainable_token_indices": ([],),
    "layer_replication": ([],),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "alora_invocation_tokens": ([],),
    "lora_bias": (False,),
    "megatron_config": ({},),
    "arrow_config": ({},),
    "kasa_config": ({},),
    "monteclora_config": ({},),
    # Others change the base model where PEFT loads them.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
MERGE_HINT = "Else merge the adapter in PEFT, and load the whole model."
ENDS = {  # of the tensors of an adapter
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
    ".lora_magnitude_vector": "magnitude",
}
ModuleTensors = dict[str, dict[str, np.ndarray]]  # by module, then "A", "B" or "magnitude"


def load_adapter(
    folder: str | Path,
    config: c.TransformerConfig,
    params: Mapping[str, Any],
    *,
    base_name: str | None = None,
) -> Pretrained:
    """Read adapters that PEFT saved, for a base model that is loaded.

    Adapters of different ranks get the largest, filled with zeros; so do layers without one. Whole
    tensors in the folder (modules_to_save, and the weights beside adapters of a table or a head)
    replace the base model's; of another number of tokens, they change the vocabulary. A head that
    is tied to an adapted or replaced table becomes a head of its own, as in PEFT.

    Args:
        folder: Folder with adapter_config.json and adapter_model.safetensors.
        config: The base model, of a Hugging Face family.
        params: Its parameters.
        base_name: Folder or hub name of the base model; the folder must say the same, or nothing.

    Returns:
        The model with `TransformerConfig.adapter`, and its parameters.

    Raises:
        ValueError: The folder is damaged, its adapters are of another base model, or of a kind that
            is not supported.
    """
    path, folder = Path(folder) / ADAPTER_WEIGHTS, Path(folder)
    settings = _read_settings(folder)
    stated = settings.text("base_model_name_or_path", base_name or "")
    if base_name is not None and Path(stated).name != Path(base_name).name:
        raise ValueError(f"The adapters in {folder} are of {stated}; got the model {base_name}.")
    check_parameters(replace(config, adapter=None), params)
    layout, (family, values) = layout_of(params), family_of(config)
    is_ignored = partial(family.is_ignored, config=config, values=values)
    tensors = _read_tensors(path)
    stored = {_whole_name(name) if _end(name) is None else _module_name(name) for name in tensors}
    named = partial(tensor_mappings, stored=stored)
    base, arrays = replace(config, adapter=None), flatten_dict(params, sep="/")
    known = {mapping.hf_name for mapping in named(base)}  # copies of a table too
    tensors = {
        name: x for name, x in tensors.items() if _whole_name(name) in known or not is_ignored(name)
    }
    whole = {_whole_name(name): x for name, x in tensors.items() if _end(name) is None}
    base = _resized(base, named(base), whole)
    mappings = named(base, layout)
    if base.head.tied and _changes_one_end(mappings, tensors):
        base = with_own_head(base)
        arrays[HEAD_PATH] = arrays[EMBEDDING_PATH].T
    modules = {m.name: m for m in adaptable_modules(base, mappings, layout)}
    _check_names(path, tensors, mappings, modules)
    _check_copies(path, tensors, mappings)
    _replace_whole(path, mappings, whole, arrays)
    check_parameters(base, unflatten_dict(arrays, sep="/"))
    by_module = _group_by_module(path, tensors)
    columns = {name: _used_columns(path, modules[name], x) for name, x in by_module.items()}
    trained = _trained(path, settings, named(base), tensors)
    lora, scales = _read_lora(settings, modules, by_module, columns, trained)
    settings.check(str(folder / ADAPTER_CONFIG), unread=False, hint=MERGE_HINT)
    adapted = replace(base, adapter=lora)
    filled = _first_values(adapted, modules, arrays, layout)
    _check_magnitudes(path, modules, by_module, filled)
    for name, parts in by_module.items():
        _fill_module(filled, modules[name], parts, columns[name], scales[name] / lora.scale)
    arrays |= {path: jnp.asarray(x) for path, x in filled.items()}
    return Pretrained(adapted, unflatten_dict(arrays, sep="/"))


def _read_settings(folder: Path) -> ConfigReader:
    """Read adapter_config.json, and refuse what would change the outputs."""
    path = folder / ADAPTER_CONFIG
    settings = ConfigReader(read_json(path))
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{path} has peft_type {settings.get('peft_type')!r}; it must be LORA.")
    parameters = settings.get("target_parameters") or []
    if not all(str(name).endswith(".weight") for name in parameters):  # else matrices of modules
        settings.require_value("target_parameters", [])
    for name, neutral in WITHOUT_EFFECT.items():
        settings.require_value(name, *neutral)
    settings.check(str(path), unread=False, hint=MERGE_HINT)
    return settings


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of the folder, which must be finite, by their name in the base model.

    Beside a vocabulary of another size PEFT writes trained modules again, with their originals.
    """
    tensors: dict[str, np.ndarray] = {}
    for stored_name, entry in files.read_header(path).items():
        if any(f".{part}." in stored_name for part in ("original_module", "modules_to_save")):
            continue
        name = stored_name.removeprefix(PREFIX)
        if entry.dtype not in files.FLOAT_DTYPES:
            raise ValueError(f"{stored_name} in {path} is {entry.dtype}, which is no float.")
        if name in tensors:
            raise ValueError(f"{path} has {name} twice.")
        tensors[name] = files.read_tensor(entry)
        check_finite(tensors[name], np.dtype(np.float32), f"{stored_name} in {path}")
    return tensors


def _end(name: str) -> str | None:
    """The end of the name of an adapter's tensor; None for a whole tensor."""
    return next((end for end in ENDS if name.endswith(end)), None)


def _whole_name(name: str) -> str:
    """Name in the base model of a whole tensor, which may stand beside an adapter."""
    return name.replace(".base_layer.", ".")


def _module_name(name: str) -> str:
    """Module of a tensor."""
    end = _end(name)
    return _whole_name(name).rpartition(".")[0] if end is None else name.removesuffix(end)


def _resized(
    base: c.TransformerConfig, mappings: list[TensorMapping], whole: Mapping[str, np.ndarray]
) -> c.TransformerConfig:
    """Return the model with as many tokens as the table of the folder, if there is one."""
    names = [x.hf_name for x in mappings if x.slices[0].path == EMBEDDING_PATH]
    rows = [len(whole[name]) for name in names if name in whole]
    return replace(base, vocab_size=rows[0]) if rows else base


def _changes_one_end(mappings: list[TensorMapping], tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether the folder changes the table of tokens or the head, which PEFT treats apart."""
    ends = [x.hf_name for x in mappings if x.slices[0].path in (EMBEDDING_PATH, HEAD_PATH)]
    return bool({_module_name(name) for name in ends} & {_module_name(name) for name in tensors})


def _check_names(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    mappings: list[TensorMapping],
    modules: Mapping[str, ModuleAdapter],
) -> None:
    """Raise if a tensor is neither an adapter of a module nor a tensor of the base model."""
    whole = {mapping.hf_name for mapping in mappings}
    unknown = []
    for name in tensors:
        if _end(name) is None and _whole_name(name) in whole:
            continue
        if _end(name) is None or _module_name(name) not in modules:
            unknown.append(name)
    if parts := [name for name in unknown if _end(name) is None]:
        raise ValueError(
            f"{path} has {', '.join(parts[:4])}, which the files of this model hold otherwise "
            "(experts one by one) or not at all: modules_to_save with such parts are not "
            f"supported. {MERGE_HINT}"
        )
    if unknown or not tensors:
        listed = ", ".join(unknown[:4]) or "no tensor"
        module_names = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
        raise ValueError(
            f"{path} has {listed}, which is no adapter of this model; its "
            f"modules are {module_names}. Is it of another base model?"
        )


def _check_copies(
    path: Path, tensors: Mapping[str, np.ndarray], mappings: list[TensorMapping]
) -> None:
    """Raise unless modules of encoder and decoder that read one table change it alike."""
    tables = [x.hf_name.rpartition(".")[0] for x in mappings if x.slices[0].path == EMBEDDING_PATH]
    first, *copies = (
        {name.removeprefix(table): x for name, x in tensors.items() if _module_name(name) == table}
        for table in tables
    )
    for parts in copies:
        if parts.keys() != first.keys() or any(
            not np.array_equal(first[x], parts[x]) for x in parts
        ):
            raise ValueError(
                f"{path} changes {' and '.join(tables)} differently, which are one table here."
            )


def _replace_whole(
    path: Path,
    mappings: list[TensorMapping],
    whole: Mapping[str, np.ndarray],
    arrays: dict[str, Any],
) -> None:
    """Replace parameters of the base model by whole tensors of the folder."""
    for mapping in (mapping for mapping in mappings if mapping.hf_name in whole):
        tensor = whole[mapping.hf_name]
        if tensor.shape != mapping.hf_shape:
            raise ValueError(
                f"{path}: {mapping.hf_name} is {list(tensor.shape)}; this model needs "
                f"{list(mapping.hf_shape)}. Is it of another base model?"
            )
        parts = mapping.transform.from_hf(tensor.astype(np.float32), mapping.slice_shapes)
        for (name, at), part in zip(mapping.slices, parts, strict=True):
            values = jnp.asarray(part, arrays[name].dtype)
            arrays[name] = jnp.asarray(arrays[name]).at[at].set(values) if at else values


def _trained(
    path: Path,
    settings: ConfigReader,
    mappings: list[TensorMapping],
    tensors: Mapping[str, np.ndarray],
) -> tuple[str, ...]:
    """`LoRA.trained`: our modules that the folder holds whole, modules_to_save among them."""
    names = [name for name in tensors if _end(name) is None and ".base_layer." not in name]
    saved = settings.get("modules_to_save") or []
    inside = [x.hf_name for x in mappings if is_inside(x.hf_name, saved)]
    if missing := [name for name in inside if name not in tensors]:
        raise ValueError(
            f"{path} has no {', '.join(missing[:4])}, {len(missing)} of the {len(inside)} tensors "
            f"of modules_to_save, {', '.join(saved)}."
        )
    paths = {x.hf_name: [slot.path for slot in x.slices] for x in mappings}
    whole = {each for name in names for each in paths[name]}
    untrained = {each for listed in paths.values() for each in listed} - whole
    modules = {each: each.rpartition("/")[0] for each in whole}
    trained = {
        each if any(x.startswith(f"{module}/") for x in untrained) else module
        for each, module in modules.items()
    }
    return tuple(sorted(trained))


def _group_by_module(path: Path, tensors: Mapping[str, np.ndarray]) -> ModuleTensors:
    """Tensors of each adapter, by module."""
    groups: ModuleTensors = {}
    for name, x in tensors.items():
        if (end := _end(name)) is not None:
            groups.setdefault(_module_name(name), {})[ENDS[end]] = x
    for module, parts in groups.items():
        if not {"A", "B"} <= parts.keys():
            raise ValueError(f"{path}: {module} has only {', '.join(parts)}.")
        if parts["A"].ndim != 2 or not len(parts["A"]):
            raise ValueError(
                f"{path}: A of {module} must be a matrix of one row or more; "
                f"got {list(parts['A'].shape)}."
            )
    return groups


def _read_lora(
    settings: ConfigReader,
    modules: Mapping[str, ModuleAdapter],
    by_module: ModuleTensors,
    columns: Mapping[str, list[np.ndarray]],
    trained: tuple[str, ...],
) -> tuple[c.LoRA, dict[str, float]]:
    """The option, and the scale of each module's update."""
    scales = {name: _scale(settings, name, len(x["A"])) for name, x in by_module.items()}
    rslora, dora = (settings.boolean(f"use_{name}", False) for name in ("rslora", "dora"))
    rank = max(1, *(len(used) for parts in columns.values() for used in parts), 1)
    targets = {
        target_name(tuple(slot.path.split("/")[:-1]))
        for name, parts in columns.items()
        for slot, used in zip(modules[name].mapping.slices, parts, strict=True)
        if len(used) or dora  # DoRA trains the lengths of all columns of a module
    }
    alpha = next(iter(scales.values()), 1.0) * (math.sqrt(rank) if rslora else rank)
    lora = c.LoRA(
        rank=rank,
        alpha=alpha,
        targets=tuple(sorted(targets)),
        rslora=rslora,
        dora=dora,
        dropout=settings.number("lora_dropout", 0.0),
        trained=trained,
    )
    return lora, scales


def _first_values(
    adapted: c.TransformerConfig,
    modules: Mapping[str, ModuleAdapter],
    arrays: Mapping[str, Any],
    layout: Layout,
) -> dict[str, np.ndarray]:
    """Adapters that change nothing: zeros, and the lengths of the base model's columns."""
    filled = {
        path: np.zeros(shape, np.float32)
        for path, shape in parameter_shapes(adapted, layout).items()
        if is_adapter(path)
    }
    for module in modules.values():
        if any(path in filled for path, _ in module.paths(MAGNITUDE)):
            lengths = module.lengths(arrays)
            for (path, at), length in zip(module.paths(MAGNITUDE), lengths, strict=True):
                if path in filled:
                    filled[path][at] = length
    return filled


def _check_magnitudes(
    path: Path,
    modules: Mapping[str, ModuleAdapter],
    by_module: ModuleTensors,
    filled: Mapping[str, np.ndarray],
) -> None:
    """Raise unless adapters have trained lengths of columns as use_dora says."""
    has = {name: "magnitude" in parts for name, parts in by_module.items()}
    needs = {name: any(x in filled for x, _ in modules[name].paths(MAGNITUDE)) for name in has}
    if has != needs:
        raise ValueError(
            f"{path} has lora_magnitude_vector in {sum(has.values())} of the {len(has)} adapted "
            f"modules; by use_dora {sum(needs.values())} need one."
        )


def _place(
    settings: ConfigReader, field: str, pattern: str, module: str
) -> tuple[ConfigReader, str]:
    """Where the number of a module is: at the first pattern that ends its name, or in the field."""
    patterns = settings.part(pattern)
    for key in patterns.values:
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return patterns, key
        except re.error as error:
            patterns.add_problem(key, f"the name is no regular expression: {error}.")
    return settings, field


def _scale(settings: ConfigReader, module: str, rank: int) -> float:
    """Scale of a module's update, from its alpha and rank."""
    part, name = _place(settings, "r", "rank_pattern", module)
    if part.number(name, rank) != rank:
        part.add_problem(name, f"{ADAPTER_WEIGHTS} has adapters of rank {rank}.")
    part, name = _place(settings, "lora_alpha", "alpha_pattern", module)
    alpha = part.number(name, 8.0)
    if alpha <= 0:
        part.add_problem(name, "expected a number above 0.")
    return alpha / (math.sqrt(rank) if settings.boolean("use_rslora", False) else rank)


def _used_columns(
    path: Path, module: ModuleAdapter, parts: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """Indices of the rank that each kernel of a module uses; all, where the module is one kernel.

    Of several kernels each may use a part, as `save_adapter` writes them.
    """
    a, b = parts["A"], parts["B"].astype(np.float32)
    shapes = module.b_shapes(len(a))
    inputs = math.prod(module.mapping.slice_shapes[0][: module.num_input_axes[0]])
    expected = (len(a), inputs), module.to_hf.hf_shape(shapes)
    if (a.shape, b.shape) != expected:
        raise ValueError(
            f"{path}: the adapter of {module.name} is {list(a.shape)} and "
            f"{list(b.shape)}; this model needs {list(expected[0])} and {list(expected[1])}. Is it "
            "of another base model?"
        )
    if len(shapes) == 1:
        return [np.arange(len(a))]
    used = [x.reshape(len(a), -1).any(axis=1) for x in module.to_hf.from_hf(b, shapes)]
    is_untrained = not np.any(used)  # B begins with zeros
    return [np.flatnonzero(rows | is_untrained) for rows in used]


def _fill_module(
    filled: Mapping[str, np.ndarray],
    module: ModuleAdapter,
    parts: Mapping[str, np.ndarray],
    columns: list[np.ndarray],
    factor: float,
) -> None:
    """Copy PEFT's tensors of one module into our parameters, whose rank may be larger."""
    a, b = (parts[name].astype(np.float32) for name in "AB")
    shapes = module.b_shapes(len(a))
    b_parts = module.to_hf.from_hf(b, shapes)
    for (path, at), x, used in zip(module.paths(LORA_B), b_parts, columns, strict=True):
        if len(used):
            filled[path][at][: len(used)] = x[used] * factor
    for (path, at), used in zip(module.paths(LORA_A), columns, strict=True):
        if len(used):
            shape = filled[path][at].shape[:-1]
            filled[path][at][..., : len(used)] = a[used].T.reshape(*shape, len(used))
    if "magnitude" in parts:
        ones = [(1, *shape[1:]) for shape in shapes]
        rows = module.to_hf.from_hf(parts["magnitude"].astype(np.float32)[:, None], ones)
        for (path, at), x in zip(module.paths(MAGNITUDE), rows, strict=True):
            filled[path][at][...] = x[0]
