"""Options of lm-evaluation-harness tasks, as its Hugging Face backend treats them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.generation import Beam, Greedy, Sample
from jaxformer.json_files import read_json

# Where neither the task nor the folder sets them: the harness's values, and transformers' top-k.
DEFAULT_LENGTH, DEFAULT_MAX_NEW_TOKENS, DEFAULT_TOP_K = 2048, 256, 50
UNLIMITED = 10**20  # transformers writes 10**30 where a tokenizer has no longest text
LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")  # in config.json
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
FILTERS = ("top_k", "top_p", "min_p", "repetition_penalty")
BEAMS = ("num_beams", "length_penalty")
OPTIONS = ("until", "do_sample", "temperature", *LIMITS, *FILTERS, *BEAMS)


def stated_length(folder: Path) -> int:
    """Tokens of the longest text, by the folder's config.json, else by its tokenizer."""
    config = _read(folder / "config.json")
    config = config.get("text_config") or config
    stated = [config[name] for name in LENGTHS if config.get(name)]
    longest = _read(folder / "tokenizer_config.json").get("model_max_length") or UNLIMITED
    return int([*stated, longest if longest < UNLIMITED else DEFAULT_LENGTH][0])


def max_new_tokens(options: Mapping[str, Any]) -> int:
    """Maximum number of tokens of an answer."""
    given = (options[name] for name in LIMITS if options.get(name) is not None)
    return int(next(given, DEFAULT_MAX_NEW_TOKENS))


def task_sampler(options: Mapping[str, Any], folder: Path) -> Greedy | Sample | Beam:
    """The sampler that a task's options say.

    A task that sets neither `do_sample` nor a temperature is greedy. What it does not set is as in
    generation_config.json, except for the temperature.

    Args:
        options: `generation_kwargs` of the task.
        folder: Folder of the model.

    Raises:
        ValueError: An option is not supported, or has an invalid value.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := [name for name in given if name not in OPTIONS]:
        raise ValueError(
            f"The task's generation_kwargs {', '.join(unknown)} are not supported; "
            f"{', '.join(OPTIONS)} are."
        )
    defaults = {k: v for k, v in _read(folder / "generation_config.json").items() if v is not None}
    filters = {name: x[name] for x in (defaults, given) for name in FILTERS if name in x}
    is_sampled = given.get("do_sample", float(given.get("temperature", 0)) > 0)
    if given.get("num_beams", 1) > 1:
        if is_sampled:
            raise ValueError(f"num_beams {given['num_beams']} cannot be combined with do_sample.")
        return Beam(**{name: given[name] for name in BEAMS if name in given})
    penalty = float(filters.pop("repetition_penalty", 1))
    if not is_sampled:
        return Greedy() if penalty == 1 else Sample(top_k=1, repetition_penalty=penalty)
    top_k = int(filters.pop("top_k", DEFAULT_TOP_K)) or None
    return Sample(
        temperature=float(given.get("temperature", 1)),
        top_k=top_k,
        repetition_penalty=penalty,
        **{name: float(value) for name, value in filters.items()},
    )


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
