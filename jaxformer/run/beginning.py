"""Settings that a run takes from the run it resumes and from the model of --init."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxformer.checks import shown
from jaxformer.data import Packed, PretrainedTokenizer, fetch_tokenizer, max_vocab_size
from jaxformer.interop import fetch_folder, load_config
from jaxformer.interop.peft import ADAPTER_CONFIG
from jaxformer.run.loading import config_of_description
from jaxformer.run.resume import load_resumed_run
from jaxformer.run.run_config import AnyRunConfig, context_length
from jaxformer.training.checkpoints import Checkpoints

VOCAB_MULTIPLE = 128  # ids; the width of a tile of the matrix units
RATE_WIDTH = 1024  # narrower models get a higher rate
FOLLOW_INIT = frozenset(("model", "tokenizer", "length", "optimizer"))  # fields
ADAPTER_RATE = 10  # times the rate of all parameters


def begin(run: AnyRunConfig, runs: Mapping[str, AnyRunConfig]) -> AnyRunConfig:
    """The run that its command would begin, were each given field a flag.

    Args:
        run: The run. Fields that are not given follow from `resume` and `init`. Of a run by
            `dataclasses.replace`, fields equal to their defaults follow from `init` alone.
        runs: Named runs.

    Raises:
        ValueError: The run is of another program, there is no run to resume, or `init` has no
            model.
    """
    default = next(iter(runs.values()))
    if type(run) is not type(default):
        raise ValueError(f"This program takes a {type(default).__name__}; got {shown(run)}.")
    chosen = {name: getattr(run, name) for name in run.given}
    resumes, is_whole = run.resume or run.resume_or_begin, len(chosen) == len(fields(run))
    begun, is_new = begun_default(default, run.init, run.output, resumes=resumes)
    if is_whole:
        chosen = {name: x for name, x in chosen.items() if x != getattr(default, name)}
    if is_whole and not is_new:
        names = FOLLOW_INIT & vars(begun).keys() if run.init is not None else ()
        begun = replace(default, **{name: getattr(begun, name) for name in names})
    return completed(
        replace(begun, **chosen),
        begun,
        tunes=is_new and "optimizer" not in chosen,
        keeps_vocabulary="model" in chosen,
    )


def begun_default(
    default: AnyRunConfig, init: str | None, output: Path | None, *, resumes: bool
) -> tuple[AnyRunConfig, bool]:
    """The run before its flags, and whether the model of `init` is new to it.

    Args:
        default: Named run.
        init: Value of --init.
        output: Value of --output.
        resumes: Whether the saved settings of `output` replace the named run.
    """
    if resumes:
        default = load_resumed_run(default, output)
    is_new = init not in (None, default.init)  # a resumed run has it already
    return (run_from_checkpoint(default, str(init)) if is_new else default), is_new


def completed(
    run: AnyRunConfig, begun: AnyRunConfig, *, tunes: bool, keeps_vocabulary: bool
) -> AnyRunConfig:
    """The run with what follows from its flags: learning rate, tokenizer and vocabulary.

    Args:
        run: The run with its flags.
        begun: The run without them.
        tunes: Whether the learning rate follows from the model.
        keeps_vocabulary: Whether a flag sets the vocabulary.
    """
    run = run.tuned() if tunes else run
    return with_tokenizer(run, begun, keeps_vocabulary=keeps_vocabulary)


def with_tokenizer(
    run: AnyRunConfig, default: AnyRunConfig, *, keeps_vocabulary: bool
) -> AnyRunConfig:
    """The run with the tokenizer of its corpus, and with the vocabulary of its tokenizer.

    A tokenized corpus may bring its tokenizer. If the tokenizer differs from the default's, the
    vocabulary is its size, rounded up to a multiple of `VOCAB_MULTIPLE`, unless a flag or --init
    sets it, or only the text tells it (`Characters`).
    """
    old, new = default.tokenizer, run.tokenizer
    corpus: Any = getattr(run, "corpus", None)
    cache: Any = getattr(run, "cache", None)
    if isinstance(corpus, Packed) and old == new and not isinstance(new, PretrainedTokenizer):
        folder = fetch_tokenizer(corpus, cache)
        if (folder / "tokenizer.json").exists():
            new = PretrainedTokenizer(path=str(folder))
            run = replace(run, tokenizer=new)
    keeps_vocabulary = keeps_vocabulary or old == new or run.init is not None
    if keeps_vocabulary or (size := max_vocab_size(new)) is None:
        return run
    vocab_size = -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return replace(run, model=replace(run.model, vocab_size=vocab_size))


def tuned_run(run: AnyRunConfig) -> AnyRunConfig:
    """The run with a learning rate for the width of its model, and for adapters.

    AdamW updates change a kernel's outputs in proportion to its input width, so the rate for
    `RATE_WIDTH` is multiplied by `RATE_WIDTH` / width for narrower models. Adapters
    learn best at `ADAPTER_RATE` times the rate of all parameters.

    References:
        Yang et al., Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter
        Transfer, 2022. arXiv:2203.03466, table 3. Schulman et al., LoRA Without Regret, 2025.
        Thinking Machines Lab, doi:10.64434/tml.20250929
    """
    schedule, factor = run.optimizer.schedule, max(1.0, RATE_WIDTH / run.model.model_dim)
    factor *= 1 if run.model.adapter is None else ADAPTER_RATE
    schedule = replace(schedule, peak=float(f"{factor * schedule.peak:.3g}"))
    return replace(run, optimizer=replace(run.optimizer, schedule=schedule))


def run_from_checkpoint(run: AnyRunConfig, name: str) -> AnyRunConfig:
    """The run with the model and tokenizer of the folder that --init names.

    Args:
        run: The run to change.
        name: Folder, or name on the Hugging Face hub.

    Raises:
        ValueError: There is no such folder, or it has no model.
    """
    folder = fetch_folder(name)
    if not folder.exists():
        raise ValueError(
            f"There is no folder {name!r}. --init takes a folder with config.json and safetensors, "
            "the output of a run, or a hub name OWNER/NAME such as openai-community/gpt2; without "
            "a network, run `hf download OWNER/NAME` elsewhere and copy its folder."
        )
    if (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder} has the adapters of another model. Merge them first: "
            f"jaxformer export --checkpoint {folder} --merge --output FOLDER."
        )
    if (folder / "checkpoints").is_dir():
        with Checkpoints(folder / "checkpoints") as checkpoints:
            model = config_of_description(checkpoints.read_description(), folder)
    else:
        model = load_config(folder)
    changes: dict[str, Any] = {"model": model, "init": name}
    changes["tokenizer"] = PretrainedTokenizer(path=str(folder))
    length = getattr(run, "length", None)
    if length is not None:
        changes["length"] = min(length, context_length(model) or length)
    return replace(run, **changes)
