"""Export a trained model and its tokenizer as a Hugging Face folder.

    jaxformer export --checkpoint runs/pretrain-1 --output exported
    jaxformer export --checkpoint runs/pretrain-1 --output exported --step best
    jaxformer export --checkpoint runs/pretrain-1 --output exported --push OWNER/NAME

Writes config.json, generation_config.json, model.safetensors, tokenizer.json,
tokenizer_config.json and a model card, or nothing if it fails; of a model with adapters their
folder for PEFT, or with --merge the whole model. Then, in transformers:

    model = AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = AutoTokenizer.from_pretrained("exported")
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from jaxformer import data
from jaxformer.checks import Checked
from jaxformer.config import EncoderDecoder
from jaxformer.errors import naming_fields
from jaxformer.interop import load_config
from jaxformer.interop.config_comparison import canonical, config_differences
from jaxformer.interop.hub import check_hub_name, push_folder
from jaxformer.interop.peft import ADAPTER_CONFIG, write_adapter
from jaxformer.interop.save import (
    atomic_folder,
    check_output_folder,
    choose_family,
    save_pretrained,
)
from jaxformer.json_files import read_json
from jaxformer.layers import merge_lora
from jaxformer.run.command_line import run_program
from jaxformer.run.loading import LoadedModel, generation_ids, load_run
from jaxformer.run.model_card import CARD_FILE, model_card
from jaxformer.run.object_store import here
from jaxformer.run.output_folder import TOKENIZER_FILES, copy_files
from jaxformer.run.run_config import check_uses

GENERATION_CONFIG = "generation_config.json"
TEMPLATE = "chat_template.jinja"
SPECIAL_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True, kw_only=True)
class Export(Checked):
    """Options: the model folder and the folder to write.

    Attributes:
        checkpoint: Output folder of a run, or a Hugging Face folder.
        output: Folder to write; it must be new or empty.
        overwrite: Whether to replace a model in the output folder.
        step: Step of the run's checkpoint; None is the newest, "best" the one with the lowest
            held-out loss.
        family: model_type of transformers to write, such as "qwen3"; None is the first that can
            express the model.
        dtype: Dtype of the tensors in the files; None is the dtype of a Hugging Face folder, or
            float32 for a run.
        ignore: Attributes of a Hugging Face config.json to ignore, if they do not affect the model.
        merge: Whether to merge the adapters of a model into its weights, instead of writing a
            folder of adapters for PEFT.
        push: Repository OWNER/NAME of the Hugging Face hub, to which the folder is uploaded too;
            needs the extra hub, and `hf auth login` once.
        private: Whether a new repository is private.
    """

    checkpoint: Path
    output: Path
    step: int | Literal["best"] | None = None
    family: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    overwrite: bool = False
    ignore: tuple[str, ...] = ()
    merge: bool = False
    push: str | None = None
    private: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_uses(self, needs={"private": "push"})
        if self.push is not None:
            check_hub_name(self.push)


RUNS = {"default": Export(checkpoint=Path("runs/pretrain-1"), output=Path("exported"))}


@naming_fields()
def export(run: Export) -> Path:
    """Write a trained model and its tokenizer as a folder that transformers can load.

        from jaxformer import run
        folder = run.export(run.Export(checkpoint="runs/pretrain-1", output="mine"))
        model = run.load_run(folder)

    Args:
        run: The model and the folder to write.

    Returns:
        The folder.

    Raises:
        ValueError: No family can represent the model, the folder has files, or the upload failed.
    """
    output = write_folder(run)
    if run.push is not None:
        print(f"Uploaded to {push_folder(output, run.push, private=run.private)}.")
    return output


def write_folder(run: Export) -> Path:
    """Write the folder, of a whole model or of adapters; see `export`."""
    output = check_output_folder(here(run.output), overwrite=run.overwrite)
    model = load_run(run.checkpoint, run.step, ignore=run.ignore)
    # A Hugging Face folder, or a run that was initialized from one and has a copy of its files.
    source = model.folder if (model.folder / "config.json").is_file() else None
    if model.config.adapter is not None and not run.merge:
        return export_adapter(run, model, source, output)
    if model.config.adapter is None and run.merge:
        raise ValueError(f"--merge is for a model with adapters; {run.checkpoint} has none.")
    config, params = merge_lora(model.config, model.params)
    model = model._replace(config=config, params=params)
    extra = special_token_ids(model, source)
    if (length := max_positions(model, source)) is not None:
        extra["max_position_embeddings"] = length
    family, _ = choose_family(model.config, extra, run.family)
    hf_config = unchanged_hf_config(model, source, family.model_type, run.ignore)
    extra |= family.absorbed_fields(hf_config)
    dtype = run.dtype or (config_dtype(hf_config) if model.step is None else "float32")
    with atomic_folder(output) as folder:
        save_pretrained(
            folder,
            model.config,
            model.params,
            dtype=jnp.dtype(dtype),
            extra=extra,
            family=family.model_type,
        )
        write_tokenizer(model, source, folder)
        if hf_config:
            write_json(folder / "config.json", with_dtype(hf_config, dtype))
        if (generation_json := generation_config(model, source, extra)) is not None:
            write_json(folder / GENERATION_CONFIG, generation_json)
        if model.step is None and source is not None:
            copy_files(source, folder, CARD_FILE)
        else:
            text = model_card(model, f"A {family.model_type}", run.push or output.name)
            (folder / CARD_FILE).write_text(text, encoding="utf-8")
    checkpoint_text = "" if model.step is None else f"checkpoint {model.step} of "
    print(f"Exported {checkpoint_text}{run.checkpoint} as {family.model_type} to {output}.")
    return output


def main(arguments: list[str] | None = None) -> None:
    """Export by the command line."""
    run_program(export, RUNS, __doc__, arguments)


def export_adapter(run: Export, model: LoadedModel, source: Path | None, output: Path) -> Path:
    """Write a folder of adapters that PEFT loads onto the base model, and the tokenizer."""
    with atomic_folder(output) as folder:
        dtype = None if run.dtype is None else jnp.dtype(run.dtype)
        write_adapter(folder, model.config, model.params, base=model.base, dtype=dtype)
        write_tokenizer(model, source, folder)
        if (run.checkpoint / ADAPTER_CONFIG).is_file():
            copy_files(run.checkpoint, folder, CARD_FILE)
        else:
            text = model_card(model, "Low-rank adapters", run.push or output.name)
            (folder / CARD_FILE).write_text(text, encoding="utf-8")
    print(f"Exported the adapters of {run.checkpoint} to {output}; --merge writes the whole model.")
    if model.base is not None and (Path(model.base) / "checkpoints").is_dir():
        print(
            f"PEFT does not read their base, the run {model.base}: export it too, and name its "
            "folder as base_model_name_or_path."
        )
    return output


def special_token_ids(model: LoadedModel, source: Path | None) -> dict[str, Any]:
    """bos, eos and pad ids for config.json, from the source folder or the tokenizer of the run."""
    if source is not None:
        hf_config = read_json(source / "config.json")
        return {name: hf_config[name] for name in SPECIAL_TOKEN_FIELDS if name in hf_config}
    ids = {"bos_token_id": model.bos_tokens[0], "eos_token_id": model.stop_tokens[0]}
    if isinstance(model.config.topology, EncoderDecoder):
        ids["decoder_start_token_id"] = model.bos_tokens[0]
    return ids


def max_positions(model: LoadedModel, source: Path | None) -> int | None:
    """max_position_embeddings of the source, at least the row length; None without plain RoPE.

    With other position encodings the logits may depend on this number.
    """
    hf_config = None if source is None else read_json(source / "config.json")
    lengths = (hf_config or {}).get("max_position_embeddings"), model.row_length
    longest = max((length for length in lengths if length is not None), default=None)
    ropes = [layer.rope for layer in model.config.layers if layer.rope is not None]
    plain = ropes and all(rope.scaling is None for rope in ropes)
    return longest if plain else None


def write_tokenizer(model: LoadedModel, source: Path | None, folder: Path) -> None:
    """Write tokenizer.json for transformers, or copy the files of the Hugging Face folder."""
    if source is None:
        begins = not isinstance(model.config.topology, EncoderDecoder)
        template = model.tokenizer_folder / TEMPLATE
        templated = template.is_file()
        data.export_tokenizer(
            model.tokenizer, folder, add_bos=begins, split_special_tokens=not templated
        )
        if templated:
            shutil.copy(template, folder)
        return
    copy_files(model.adapter_folder or source, folder, *TOKENIZER_FILES)


def unchanged_hf_config(
    model: LoadedModel, source: Path | None, family: str, ignore: tuple[str, ...]
) -> dict[str, Any]:
    """config.json of the source folder if it still describes this model, else {}."""
    if source is None:
        return {}
    hf_config = read_json(source / "config.json")
    source_config = canonical(load_config(source, ignore=ignore))
    same = (
        not config_differences(source_config, canonical(model.config))
        and hf_config["model_type"] == family
    )
    return hf_config if same else {}


def config_dtype(hf_config: dict[str, Any]) -> str:
    """`dtype` of a config.json, or `torch_dtype` of older ones; float32 by default."""
    return hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"


def with_dtype(hf_config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Copy of a config.json with its dtype set."""
    if config_dtype(hf_config) == dtype:
        return hf_config
    return {**hf_config, "dtype" if "dtype" in hf_config else "torch_dtype": dtype}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def generation_config(
    model: LoadedModel, source: Path | None, extra: dict[str, Any]
) -> dict[str, Any] | None:
    """Fields of generation_config.json: eos, pad and decoder start ids; None without any.

    A pad_token_id in config.json would stop torch from training the embedding of that token.
    """
    if source is not None:
        path, ends = source / GENERATION_CONFIG, generation_ids(source).get("eos_token_id")
        fields, stop = read_json(path) if path.is_file() else None, list(model.stop_tokens)
        if model.step is None or stop in (ends, [ends]):
            return fields
        return {**(fields or {}), "eos_token_id": stop if len(stop) > 1 else stop[0]}  # as trained
    fields = {name: extra[name] for name in SPECIAL_TOKEN_FIELDS if extra.get(name) is not None}
    fields["pad_token_id"] = model.stop_tokens[0]
    unused = list(range(model.tokenizer.vocab_size, model.config.vocab_size))
    return fields | ({"suppress_tokens": unused} if unused else {})  # never trained
