"""Generate text with a trained model, streamed to the terminal.

    python -m experiments.generate --checkpoint runs/pretrain-1 --prompt "def main("
    python -m experiments.generate --checkpoint runs/translate-1 --prompt "2nd of April, 1987"
    python -m experiments.generate --checkpoint RUN --rope-scaling "NTKScaling(factor=4)"
    python -m experiments.generate --checkpoint path/to/Llama-3.1-8B --prompt "Once upon"
    python -m experiments.generate --checkpoint path/to/folder --chat        # talk to it
    python -m experiments.generate --checkpoint RUN --prompts asked.txt --output said.jsonl

The folder is the output of a run, or a Hugging Face folder (config.json, safetensors,
tokenizer.json). An encoder-decoder reads the prompt and writes its answer. A conversation is
written by the chat template of the folder; an empty line ends it.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.command_line import parse, readable_errors
from experiments.trained import Trained, load_trained
from experiments.training.run import check_numbers, check_uses, chosen_devices, prepare_devices
from jaxformer import data
from jaxformer.config import RopeScaling
from jaxformer.generation import Beam, Greedy, Sample, generate, stream
from jaxformer.generation.prompts import make_request
from jaxformer.parallel import Hosts, MeshConfig, is_first, make_mesh
from jaxformer.training.progress import printable


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Options: the model, the prompt and the sampling.

    Attributes:
        checkpoint: Output folder of a run, or a Hugging Face folder.
        prompt: The text to continue, or an encoder-decoder's source; empty starts a document.
        chat: Answer as an assistant: what is typed, line by line, or --prompt or each of --prompts.
        chat_template: How a conversation is written, instead of as the folder says: a file of
            Jinja, or "chatml".
        system: What a conversation begins with, said by the system; empty is nothing.
        prompts: Texts to continue: each line of a file, an empty one too, or of JSON lines the
            field "prompt". The file may be packed.
        batch_size: Prompts of the file that are continued together.
        output: JSON lines for the prompts and their texts, in a file that is there once all are
            written; None prints them.
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
    chat: bool = False
    chat_template: str | None = None
    system: str = ""
    prompts: Path | None = None
    batch_size: int = 8
    output: Path | None = None
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
        check_uses(
            self,
            needs={
                "system": "chat",
                "chat_template": "chat",
                "output": "prompts",
                "batch_size": "prompts",
            },
            excludes={"prompt": "prompts"},
        )


class Prompt(NamedTuple):
    """A text, the tokens to continue, and those that an encoder reads."""

    text: str
    tokens: list[int]
    source: list[int] | None


class Speaker(NamedTuple):
    """A loaded model with its generation options."""

    model: Trained
    run: Generate
    mesh: Mesh

    def read(self, text: str) -> tuple[list[int], list[int] | None]:
        """Encode a prompt, or a question with the chat template, and an encoder's source.

        Raises:
            ValueError: It cannot be encoded.
        """
        if not self.run.chat:
            return self.model.inputs(text)
        return self.model.asked([*self.opening(), {"role": "user", "content": text}]), None

    def read_line(self, text: str, where: str) -> Prompt:
        """The same of a text in a file, if it can be continued.

        Raises:
            ValueError: It cannot; says where the text stands.
        """
        try:
            tokens, source = self.read(text)
            make_request(
                self.model.config,
                [tokens],
                max_new_tokens=self.run.max_new_tokens,
                source=None if source is None else [source],
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return Prompt(text, tokens, source)

    def opening(self) -> list[dict[str, str]]:
        """The system message, as a list of none or one."""
        return [{"role": "system", "content": self.run.system}] if self.run.system else []

    def options(self, seed: int) -> dict[str, Any]:
        """Keyword arguments of `jaxformer.generate`."""
        return {
            "max_new_tokens": self.run.max_new_tokens,
            "stop_tokens": self.model.stop,
            "vocab_size": min(self.model.tokenizer.vocab_size, self.model.config.vocab_size),
            "key": jax.random.key(seed),
            "dtype": self.run.dtype,
            "mesh": self.mesh,
            "sampler": self.run.sampler,
        }


def main(run: Generate) -> str:
    """Print generated text as it is decoded; returns it."""
    prepare_devices(run)
    if run.prompts is not None:
        texts = data.lines(run.prompts, field="prompt")
        with output_file(run.output if is_first() else None) as file:
            return continue_all(load_speaker(run), texts, file)
    generator = load_speaker(run)
    if run.chat and not run.prompt:
        return converse(generator)
    prompt, source = generator.read(run.prompt)
    text = "" if source is not None or run.chat else run.prompt
    show(text)
    return text + say(generator, prompt, source, seed=run.seed)


def load_speaker(run: Generate) -> Speaker:
    """The model of a folder, on its devices."""
    mesh = make_mesh(run.mesh, chosen_devices(run.devices))
    model = load_trained(run.checkpoint, run.step, ignore=run.ignore, mesh=mesh)
    model = model._replace(chat_template=run.chat_template)
    if run.rope_scaling is not None:
        model = model._replace(config=model.config.with_rope_scaling(run.rope_scaling))
    return Speaker(model, run, mesh)


def say(speaker: Speaker, prompt: list[int], source: list[int] | None = None, *, seed: int) -> str:
    """Print the continuation of a prompt token by token; returns it."""
    model, options = speaker.model, speaker.options(seed)
    options["source"] = None if source is None else [source]
    if isinstance(speaker.run.sampler, Beam):
        generated = generate(model.config, model.params, [prompt], **options)
        tokens: Iterable[int] = cut(np.asarray(generated)[0, len(prompt) :].tolist(), model.stop)
    else:
        rows = stream(model.config, model.params, [prompt], **options)
        tokens = (int(row[0]) for row in rows)
    text = ""
    for piece in pieces(tokens, model.tokenizer.decode, prompt):
        show(piece)
        text += piece
    show("\n")
    return text


def converse(speaker: Speaker) -> str:
    """Chat on the terminal: answer each typed line, given all before; returns the last answer."""
    speaker.model.template()  # before anything is typed
    messages, answer = speaker.opening(), ""
    for turn in count():
        show("> ")
        user_text = sys.stdin.readline().strip()
        if not user_text:
            show("\n")
            return answer
        messages.append({"role": "user", "content": user_text})
        answer = say(speaker, speaker.model.asked(messages), seed=speaker.run.seed + turn)
        messages.append({"role": "assistant", "content": answer})
    return answer


def continue_all(speaker: Speaker, texts: list[tuple[str, str]], file: TextIO) -> str:
    """Continue the prompts of a file in batches; returns JSON lines.

    Raises:
        ValueError: One of them cannot be continued, which is said before the first one is.
    """
    run, model, written = speaker.run, speaker.model, ""
    prompts = [speaker.read_line(text, where) for text, where in texts]
    for first in range(0, len(prompts), run.batch_size):
        batch = prompts[first : first + run.batch_size]
        options = speaker.options(run.seed + first)
        tokens, sources = [each.tokens for each in batch], [each.source for each in batch]
        options["source"] = None if sources[0] is None else sources
        rows = generate(model.config, model.params, tokens, **options)
        for each, row in zip(batch, np.asarray(rows).tolist(), strict=True):
            new = cut(row[len(each.tokens) :][: run.max_new_tokens], model.stop)
            line = json.dumps({"prompt": each.text, "text": model.tokenizer.decode(new)}) + "\n"
            file.write(line)
            written += line
        file.flush()
        if run.output is not None:
            print(f"{first + len(batch)} of {len(prompts)} prompts", flush=True)
    return written


@contextlib.contextmanager
def output_file(path: Path | None) -> Iterator[TextIO]:
    """Where lines go: what is printed, or a file that is there once the block is done.

    Until then a temporary file beside it is written; a pipe or a device is written as it is.
    """
    if path is None:
        yield sys.stdout
        return
    path = path.resolve()
    is_file = path.is_file() or not path.exists()
    temporary = path.with_name(f".{path.name}.{os.getpid()}") if is_file else path
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            yield file
        if is_file:
            temporary.replace(path)
    finally:
        if is_file:
            temporary.unlink(missing_ok=True)


def show(text: str) -> None:
    """Print without a newline and flush."""
    print(printable(text, sys.stdout), end="", flush=True)


def cut(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """Tokens up to the first stop token."""
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0]] if ends else tokens


def pieces(
    tokens: Iterable[int], decode: Callable[[list[int]], str], before: list[int]
) -> Iterator[str]:
    """Decode tokens incrementally; an incomplete character waits for its other tokens."""
    ids, decoded = list(before), decode(before)
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(decoded) :]
            decoded = text
    yield decode(ids)[len(decoded) :]


RUNS = {"default": Generate(checkpoint=Path("runs/pretrain-1"))}

if __name__ == "__main__":
    with readable_errors():
        main(parse(RUNS, __doc__))
