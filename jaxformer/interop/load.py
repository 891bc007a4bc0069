"""Load a Hugging Face folder: config.json to a configuration, tensors to parameters."""

import logging
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxformer import config as c
from jaxformer.interop import coverage
from jaxformer.interop import safetensors_files as files
from jaxformer.interop.config_comparison import with_shortest_cycles
from jaxformer.interop.config_reader import IGNORE_HINT, ConfigReader
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.family import Family
from jaxformer.interop.fast_copy import copy_into
from jaxformer.interop.hub import fetch_folder
from jaxformer.interop.param_mapping import EMBEDDING_PATH, HEAD_PATH, TensorMapping, expand_mapping
from jaxformer.interop.parameter_shapes import parameter_shapes
from jaxformer.interop.tensor_checks import check_finite, check_size, check_tensors
from jaxformer.interop.text_parts import text_family
from jaxformer.interop.transforms import Shape
from jaxformer.json_files import read_json
from jaxformer.layers.layouts import Layout, decoding_layout
from jaxformer.layers.parameters import storage_dtype
from jaxformer.parallel import check_divisible, parameter_shardings, put_sharded
from jaxformer.parallel.plan_report import format_bytes

LOG = logging.getLogger("jaxformer")
PROGRESS_MIN_BYTES = 1 << 30
MAX_READING_THREADS = 8  # each holds a tensor
MAX_LAYERS = 10_000
DEPTH_FIELDS = frozenset(
    "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers "
    "decoder_layers".split()
)


class Pretrained(NamedTuple):
    """Configuration and parameters of a Hugging Face folder."""

    config: c.TransformerConfig
    params: dict[str, Any]


def load_pretrained(
    folder: str | Path,
    dtype: DTypeLike | None = None,
    *,
    ignore: Collection[str] = (),
    mesh: Mesh | None = None,
) -> Pretrained:
    """Read a Hugging Face folder: ``config.json`` and safetensors, in one file or in shards.

        config, params = load_pretrained("Llama-3.1-8B")
        logits = Transformer(config).apply({"params": params}, tokens)

    Names, shapes and sizes are checked before the first weight is read, and an error lists all
    problems. Each thread reads one tensor at a time into preallocated arrays, so peak memory is
    about one copy of the weights. Each layer gets parameters of its own where models decode faster
    so: on CPUs and GPUs, up to 100 layers; elsewhere they are stacked, as by ``init``. Every
    function takes both, and training stacks them. Dropout rates and initialisation are jaxformer's
    defaults.

    If config.json ties the head to the embedding but the file has a different tensor for the head,
    the head is untied, as in transformers 5.

    Args:
        folder: Folder with ``config.json``, or a name of the Hugging Face hub, such as
            ``Qwen/Qwen3-0.6B``, which is downloaded (extra ``hub``).
        dtype: Dtype of the parameters; None is float32. Those that rounding would harm, such as a
            router's, stay float32: `layers.parameters.FLOAT32_PARAMETERS`.
        ignore: Attributes of config.json that you know not to change the model.
        mesh: Device mesh over which to shard the parameters; None puts them on the first device.

    Returns:
        The configuration, and the parameters.

    Raises:
        ImportError: `folder` is a hub name, and huggingface_hub is not installed.
        ValueError: There is no config.json or no safetensors file; a file is truncated or corrupt;
            the model_type is unknown; config.json has unsupported attributes; tensors are missing,
            unexpected, or of another shape or dtype than config.json implies; the mesh does not
            divide the model; a weight is not finite, or overflows `dtype`.

    Example:
        >>> import tempfile
        >>> import jax, jax.numpy as jnp
        >>> from jaxformer import Transformer, load_pretrained, save_pretrained, zoo
        >>> config, tokens = zoo.get("llama-2-7b").tiny(), jnp.arange(3)
        >>> params = Transformer(config).init(jax.random.key(0), tokens)["params"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(folder, config, params)
        ...     again, loaded = load_pretrained(folder)
        >>> apply = Transformer(config).apply
        >>> logits, expected = (apply({"params": x}, tokens) for x in (loaded, params))
        >>> again == config, bool(jnp.allclose(logits, expected, atol=1e-5))
        (True, True)
    """
    return read_pretrained(folder, dtype, ignore=ignore, mesh=mesh)


def read_pretrained(
    folder: str | Path,
    dtype: DTypeLike | None = None,
    *,
    ignore: Collection[str] = (),
    mesh: Mesh | None = None,
    layout: Layout | None = None,
) -> Pretrained:
    """Read as `load_pretrained`, but in this layout of layers; None is the faster to decode."""
    folder = fetch_folder(folder)
    dtype = _floating_dtype(jnp.float32 if dtype is None else dtype)
    hf_config = read_hf_config(folder)
    family = find_family(hf_config, folder)
    config = build_config(family, hf_config, where=folder / "config.json", ignore=ignore)
    headers = files.read_folder_headers(folder)
    config = _with_multi_token(family, config, headers)
    stored = _rename_keys(family, headers, folder, config, hf_config)
    config = _resolve_tied_head(family, config, stored)
    layout = decoding_layout(config) if layout is None else layout
    shapes = parameter_shapes(config, layout)
    check_size(stored, shapes, folder)
    mapping = expand_mapping(family.mapping_for(hf_config), config, shapes, stored=stored)
    stored = _cut_anew(family, mapping, stored, config.num_layers)
    check_tensors(family, mapping, stored, shapes, folder)
    mapping = [link for link in mapping if link.hf_name in stored]
    param_shardings: dict[str, NamedSharding] = {}
    if mesh is not None:
        check_divisible(config, mesh.shape)
        param_shardings = flatten_dict(parameter_shardings(config, mesh, layout), sep="/")
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return Pretrained(config, _load_params(mapping, stored, shapes, dtype, param_shardings))


def _floating_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        if jnp.issubdtype(np.dtype(dtype), jnp.floating):
            return np.dtype(dtype)
    except TypeError:  # no dtype at all
        pass
    raise ValueError(f"dtype must be a floating-point dtype, such as 'bfloat16'; got {dtype!r}.")


def load_config(folder: str | Path, *, ignore: Collection[str] = ()) -> c.TransformerConfig:
    """Read the configuration of a Hugging Face folder; weights are not needed.

    Args:
        folder: Folder with ``config.json``.
        ignore: Attributes of config.json that you know not to change the model.

    Returns:
        The configuration.

    Raises:
        ValueError: There is no config.json, its model_type is unknown, or it has unsupported
            attributes.
    """
    folder = fetch_folder(folder)
    hf_config = read_hf_config(folder)
    family = find_family(hf_config, folder)
    return build_config(family, hf_config, where=folder / "config.json", ignore=ignore)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read config.json."""
    path = folder / "config.json"
    if not path.is_file():
        problem = "has no config.json" if folder.is_dir() else "is no folder"
        hint = ""
        if (folder / "checkpoints").is_dir():
            hint = f" Export the run: jaxformer export --checkpoint {folder} --output NEW"
        elif (folder / "adapter_config.json").is_file():
            hint = " It has adapters of another model: load_adapter adds these to it."
        raise ValueError(f"{folder} {problem}, so it is not a Hugging Face model.{hint}")
    values = read_json(path, allow_infinity=True)  # released files have it in time_step_limit
    for name in values.keys() & DEPTH_FIELDS:
        depth = values[name]
        if isinstance(depth, int | float) and depth > MAX_LAYERS:
            raise ValueError(f"{path}: {name} = {depth}; models have at most {MAX_LAYERS} layers.")
    return values


def find_family(values: Mapping[str, Any], where: Path) -> Family:
    """Family of config.json's model_type, or of its text part.

    Raises:
        ValueError: There is none.
    """
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    try:
        family = text_family(values, FAMILIES, coverage.text_type(kind))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if family is None:
        raise ValueError(f"{where}: {coverage.explain(values)}")
    return family


def build_config(
    family: Family,
    values: Mapping[str, Any],
    *,
    where: Path | str,
    ignore: Collection[str] = (),
    remedy: str = IGNORE_HINT,
) -> c.TransformerConfig:
    """Convert config.json to our configuration; raises for attributes that are not supported."""
    reader = ConfigReader(values)
    quantization = values.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        reader.get("quantization_config")  # what it says is seen from the tensors
    try:
        config = family.read(reader)
    except (ValueError, ArithmeticError) as error:
        reader.check(
            str(where), unread=False, hint=remedy
        )  # placeholders for invalid values may be inconsistent
        related = reader.attributes_with_number(str(error))
        file_note = f" The file has {', '.join(related)}." if related else ""
        raise ValueError(f"{where}: {error}{file_note}") from error
    reader.check(str(where), ignore, hint=remedy)
    text = values.get("text_config")  # of models that also read images
    length = (text if isinstance(text, dict) else values).get(family.length_name)
    return replace(
        with_shortest_cycles(config),
        model_type=config.model_type or family.model_type,
        max_position_embeddings=length if type(length) is int else None,
    )


def _with_multi_token(
    family: Family, config: c.TransformerConfig, headers: Mapping[str, files.StoredTensor]
) -> c.TransformerConfig:
    """The model with multi-token prediction, if the file has one module that shares its tables."""
    names, depth = family.mapping.multi_token, config.num_layers
    if names is None:
        return config
    stored = {family.rename_key(name): where for name, where in headers.items()}
    numbers = dict.fromkeys(names.tensor("projection", depth + i) for i in range(2))
    tables = {path: family.mapping.hf_name_of(path) for path in (EMBEDDING_PATH, HEAD_PATH)}
    if tables[HEAD_PATH] not in stored:
        tables[HEAD_PATH] = tables[EMBEDDING_PATH]
    shares = all(
        copy not in stored or _same_bytes(stored[copy], stored[str(tables[path])])
        for copy, path in names.copies_at(depth).items()
    )
    is_one = sum(name in stored for name in numbers) == 1
    return replace(config, multi_token_prediction=is_one and shares)


def _rename_keys(
    family: Family,
    stored: Mapping[str, files.StoredTensor],
    folder: Path,
    config: c.TransformerConfig,
    hf_config: Mapping[str, Any],
) -> dict[str, files.StoredTensor]:
    """Return the parameter tensors by renamed key."""
    renamed: dict[str, files.StoredTensor] = {}
    twice, left_out = [], []
    for name, where in stored.items():
        new_name = family.rename_key(name)
        if family.is_ignored(new_name, config, hf_config):
            left_out.append(name)
            continue
        if new_name in renamed:
            twice.append(f"{name} ({new_name})")
        renamed[new_name] = where
    if twice:
        raise ValueError(f"{folder} has the same tensors under two names: {', '.join(twice)}.")
    if left_out:
        LOG.info(
            "%s: %d of %d tensors have no part in the logits of text and are left out: %s",
            *(folder, len(left_out), len(stored), _modules(left_out, stored)),
        )
    return renamed


def _modules(names: list[str], stored: Mapping[str, files.StoredTensor]) -> str:
    """The modules of some tensors, with their sizes."""
    sizes: dict[str, int] = {}
    for name in names:
        parts = name.removeprefix("model.").split(".")
        module = ".".join(parts[:3] if parts[0] == "layers" else parts[:1])
        sizes[module] = sizes.get(module, 0) + stored[name].nbytes
    return ", ".join(f"{name} ({format_bytes(size)})" for name, size in sizes.items())


def _resolve_tied_head(
    family: Family, config: c.TransformerConfig, stored: dict[str, files.StoredTensor]
) -> c.TransformerConfig:
    """Tie or untie the LM head depending on which tensors exist."""
    head, embedding = (
        family.mapping.hf_name_of(HEAD_PATH),
        family.mapping.hf_name_of(EMBEDDING_PATH),
    )
    if family.lm_head_optional and head not in stored:
        return replace(config, head=replace(config.head, tied=True))
    if not config.head.tied or head not in stored or embedding is None:
        return config
    if embedding not in stored:
        stored[embedding] = stored.pop(head)
        return config
    if _same_bytes(stored[head], stored[embedding]):
        del stored[head]
        return config
    return replace(config, head=replace(config.head, tied=False))


def _cut_anew(
    family: Family,
    mapping: list[TensorMapping],
    stored: dict[str, files.StoredTensor],
    num_layers: int,
) -> dict[str, files.StoredTensor]:
    """Return the tensors, with `cut_together` cut at the rows that the mapping has."""
    shapes, cut = {link.hf_name: link.hf_shape for link in mapping}, dict(stored)
    for layer in range(num_layers):
        names = [name.replace("{layer}", str(layer)) for name in family.cut_together]
        if not set(names) <= set(stored) & set(shapes):
            continue
        parts, first = tuple(stored[name] for name in names), 0
        rows = [sum(x.shape[0] for x in parts), sum(shapes[name][0] for name in names)]
        if rows[0] != rows[1] or len({(x.shape[1:], x.dtype) for x in parts}) > 1:
            continue  # `check_tensors` says what is wrong
        for name, part in zip(names, parts, strict=True):
            shape = shapes[name][0], *part.shape[1:]
            cut[name] = part._replace(shape=shape, joined=parts, first_row=first)
            first += shape[0]
    return cut


def _same_bytes(a: files.StoredTensor, b: files.StoredTensor) -> bool:
    """Whether two tensors hold the same bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in files.FLOAT_DTYPES:
        return False
    return np.array_equal(files.read_tensor(a).view(np.uint8), files.read_tensor(b).view(np.uint8))


def _load_params(
    mapping: list[TensorMapping],
    stored: Mapping[str, files.StoredTensor],
    shapes: Mapping[str, Shape],
    dtype: np.dtype,
    param_shardings: Mapping[str, NamedSharding],
) -> dict[str, Any]:
    """Read all tensors into parameter arrays and place them on devices."""
    arrays = {
        path: _empty_pages(shape, storage_dtype(path, dtype)) for path, shape in shapes.items()
    }

    def read(link: TensorMapping) -> int:
        stored_tensor = stored[link.hf_name]
        tensor = files.read_tensor(stored_tensor)
        dtype_here = arrays[link.slices[0].path].dtype
        check_finite(tensor, dtype_here, f"{link.hf_name} in {stored_tensor.path}")
        parts = link.transform.from_hf(tensor, link.slice_shapes)
        for (path, index), part in zip(link.slices, parts, strict=True):
            slot: Any = (*index, ...)
            copy_into(arrays[path][slot], part)
        return stored_tensor.nbytes

    threads = ThreadPoolExecutor(min(MAX_READING_THREADS, os.cpu_count() or 1))
    try:
        with _progress(sum(stored[link.hf_name].nbytes for link in mapping)) as tell:
            for nbytes in threads.map(read, mapping):
                tell(nbytes)
    finally:
        threads.shutdown(cancel_futures=True)
    leaves: dict[str, Any] = {}
    for path in list(arrays):
        array = arrays.pop(path)
        leaves[path] = (
            put_sharded(array, param_shardings[path])
            if path in param_shardings
            else jax.device_put(array)
        )
    return unflatten_dict(leaves, sep="/")


def _empty_pages(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Array of zeros in pages of its own, whose alignment lets JAX on CPUs use it without a copy.

    NumPy asks for huge pages, whose first touch takes three times as long on a virtual machine.
    """
    count = math.prod(shape)
    pages = mmap(-1, max(count * dtype.itemsize, 1), access=ACCESS_COPY)
    return np.frombuffer(pages, dtype, count).reshape(shape)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Progress bar for large folders on a terminal."""
    try:
        from rich.progress import Progress
    except ImportError:
        total = 0
    if total < PROGRESS_MIN_BYTES or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("weights", total=total)
        yield lambda count: bar.advance(task, count)
