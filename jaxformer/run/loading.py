"""Loads a model for inference, from the folder of a run or a Hugging Face folder."""

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxformer import data
from jaxformer.config import EncoderDecoder, LoRA, TransformerConfig, from_json
from jaxformer.costs import num_parameters
from jaxformer.errors import naming_fields
from jaxformer.interop import fetch_folder, load_adapter, load_config
from jaxformer.interop.load import read_pretrained
from jaxformer.interop.peft import ADAPTER_CONFIG
from jaxformer.json_files import read_json
from jaxformer.layers.layouts import Layout, decoding_layout, split_layers
from jaxformer.layers.lora import split_parameters
from jaxformer.layers.parameters import storage_dtype
from jaxformer.parallel import abstract_parameters, broadcast_from_process_0, check_divisible
from jaxformer.parallel.plan_report import format_bytes
from jaxformer.run.memory_checks import device_memory_limit
from jaxformer.run.object_store import READ_CACHE_ROOT, download, reached, storage_path
from jaxformer.run.output_folder import RUN_FILE, tokenizer_digest
from jaxformer.run.run_config import context_length, length_warning
from jaxformer.training.checkpoints import Checkpoints

MAX_DEFAULT_LENGTH = 1024  # tokens of context, where an evaluation sets none


class LoadedModel(NamedTuple):
    """A loaded model: configuration, parameters, tokenizer, and its bos and stop tokens.

    Attributes:
        config: Model configuration.
        params: Parameters.
        tokenizer: Tokenizer.
        folder: Folder of the model; for a run in an object store the local copy of its small files.
        bos_tokens: First tokens of a decoder's text, or of an encoder-decoder's output.
        stop_tokens: Tokens that end a text.
        adds_special_tokens: Whether the tokenizer itself adds the special tokens of a prompt.
        row_length: Row length in training, also in the training of the run that it began with, if
            known; of other models only one below 1024.
        step: Step of a run's checkpoint.
        chat_template: Used instead of the folder's; see `data.load_chat_template`.
        base: Folder or hub name of the model without adapters.
        adapter_folder: Folder of adapters that has a tokenizer of its own.
    """

    config: TransformerConfig
    params: Any
    tokenizer: data.Tokenizer
    folder: Path
    bos_tokens: tuple[int, ...]
    stop_tokens: tuple[int, ...]
    adds_special_tokens: bool = False
    row_length: int | None = None
    step: int | None = None
    chat_template: str | None = None
    base: str | None = None
    adapter_folder: Path | None = None

    def __repr__(self) -> str:
        count = num_parameters(self.config)
        return f"LoadedModel(folder={str(self.folder)!r}, step={self.step}, {count:,} parameters)"

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer and the chat template."""
        return self.adapter_folder or self.folder

    @property
    def known_length(self) -> int | None:
        """Context in tokens for which the model was trained, if known."""
        return max(context_length(self.config) or 0, self.row_length or 0) or None

    def print_length_warning(self, what: str, length: int, remedy: str) -> bool:
        """Print to standard error that texts are longer than the model knows; return whether."""
        if note := length_warning(what, length, self.known_length, remedy):
            print(note, file=sys.stderr)
        return note is not None

    def encode_prompt(self, text: str) -> tuple[list[int], list[int] | None]:
        """Encode the decoder's prompt, and the source of an encoder-decoder."""
        ids = self.encode(text, add_special_tokens=self.adds_special_tokens)
        if isinstance(self.config.topology, EncoderDecoder):
            return list(self.bos_tokens), ids or list(self.stop_tokens[:1])
        begins = self.adds_special_tokens or tuple(ids[: len(self.bos_tokens)]) == self.bos_tokens
        return (ids if begins and ids else [*self.bos_tokens, *ids]), None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a prompt, whose text may contain special tokens."""
        if isinstance(self.tokenizer, data.BPETokenizer):
            encode = self.tokenizer.encode_with_special_tokens
            return self._known(encode(text, add_special_tokens=add_special_tokens).tolist())
        return self._known(self.tokenizer.encode(text).tolist())

    def _known(self, ids: list[int]) -> list[int]:
        """Return the ids, or raise if one is outside the model's vocabulary."""
        topology, size = self.config.topology, self.config.vocab_size
        if isinstance(topology, EncoderDecoder):
            size = topology.source_vocab_size or size
        if (largest := max(ids, default=0)) >= size:
            raise ValueError(
                f"The tokenizer in {self.tokenizer_folder} gives token {largest}, but the largest "
                f"token of the model is {size - 1}: the tokenizer does not belong to the model."
            )
        return ids

    def load_chat_template(self) -> data.ChatTemplate:
        """Chat template of the model.

        Raises:
            ValueError: The folder has none.
        """
        chat_template = data.load_chat_template(self.tokenizer_folder, self.chat_template)
        if chat_template is None:
            raise ValueError(
                f"{self.tokenizer_folder} has no chat template: pass --chat-template chatml, or a "
                "file with the template of its training; or use --prompt without --chat."
            )
        return chat_template

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Encode a conversation, up to where the assistant's answer starts.

        Raises:
            ValueError: There is no template, or it raises an error for these messages.
        """
        return self._known(data.encode_chat(messages, self.load_chat_template(), self.tokenizer))

    def encode_continuation(self, text: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenize context and continuation so that they join as one text does."""
        (pair,) = self.continuations(text, [continuation])
        return pair

    def continuations(self, text: str, choices: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Tokenize a decoder's text and each choice that continues it, as pairs.

        Spaces at the end of the text belong to the choices, as tokenizers merge them with the next
        word. If a choice merges with the last tokens of the text, these tokens belong to every
        choice, so that all have the same context.

        Raises:
            ValueError: The text is empty, and a choice has no token.
        """
        before = text.rstrip()
        if before:
            first = self.encode_prompt(before)[0]
            wholes = [self.encode_prompt(text + choice)[0] for choice in choices]
        else:
            first = []
            wholes = [self.encode(text + c, add_special_tokens=False) for c in choices]
        if not all(wholes):
            raise ValueError(f"The tokenizer has no token for one of the choices {choices}.")
        shared = min(len(commonprefix([first, *wholes])), *(len(whole) - 1 for whole in wholes))
        return [(first[:shared] or [self.bos_tokens[0]], whole[shared:]) for whole in wholes]


@naming_fields()
def load_run(
    folder: str | Path,
    step: int | Literal["best"] | None = None,
    *,
    ignore: Collection[str] = (),
    mesh: Mesh | None = None,
    dtype: DTypeLike = "float32",
    layout: Layout | None = None,
) -> LoadedModel:
    """Load a model from a run folder, a Hugging Face folder, or a PEFT folder and its base model.

        import jaxformer
        model = jaxformer.run.load_run("runs/pretrain-1")
        jaxformer.generate(model.config, model.params, [[1, 20]], max_new_tokens=8)

    Args:
        folder: Output of a training run, a folder with config.json and safetensors, or one with
            adapter_config.json.
        step: Step of a run's checkpoint; None is the newest, "best" the one with the lowest
            held-out loss.
        ignore: Attributes of config.json to ignore, if they do not affect the model.
        mesh: Mesh over which the parameters are sharded.
        dtype: Dtype of the parameters.
        layout: Layout of the layers; None is the faster one to decode.

    Returns:
        Configuration, parameters and tokenizer, with what else generation needs.

    Raises:
        ValueError: The folder is neither, or damaged; or `step` or `ignore` does not apply to it.
    """
    folder = Path(folder).expanduser()
    if (reached(folder) / "checkpoints").is_dir():
        if ignore:
            raise ValueError(f"--ignore is for a Hugging Face folder; {folder} is a run.")
        return load_from_run(folder, step, mesh, dtype, layout)
    if (folder / "config.json").is_file():
        if step is not None:
            checkpoint_text = f"{step} checkpoint" if step == "best" else f"checkpoint {step}"
            raise ValueError(f"{folder} is a Hugging Face folder; it has no {checkpoint_text}.")
        return load_from_hugging_face(folder, ignore, mesh, dtype, layout)
    if (folder / ADAPTER_CONFIG).is_file():
        base = str(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))
        options: Any = dict(ignore=ignore, mesh=mesh, dtype=dtype, layout=layout)
        model = load_run(fetch_folder(base), step, **options)
        config, params = load_adapter(folder, model.config, model.params)
        model = model._replace(config=config, params=params, base=base)
        return with_tokenizer(model, folder) if (folder / "tokenizer.json").is_file() else model
    if not folder.exists():
        raise ValueError(f"There is no folder {folder} to take a model from (checkpoint).")
    raise ValueError(
        f"{folder} has no checkpoints and no config.json; pass the output folder of a run, or a "
        "Hugging Face or PEFT folder."
    )


def with_tokenizer(model: LoadedModel, folder: Path) -> LoadedModel:
    """The model with the tokenizer, stop tokens and chat template of its adapters' training."""
    tokenizer = data.load_tokenizer(folder)
    stop = dict.fromkeys((*stop_tokens(folder, tokenizer), *model.stop_tokens))
    return model._replace(tokenizer=tokenizer, stop_tokens=tuple(stop), adapter_folder=folder)


def load_initial_params(
    folder: Path, mesh: Mesh, dtype: DTypeLike, adapter: LoRA | None = None
) -> Any:
    """Parameters of the folder that --init names, for a model with this adapter.

    A Hugging Face folder needs no tokenizer: the run may have another one.

    Raises:
        ValueError: The folder has no model, or has another adapter.
    """
    if (folder / "config.json").is_file() and not (reached(folder) / "checkpoints").is_dir():
        return read_pretrained(folder, dtype, mesh=mesh, layout="stacked").params
    model = load_run(folder, mesh=mesh, dtype=dtype, layout="stacked")
    if model.config.adapter not in (None, adapter):
        raise ValueError(
            f"The model of {folder} has the adapters {model.config.adapter}; merge them before you "
            f"train others: jaxformer export --checkpoint {folder} --merge --output FOLDER."
        )
    return model.params


def config_of_description(saved: dict[str, Any], folder: Path) -> TransformerConfig:
    """Model configuration from the description of a checkpoint, with the context of its run."""
    kinds = {"config": dict, "run": dict, "tokenizer": str}
    if missing_keys := [
        name for name, kind in kinds.items() if not isinstance(saved.get(name), kind)
    ]:
        raise ValueError(
            f"The description of a checkpoint in {folder} has no {', '.join(missing_keys)}: "
            "another program saved it. Read it with jaxformer.training.checkpoints.Checkpoints."
        )
    config = from_json(TransformerConfig, json.dumps(saved["config"]))
    lengths = filter(None, (config.max_position_embeddings, saved["run"].get("length")))
    return replace(config, max_position_embeddings=max(lengths, default=None))


def load_from_run(
    folder: Path,
    step: int | Literal["best"] | None,
    mesh: Mesh | None,
    dtype: DTypeLike,
    layout: Layout | None,
) -> LoadedModel:
    """Load configuration, parameters and tokenizer of a training run."""
    with Checkpoints(storage_path(folder) / "checkpoints") as checkpoints:
        if step is None:
            step = checkpoints.latest_valid_step()
        elif step == "best":
            step = checkpoints.best_step()
            if step is None:
                raise ValueError(
                    f"No checkpoint in {folder} has a held-out loss, so there is no best one; "
                    "leave out --step for the newest."
                )
        description = checkpoints.read_description(step)
        config = config_of_description(description, folder)
        if mesh is not None:
            check_divisible(config, mesh.shape)
            check_fits(folder, config, mesh, dtype)
        by_layer, params = (layout or decoding_layout(config)) == "by_layer", dict[str, Any]()
        shapes = split_parameters(config.adapter, abstract_parameters(config, mesh))
        for path, array in checkpoints.restore_one_by_one(step, shapes):
            path = path.partition("/")[2]  # without "frozen" or "trained"
            arrays = {path: array.astype(storage_dtype(path, dtype))}
            params |= split_layers(config, arrays) if by_layer else arrays
    local_folder = download(folder, READ_CACHE_ROOT)
    tokenizer = data.load_tokenizer(local_folder)
    if tokenizer_digest(tokenizer) != description["tokenizer"]:
        raise ValueError(
            f"The tokenizer in {folder} is not the one the checkpoint was trained with."
        )
    pairs = isinstance(config.topology, EncoderDecoder)
    start = (tokenizer.end_of_text if pairs else data.bos_token_id(tokenizer),)
    stop = learned_stop(local_folder, tokenizer)
    lengths = [run["length"] for run in runs_of(local_folder) if run.get("length")]
    return LoadedModel(
        config,
        unflatten_dict(params, sep="/"),
        tokenizer,
        local_folder,
        start,
        stop,
        row_length=max(lengths, default=None),
        step=step,
        base=base_of_run(local_folder),
    )


def check_fits(folder: Path, config: TransformerConfig, mesh: Mesh, dtype: DTypeLike) -> None:
    """Raise ValueError if the parameters in this dtype need more memory than a device has."""
    limit = device_memory_limit()
    shapes = flatten_dict(abstract_parameters(config, mesh), sep="/")
    needed = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * storage_dtype(path, dtype).itemsize
        for path, x in shapes.items()
    )
    if limit is not None and needed > limit:
        raise ValueError(
            f"The parameters of {folder} need {format_bytes(needed)} per device in "
            f"{jnp.dtype(dtype)}, but a device has {format_bytes(limit)}. Take a narrower --dtype, "
            "or more devices and --mesh.tensor."
        )


def runs_of(folder: Path) -> Iterator[dict[str, Any]]:
    """run.json of a run, of the run that it began with, and so on."""
    if (folder / RUN_FILE).is_file():
        yield (run := read_json(folder / RUN_FILE))
        if run.get("init") is not None:
            yield from runs_of(Path(run["init"]))


def base_of_run(folder: Path) -> str | None:
    """Folder or hub name that a run began with; of runs that trained adapters, the first's."""
    first, *before = [*runs_of(folder)] or [{}]
    with_adapters = takewhile(lambda run: (run.get("model") or {}).get("adapter"), before)
    return [first, *with_adapters][-1].get("init")


def load_from_hugging_face(
    folder: Path,
    ignore: Collection[str],
    mesh: Mesh | None,
    dtype: DTypeLike,
    layout: Layout | None,
) -> LoadedModel:
    """Load configuration, parameters, tokenizer and special tokens of a Hugging Face folder."""
    tokenizer = data.load_tokenizer(folder)
    if mesh is not None:
        check_fits(folder, load_config(folder, ignore=ignore), mesh, dtype)
    config, params = read_pretrained(folder, dtype, ignore=ignore, mesh=mesh, layout=layout)
    settings, stop = generation_ids(folder), stop_tokens(folder, tokenizer)
    start = (settings.get("bos_token_id", stop[0]),)
    if isinstance(config.topology, EncoderDecoder):
        start = (settings.get("decoder_start_token_id", settings.get("pad_token_id", start[0])),)
    longest = settings.get("max_position_embeddings", math.inf)
    return LoadedModel(
        config,
        params,
        tokenizer,
        folder,
        start,
        stop,
        adds_special_tokens=True,
        row_length=longest if longest < MAX_DEFAULT_LENGTH else None,
    )


def generation_ids(folder: Path) -> dict[str, Any]:
    """Fields of a folder's config.json, updated by generation_config.json."""
    settings: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            contents = read_json(folder / name)
            settings |= {key: value for key, value in contents.items() if value is not None}
    return settings


def stop_tokens(folder: Path, tokenizer: data.Tokenizer) -> tuple[int, ...]:
    """Stop tokens: eos_token_id of the folder's JSON files, else the tokenizer's end of text."""
    ends = generation_ids(folder).get("eos_token_id", tokenizer.end_of_text)
    return tuple(ends) if isinstance(ends, list) else (ends,)


def shared_stop_tokens(output: Path, tokenizer: data.Tokenizer) -> tuple[int, ...]:
    """Stop tokens of a run, by the copies in the output folder of process 0."""
    return tuple(broadcast_from_process_0(lambda: learned_stop(output, tokenizer)))


def learned_stop(folder: Path, tokenizer: data.Tokenizer) -> tuple[int, ...]:
    """Stop tokens of a run: the stop tokens of --init, and the tokenizer's end of text."""
    return tuple(dict.fromkeys((*stop_tokens(folder, tokenizer), tokenizer.end_of_text)))
