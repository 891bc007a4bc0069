"""Read and write adapters as PEFT does: adapter_config.json and adapter_model.safetensors."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxformer import config as c
from jaxformer.interop import safetensors_files as files
from jaxformer.interop import transforms as t
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.load import Pretrained
from jaxformer.interop.param_mapping import EMBEDDING_PATH, TensorMapping, expand_mapping
from jaxformer.interop.parameter_shapes import parameter_shapes
from jaxformer.interop.save import atomic_folder, check_output_folder, choose_family
from jaxformer.interop.tensor_checks import check_finite
from jaxformer.json_files import read_json
from jaxformer.layers.lora import LORA_A, LORA_B, MAGNITUDE, is_adapter
from jaxformer.layers.parameter_metadata import check_parameters, parameter_metadata
from jaxformer.layers.runtime import target_name

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Fields of adapter_config.json that change the outputs, unless null or of these values.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([],),
    "layer_replication": ([],),
    "use_qalora": (False,),
    "alora_invocation_tokens": ([],),
    "lora_bias": (False,),
    "megatron_config": ({},),
    "exclude_modules": ([],),
    # Others change the base model where PEFT loads them.
    "init_lora_weights": (True, False, "gaussian"),
}
MERGE_HINT = "Else merge the adapter in PEFT, and load the whole model."


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

        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)

    A tensor that holds several of our kernels (a fused query, key and value) gets the adapters of
    all as one of the sum of their ranks.

    Args:
        folder: Output folder; it must be absent or empty, unless `overwrite` is True.
        config: A model with `TransformerConfig.adapter`.
        params: Its parameters.
        base: Name or folder of the base model, which PEFT looks up.
        dtype: Dtype of the saved tensors; None keeps that of each parameter.
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
    if lora.trained:
        raise ValueError(
            f"A folder of adapters has no tensors for the parameters that LoRA.trained names, "
            f"{', '.join(lora.trained)}; merge the adapter and save the whole model."
        )
    check_parameters(config, params)
    arrays = flatten_dict(params, sep="/")
    modules = [m for m in adaptable_modules(config) if m.paths(LORA_A)[0][0] in arrays]
    written = {path for m in modules for path, _ in m.paths(LORA_A)}
    if missing := sorted(x for x in arrays if x.endswith(LORA_A) and x not in written):
        raise ValueError(
            f"PEFT has no form of the adapters {', '.join(missing)}; merge the adapter and save "
            "the whole model."
        )
    tensors: dict[str, np.ndarray] = {}
    for module in modules:
        tensors |= _module_tensors(module, arrays)
    entries = [
        files.TensorSpec(name, x.dtype if dtype is None else np.dtype(dtype), x.shape)
        for name, x in sorted(tensors.items())
    ]
    for entry in entries:
        check_finite(tensors[entry.name], entry.dtype, entry.name)
    files.write_file(folder / ADAPTER_WEIGHTS, entries, (tensors[e.name] for e in entries))
    settings = {
        **_settings(lora, modules),
        "base_model_name_or_path": base,
        "target_modules": _short_names(modules, adaptable_modules(config)),
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def _settings(lora: c.LoRA, modules: list[ModuleAdapter]) -> dict[str, Any]:
    """Fields of adapter_config.json, with the ranks of the modules that hold several kernels."""
    counts = {m.name: len(m.mapping.slices) for m in modules}
    ranks = {name: lora.rank * count for name, count in counts.items() if count > 1}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "rank_pattern": ranks,
        "alpha_pattern": {
            name: lora.scale * (math.sqrt(rank) if lora.rslora else rank)
            for name, rank in ranks.items()
        },
        "bias": "none",
        "fan_in_fan_out": any(_is_conv1d(module) for module in modules),
        "inference_mode": True,
    }


def load_adapter(
    folder: str | Path,
    config: c.TransformerConfig,
    params: Mapping[str, Any],
    *,
    base_name: str | None = None,
) -> Pretrained:
    """Read adapters that PEFT saved, for a base model that is loaded.

    Adapters of different ranks get the largest, filled with zeros; so do layers without one.

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
    base = replace(config, adapter=None)
    check_parameters(base, params)
    modules = {m.name: m for m in adaptable_modules(base)}
    by_module = _group_by_module(path, modules)
    scales = {name: _scale(settings, name, len(x["A"])) for name, x in by_module.items()}
    rslora, dora = (settings.boolean(f"use_{name}", False) for name in ("rslora", "dora"))
    dropout = settings.number("lora_dropout", 0.0)
    settings.check(str(folder / ADAPTER_CONFIG), unread=False, hint=MERGE_HINT)
    columns = {name: _used_columns(path, modules[name], x) for name, x in by_module.items()}
    rank = max(1, *(len(used) for parts in columns.values() for used in parts))
    paths = [slot.path for name in by_module for slot in modules[name].mapping.slices]
    targets = {target_name(tuple(path.split("/")[:-1])) for path in paths}
    lora = c.LoRA(
        rank=rank,
        alpha=next(iter(scales.values())) * (math.sqrt(rank) if rslora else rank),
        targets=tuple(sorted(targets)),
        rslora=rslora,
        dora=dora,
        dropout=dropout,
    )
    adapted = replace(base, adapter=lora)
    filled = {
        path: np.zeros(shape, np.float32)
        for path, shape in parameter_shapes(adapted).items()
        if is_adapter(path)
    }
    needed = {name for name, m in modules.items() if m.paths(MAGNITUDE)[0][0] in filled}
    stored = {name for name, parts in by_module.items() if "magnitude" in parts}
    if stored != needed:
        raise ValueError(
            f"{path} has lora_magnitude_vector in {len(stored)} of the {len(needed)} modules that "
            f"need one with use_dora={dora}."
        )
    for name, parts in by_module.items():
        _fill_module(filled, modules[name], parts, columns[name], scales[name] / lora.scale)
    arrays = flatten_dict(params, sep="/") | {path: jnp.asarray(x) for path, x in filled.items()}
    return Pretrained(adapted, unflatten_dict(arrays, sep="/"))


def _read_settings(folder: Path) -> ConfigReader:
    """Read adapter_config.json, and refuse what would change the outputs."""
    path = folder / ADAPTER_CONFIG
    settings = ConfigReader(read_json(path))
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{path} has peft_type {settings.get('peft_type')!r}; it must be LORA.")
    for name, neutral in WITHOUT_EFFECT.items():
        settings.require_value(name, *neutral)
    settings.check(str(path), unread=False, hint=MERGE_HINT)
    return settings


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of the adapters, which must be finite."""
    stored = files.read_header(path)
    for name, entry in stored.items():
        if entry.dtype not in files.FLOAT_DTYPES:
            raise ValueError(f"{name} in {path} is {entry.dtype}, which is no float.")
    tensors = {name: files.read_tensor(entry) for name, entry in stored.items()}
    for name, x in tensors.items():
        check_finite(x, np.dtype(np.float32), f"{name} in {path}")
    return tensors


def adaptable_modules(config: c.TransformerConfig) -> list[ModuleAdapter]:
    """Modules of the Hugging Face model whose weights are kernels of ours."""
    base = replace(config, adapter=None)
    family, values = choose_family(base, {})
    metadata = flatten_dict(parameter_metadata(base), sep="/")
    modules = []
    for mapping in expand_mapping(family.mapping_for(values), base, parameter_shapes(base)):
        paths = [slot.path for slot in mapping.slices]
        is_weight = mapping.hf_name.endswith(".weight")
        if not is_weight or not all(p.endswith(("/kernel", "/embedding")) for p in paths):
            continue
        counts = tuple(len(metadata[path].input_and_output_axes[0]) for path in paths)
        transform = _output_transform(mapping.transform)
        if transform is None or any("experts" in metadata[p].logical_axes for p in paths):
            continue
        if base.head.tied and EMBEDDING_PATH in paths:  # PEFT would not adapt the head
            continue
        modules.append(
            ModuleAdapter(mapping.hf_name.removesuffix(".weight"), mapping, counts, transform)
        )
    return modules


def _output_transform(transform: t.Transform) -> t.Transform | None:
    """Transform of B, whose input is the rank; None if the inputs would change as well."""
    match transform:
        case t.LinearKernel() | t.Identity():
            return t.LinearKernel()
        case t.Fused(part=t.LinearKernel()):
            return t.Fused()
        case t.Interleaved(part=t.LinearKernel()):
            return t.Interleaved()
        case t.SwapHeadHalves(part=t.LinearKernel(input_axes=1)):
            return t.SwapHeadHalves(part=t.LinearKernel())
        case t.FusedQKVPerGroup() | t.FusedPerGroup():
            return transform
        case t.Scaled(part=part, factors=factors):
            inner = _output_transform(part)
            return None if inner is None else t.Scaled(part=inner, factors=factors)
    return None


def _is_conv1d(module: ModuleAdapter) -> bool:
    transform: Any = module.mapping.transform
    part = getattr(transform, "part", transform)
    return isinstance(part, t.LinearKernel) and not part.outputs_first


def _module_tensors(module: ModuleAdapter, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """PEFT's tensors of one module; several kernels make a block-diagonal B."""
    a_parts, b_parts, magnitudes = (
        [np.asarray(arrays[path][at]) for path, at in module.paths(name) if path in arrays]
        for name in (LORA_A, LORA_B, MAGNITUDE)
    )
    rank = a_parts[0].shape[-1]
    a = np.concatenate([x.reshape(-1, rank).T for x in a_parts])
    blocks = [
        module.to_hf.to_hf([x if i == j else np.zeros_like(x) for j, x in enumerate(b_parts)])
        for i in range(len(b_parts))
    ]
    b = np.concatenate(blocks, axis=1)
    name = f"{PREFIX}{module.name}"
    if module.is_embedding:
        return {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}
    tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    if magnitudes:
        rows = module.to_hf.to_hf([x[None] for x in magnitudes])
        tensors[f"{name}.lora_magnitude_vector"] = rows.reshape(-1)
    return tensors


def _short_names(chosen: list[ModuleAdapter], modules: list[ModuleAdapter]) -> list[str]:
    """target_modules: last parts of the names where all modules of these are adapted."""
    names = {m.name for m in chosen}
    by_end: dict[str, set[str]] = {}
    for m in modules:
        by_end.setdefault(m.name.rpartition(".")[2], set()).add(m.name)
    ends = {end for end, every in by_end.items() if every <= names}
    return sorted(ends | {name for name in names if name.rpartition(".")[2] not in ends})


def _group_by_module(
    path: Path, modules: Mapping[str, ModuleAdapter]
) -> dict[str, dict[str, np.ndarray]]:
    """Tensors of each module, by "A", "B" and "magnitude"."""
    ends = {
        ".lora_A.weight": "A",
        ".lora_B.weight": "B",
        ".lora_embedding_A": "A",
        ".lora_embedding_B": "B",
        ".lora_magnitude_vector": "magnitude",
    }
    groups: dict[str, dict[str, np.ndarray]] = {}
    unknown = []
    for name, x in _read_tensors(path).items():
        end = next((end for end in ends if name.endswith(end)), None)
        module = name.removeprefix(PREFIX).removesuffix(end or "")
        if end is None or module not in modules:
            unknown.append(name)
        elif ends[end] in groups.setdefault(module, {}):
            raise ValueError(f"{path} has {module}{end} twice.")
        else:
            groups[module][ends[end]] = x
    if unknown or not groups:
        listed = ", ".join(unknown[:4]) or "no tensor"
        module_names = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
        raise ValueError(
            f"{path} has {listed}, which is no adapter of this model; its "
            f"modules are {module_names}. Is it of another base model?"
        )
    for module, parts in groups.items():
        if not {"A", "B"} <= parts.keys():
            raise ValueError(f"{path}: {module} has only {', '.join(parts)}.")
        if parts["A"].ndim != 2 or not len(parts["A"]):
            raise ValueError(
                f"{path}: A of {module} must be a matrix of one row or more; "
                f"got {list(parts['A'].shape)}."
            )
    return groups


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
    return [np.flatnonzero(rows) for rows in used]


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
        filled[path][at][: len(used)] = x[used] * factor
    for (path, at), used in zip(module.paths(LORA_A), columns, strict=True):
        shape = filled[path][at].shape[:-1]
        filled[path][at][..., : len(used)] = a[used].T.reshape(*shape, len(used))
    if "magnitude" in parts:
        ones = [(1, *shape[1:]) for shape in shapes]
        rows = module.to_hf.from_hf(parts["magnitude"].astype(np.float32)[:, None], ones)
        for (path, at), x in zip(module.paths(MAGNITUDE), rows, strict=True):
            filled[path][at][...] = x[0]
