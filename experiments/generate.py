"""Continue a prompt with a trained model, token by token on the terminal.

    python -m experiments.generate --checkpoint runs/pretrain-1 --prompt "def main("
    python -m experiments.generate --checkpoint runs/translate-1 --prompt "2nd of April, 1987"
    python -m experiments.generate --checkpoint RUN --rope-scaling "NTKScaling(factor=4)"
    python -m experiments.generate --checkpoint path/to/Llama-3.1-8B --prompt "Once upon"

The folder is the output of a run, or a Hugging Face folder (config.json, safetensors,
tokenizer.json). An encoder-decoder reads the prompt and writes its answer.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from experiments.command_line import parse, readable_errors
from experiments.trained import load_trained
from experiments.training.run import check_numbers, chosen_devices, prepare_devices
from jaxformer.config import RopeScaling
from jaxformer.generation import Beam, Greedy, Sample, generate, stream
from jaxformer.parallel import Hosts, MeshConfig, make_mesh
from jaxformer.training.progress import printable


@dataclass(frozen=True, kw_only=True)
class Generate:
    """What to continue, and how.

    Attributes:
        checkpoint: Output folder of a run, or a Hugging Face folder.
        prompt: The text to continue, or an encoder-decoder's source; empty starts a document.
        step: Which checkpoint of the run; None is the newest.
        max_new_tokens: Most tokens to add; a text may end before.
        sampler: How each token is chosen. A beam search shows its text when it is done.
        rope_scaling: How rotary positions are stretched, for texts longer than those of training;
            None leaves them as the checkpoint has them.
        dtype: Of the computation.
        mesh: How the devices share the model: heads along tensor, kernels along fsdp.
        devices: How many devices to use, of each process; None is all. On a CPU, how many to
            simulate.
        distributed: Whether this is one of many processes, each started with the same command.
        hosts: How the processes find each other.
        seed: Of the random choices.
        ignore: Attributes of a Hugging Face config.json that change nothing in the model, by your
            word.
    """

    checkpoint: Path
    prompt: str = ""
    step: int | None = None
    max_new_tokens: int = 160
    sampler: Greedy | Sample | Beam = Sample(temperature=0.8, top_p=0.95)
    rope_scaling: RopeScaling | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    mesh: MeshConfig = MeshConfig()
    devices: int | None = 1
    distributed: bool = False
    hosts: Hosts = Hosts()
    seed: int = 0
    ignore: tuple[str, ...] = ()

    def __post_init__(self):
        check_numbers(self)


def main(run: Generate) -> str:
    """Print the prompt and its continuation as it grows; returns them."""
    prepare_devices(run)
    mesh = make_mesh(run.mesh, chosen_devices(run.devices))
    model = load_trained(run.checkpoint, run.step, ignore=run.ignore, mesh=mesh)
    config = model.config
    if run.rope_scaling is not None:
        config = config.with_rope_scaling(run.rope_scaling)
    prompt, source = model.inputs(run.prompt)
    options: dict[str, Any] = {
        "max_new_tokens": run.max_new_tokens,
        "stop_tokens": model.stop,
        "source": None if source is None else [source],
        "vocab_size": min(model.tokenizer.vocab_size, config.vocab_size),
        "key": jax.random.key(run.seed),
        "dtype": run.dtype,
        "mesh": mesh,
    }
    if isinstance(run.sampler, Beam):
        found = generate(config, model.params, [prompt], sampler=run.sampler, **options)
        tokens: Iterable[int] = cut(np.asarray(found)[0, len(prompt) :].tolist(), model.stop)
    else:
        rows = stream(config, model.params, [prompt], sampler=run.sampler, **options)
        tokens = (int(row[0]) for row in rows)
    text = "" if source is not None else run.prompt
    show(text)
    for piece in pieces(tokens, model.tokenizer.decode, prompt):
        show(piece)
        text += piece
    show("\n")
    return text


def show(text: str) -> None:
    """Write to the terminal at once."""
    print(printable(text, sys.stdout), end="", flush=True)


def cut(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """Tokens up to the first that ends a text."""
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0]] if ends else tokens


def pieces(
    tokens: Iterable[int], decode: Callable[[list[int]], str], before: list[int]
) -> Iterator[str]:
    """The text of each token in turn; one that is part of a character waits for the rest."""
    ids, shown = list(before), decode(before)
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield decode(ids)[len(shown) :]


RUNS = {"default": Generate(checkpoint=Path("runs/pretrain-1"))}

if __name__ == "__main__":
    with readable_errors():
        main(parse(RUNS, __doc__))
