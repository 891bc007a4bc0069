"""Save a configuration and parameters as a Hugging Face folder."""

import json
import math
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

from jaxformer import config as c
from jaxformer.interop import safetensors_files as files
from jaxformer.interop.config_comparison import canonical, config_differences, with_shortest_cycles
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.family import Family
from jaxformer.interop.load import build_config
from jaxformer.interop.param_mapping import TensorMapping, expand_mapping, unmapped_params
from jaxformer.interop.parameter_shapes import parameter_shapes
from jaxformer.interop.tensor_checks import check_finite
from jaxformer.interop.transforms import ConstantTensor
from jaxformer.layers.layouts import layout_of
from jaxformer.layers.parameter_metadata import check_parameters
from jaxformer.layers.parameters import storage_dtype

MODEL_FILES = ("config.json", "adapter_config.json")
MAX_SHARD_BYTES = 5_000_000_000
# Set to null: the defaults of transformers are ids of the released vocabularies.
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def save_pretrained(
    folder: str | Path,
    config: c.TransformerConfig,
    params: Mapping[str, Any],
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra: Mapping[str, Any] | None = None,
    family: str | None = None,
    overwrite: bool = False,
) -> None:
    """Save a model as a Hugging Face folder that `load_pretrained` and transformers can load.

        save_pretrained("exported", config, params, extra={"eos_token_id": 2})

    The family is `config.model_type` (set by `load_pretrained`) if transformers includes it, else
    the first whose config.json represents `config`, which is checked by reading it back; dropout
    and initialisation are not saved. Files are written to a temporary folder that is renamed at the
    end, so `folder` is never incomplete. The context length of a loaded config.json is kept.

    Args:
        folder: Output folder; it must be absent or empty, unless `overwrite` is True.
        config: The model.
        params: The parameters; the folder is the same from both layouts of layers.
        dtype: Dtype of the saved tensors, but float32 for `layers.parameters.FLOAT32_PARAMETERS`;
            None keeps each parameter's dtype.
        max_shard_bytes: Maximum size of a file; a larger tensor gets a file of its own.
        extra: More attributes of config.json, which take precedence: token ids, or another
            ``max_position_embeddings``.
        family: The model_type to save as; None chooses it as above.
        overwrite: Whether to replace a folder with a config.json, including all its files.

    Raises:
        ValueError: The folder is not empty; no family represents `config` (the message lists the
            differences); `extra` changes the model or is unknown; parameters are missing,
            unexpected, of the wrong shape, not finite, or too large for the dtype.
    """
    folder = check_output_folder(folder, overwrite=overwrite)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive; got {max_shard_bytes}.")
    if config.adapter is not None:
        raise ValueError(
            "save_pretrained has no tensors for adapters: save them with save_adapter, or merge "
            "them by merge_lora first."
        )
    check_parameters(config, params)
    arrays = flatten_dict(params, sep="/")
    shapes = parameter_shapes(config, layout_of(params))
    chosen_family, values = choose_family(config, dict(extra or {}), family)
    mapping = [
        *expand_mapping(chosen_family.mapping_for(values), config, shapes),
        *_constant_tensors(chosen_family, values),
    ]
    mapping.sort(key=lambda link: link.hf_name)
    unmapped = unmapped_params(mapping, shapes)
    if unmapped:
        raise ValueError(
            f"{chosen_family.model_type} has no tensors for the parameters {', '.join(unmapped)}."
        )
    entries = [
        files.TensorSpec(link.hf_name, _output_dtype(arrays, link, dtype), link.hf_shape)
        for link in mapping
    ]
    values |= {"torch_dtype": max(entries, key=lambda e: math.prod(e.shape)).dtype.name}
    text = json.dumps(values, indent=2, sort_keys=True, default=_json_default) + "\n"
    with atomic_folder(folder) as partial:
        files.write_folder(
            partial, entries, _hf_tensors(arrays, mapping, entries), max_shard_bytes=max_shard_bytes
        )
        (partial / "config.json").write_text(text, encoding="utf-8")


def check_output_folder(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Return the resolved output path; it must be absent, empty, or may be overwritten.

    Args:
        folder: The folder.
        overwrite: Whether it may also be a model folder, which has a config.json.

    Raises:
        ValueError: The folder is not empty, or the path or one of its parents is a file.
    """
    folder = Path(folder).expanduser().resolve()
    if files := [parent for parent in folder.parents if parent.is_file()]:
        raise ValueError(f"{folder} cannot be a folder: {files[0]} is a file.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not overwrite:
            raise ValueError(
                f"{folder} exists and is not empty; choose a new folder, or pass overwrite=True "
                "(the flag --overwrite)."
            )
        if not any((folder / name).is_file() for name in MODEL_FILES):
            raise ValueError(
                f"{folder} has no config.json, so it is not a model folder and is not overwritten."
            )
    return folder


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Temporary folder that replaces `folder` on success and is deleted on failure.

    Args:
        folder: Result of `check_output_folder`.

    Yields:
        The temporary folder.
    """
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.partial"
    replaced = partial.with_suffix(".before")
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists():
            replaced.rename(folder)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def choose_family(
    config: c.TransformerConfig, extra: Mapping[str, Any], name: str | None = None
) -> tuple[Family, dict[str, Any]]:
    """First family that can represent the configuration, and its config.json.

    Args:
        config: The model.
        extra: Attributes of config.json that take precedence over the family's.
        name: The family to use; None tries all.

    Returns:
        The family and the attributes.

    Raises:
        ValueError: There is no such family (the message lists the differences), or `extra` is not
            valid for it.
    """
    if name is not None and name not in FAMILIES:
        raise ValueError(
            f"family {name!r} is not supported; supported are {', '.join(sorted(FAMILIES))}."
        )
    differing: dict[str, list[str]] = {}
    refused: list[str] = []
    multi_token = config.multi_token_prediction  # which config.json does not say
    config = replace(config, multi_token_prediction=False)
    spelled = with_shortest_cycles(config)  # one option where all layers are alike
    kinds = {type(layer.attention) for layers in config.stacks.values() for layer in layers}
    is_mixed = isinstance(spelled.attention, tuple)
    families = list(_candidate_families(config, name))
    fitting = [
        family
        for family in families
        if kinds <= {*family.attention_types} and (len(family.attention_types) > 1 or not is_mixed)
    ]
    if not fitting:
        family_text = (
            "none has" if name is None else f"{name} has {_type_names(families[0].attention_types)}"
        )
        differs = " that differs from layer to layer" if is_mixed and len(kinds) == 1 else ""
        refused.append(f"its attention is {_type_names(kinds)}{differs}, and {family_text}")
    for family in fitting:
        names = family.mapping.multi_token
        is_moe = config.layers[-1].feed_forward.is_moe
        if multi_token and (names is None or (names.has_experts and not is_moe)):
            kind = "" if names is None else " with a dense layer"
            refused.append(f"{family.model_type} has no multi-token prediction{kind}")
            continue
        try:
            values = family.write(spelled)
            if values is None:
                continue
            if multi_token and names is not None:
                values |= {names.count: 1}
            values = {"architectures": [family.architecture], **NO_SPECIAL_TOKENS, **values}
            values["model_type"] = family.model_type
            if config.max_position_embeddings and family.model_type == config.model_type:
                values.setdefault(family.length_name, config.max_position_embeddings)
            remedy = "Change these options of the model, or name another family"
            wrong = _round_trip_differences(config, family, values, remedy)
        except ValueError as error:
            refused.append(str(error))
            continue
        if not wrong:
            return family, _with_extra(config, family, values, extra)
        differing[family.model_type] = wrong
    raise ValueError(_no_family_message(differing, refused, name))


def _type_names(kinds: Iterable[type]) -> str:
    return " and ".join(sorted(kind.__name__ for kind in kinds))


def _candidate_families(config: c.TransformerConfig, name: str | None) -> Iterable[Family]:
    """Families to try: the named one, or all, with the configuration's model_type first."""
    if name is not None:
        return [FAMILIES[name]]
    same_type = [family for kind, family in FAMILIES.items() if kind == config.model_type]
    return [*(family for family in same_type if family.in_transformers), *FAMILIES.values()]


def _round_trip_differences(
    config: c.TransformerConfig, family: Family, values: Mapping[str, Any], remedy: str
) -> list[str]:
    """Differences between a configuration and its round trip through config.json."""
    where = f"a {family.model_type}'s config.json"
    read_back = build_config(family, values, where=where, remedy=remedy)
    return config_differences(canonical(config), canonical(read_back))


def _with_extra(
    config: c.TransformerConfig, family: Family, values: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return config.json with the user's extra attributes, which must not change the model."""
    merged = {**values, **extra, "model_type": family.model_type}
    try:
        wrong = _round_trip_differences(config, family, merged, "Leave it out of extra.")
    except ValueError as error:
        raise ValueError(f"extra={dict(extra)} is not valid: {error}") from error
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise ValueError(f"extra={dict(extra)} would change the model:\n{listed}")
    return merged


def _json_default(value: Any) -> Any:
    """Convert numpy and JAX values for json.dumps."""
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return value.tolist()
    raise TypeError(f"extra holds {value!r} of type {type(value).__name__}, which is not JSON.")


def _no_family_message(
    differing: Mapping[str, list[str]], refused: list[str], name: str | None
) -> str:
    """Error message: why no family matches, and what the nearest would change."""
    subject = "No family" if name is None else f"The family {name}"
    verb = "can represent" if name is None else "cannot represent"
    counts = Counter(reason.rstrip(".") for reason in refused)
    reasons = [reason for reason, count in counts.items() if count > len(differing)]
    if reasons or not differing:
        text = "; ".join(reasons) or "none has its topology, positions or feed-forward"
        return f"{subject} {verb} this configuration: {text}."
    nearest = min(differing, key=lambda kind: len(differing[kind]))
    fields = {kind: {line.split(":")[0] for line in lines} for kind, lines in differing.items()}
    shared = [
        path
        for path in sorted(fields[nearest])
        if all(any(f"{path}.".startswith(f"{x}.") for x in paths) for paths in fields.values())
    ]
    shared = shared if len(fields) > 1 else []
    named = f" No family near it supports this {', '.join(shared)}." if shared else ""
    listed = "\n".join(f"  {line}" for line in differing[nearest])
    return f"{subject} {verb} this configuration.{named} As {nearest}, it would change:\n{listed}"


def _constant_tensors(family: Family, values: Mapping[str, Any]) -> Iterator[TensorMapping]:
    """Mappings of constant tensors that transformers expects."""
    for name, array in (family.constant_tensors(values) if family.constant_tensors else {}).items():
        yield TensorMapping(name, array.shape, (), (), ConstantTensor(values=array))


def _output_dtype(
    arrays: Mapping[str, Any], link: TensorMapping, dtype: DTypeLike | None
) -> np.dtype:
    """Output dtype of a tensor."""
    param_dtypes = [arrays[slot.path].dtype for slot in link.slices]
    tensor_dtype = (
        np.dtype(jnp.result_type(*param_dtypes)) if param_dtypes else np.dtype(np.float32)
    )
    if dtype is not None:
        dtypes = [storage_dtype(slot.path, dtype) for slot in link.slices]
        tensor_dtype = max((np.dtype(dtype), *dtypes), key=lambda d: d.itemsize)
    if tensor_dtype not in files.FLOAT_DTYPES.values():
        known_names = ", ".join(kind.name for kind in files.FLOAT_DTYPES.values())
        raise ValueError(
            f"{link.hf_name} cannot be saved as {tensor_dtype}; supported are {known_names}."
        )
    return tensor_dtype


def _hf_tensors(
    arrays: Mapping[str, Any], mapping: list[TensorMapping], entries: list[files.TensorSpec]
) -> Iterator[np.ndarray]:
    """Yield the Hugging Face tensors one at a time, checked to be finite."""
    for link, entry in zip(mapping, entries, strict=True):
        tensor = link.transform.to_hf([_to_host(arrays[path], at) for path, at in link.slices])
        check_finite(tensor, entry.dtype, link.hf_name)
        yield tensor


def _to_host(array: Any, at: tuple[int, ...]) -> np.ndarray:
    """Return a slice of a parameter as a NumPy array; only the slice is transferred."""
    if isinstance(array, jax.Array) and all(d.platform == "cpu" for d in array.devices()):
        array = np.asarray(array)
    return np.asarray(array[at])
