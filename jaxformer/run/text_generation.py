"""Generate text with a trained model, streamed to the terminal.

    jaxformer generate --checkpoint runs/pretrain-1 --prompt "def main("
    jaxformer generate --checkpoint runs/translate-1 --prompt "2nd of April, 1987"
    jaxformer generate --checkpoint RUN --rope-scaling "NTKScaling(factor=4)"
    jaxformer generate --checkpoint path/to/Llama-3.1-8B --prompt "Once upon"
    jaxformer generate --checkpoint path/to/folder --chat        # on the terminal
    jaxformer generate --checkpoint RUN --prompts prompts.txt --output texts.jsonl

The folder is the output of a run, or a Hugging Face folder (config.json, safetensors,
tokenizer.json). The prompt of an encoder-decoder is its source. A conversation is rendered with the
chat template of the folder; an empty line ends it.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer import data
from jaxformer.atomic_files import atomic_file
from jaxformer.checks import Checked, Size
from jaxformer.config import RopeScaling
from jaxformer.costs import num_parameters
from jaxformer.errors import naming_fields
from jaxformer.generation import (
    MTP,
    Beam,
    DraftModel,
    Drafts,
    Greedy,
    Sample,
    Speculation,
    speculate,
    stream,
)
from jaxformer.generation import generate as generate_tokens
from jaxformer.generation.conversation import Conversation
from jaxformer.generation.prompts import make_request
from jaxformer.parallel import DistributedConfig, MeshConfig, is_primary_process, make_mesh
from jaxformer.run.command_line import run_program
from jaxformer.run.loading import LoadedModel, load_run
from jaxformer.run.run_config import Seed, check_uses, select_devices, setup_devices
from jaxformer.training.progress import format_count, sanitize_text

DEFAULT_NEW_TOKENS = 160  # at most, where none are given


@dataclass(frozen=True, kw_only=True)
class Generate(Checked):
    """Options: the model, the prompt and the sampling.

    Attributes:
        checkpoint: Output folder of a run, or a Hugging Face folder.
        prompt: Text to continue, or the source of an encoder-decoder; empty starts a document.
        chat: Answer as an assistant: each typed line, or --prompt, or each of --prompts.
        chat_template: Chat template instead of the folder's: a Jinja file, or "chatml".
        system: System message of the conversation; empty is none.
        prompts: File of prompts: one on each line, empty ones included, or JSON Lines, each with a
            field "prompt". The file may be compressed.
        batch_size: Prompts of the file in a batch.
        output: JSON Lines file of prompts and generated texts, written only when all texts are
            complete; None prints them.
        step: Step of the run's checkpoint; None is the newest, "best" the one with the lowest
            held-out loss.
        max_new_tokens: Maximum number of new tokens; a stop token ends the text earlier. None is
            160, or what the first prompt leaves of the context that the model knows.
        sampler: How each token is chosen. Beam search prints its text at the end.
        draft: Who drafts tokens (speculative decoding): the folder of a small model with the same
            tokenizer, or "mtp" for the model's own multi-token prediction. The text is the same.
        draft_tokens: Tokens of a draft.
        rope_scaling: RoPE scaling for texts longer than the training texts; None is the
            checkpoint's.
        dtype: Dtype of the parameters and of the computation. On a CPU, bfloat16 needs half the
            memory of float32, and 1.5 times its time for a token.
        mesh: Sizes of the mesh axes: heads are sharded over tensor, kernels over fsdp.
        devices: Number of devices to use per process; None is all. On a CPU, the number to
            simulate.
        distributed: Whether this is one of several processes, each started with the same command.
        hosts: How the processes find each other.
        seed: Random seed of the sampler.
        ignore: Attributes of a Hugging Face config.json to ignore, if they do not affect the model.
    """

    checkpoint: Path
    prompt: str = ""
    chat: bool = False
    chat_template: str | None = None
    system: str = ""
    prompts: Path | None = None
    batch_size: Size = 8
    output: Path | None = None
    step: int | Literal["best"] | None = None
    max_new_tokens: Size | None = None
    sampler: Greedy | Sample | Beam = Sample(temperature=0.8, top_p=0.95)
    draft: Literal["mtp"] | Path | None = None
    draft_tokens: Size = 4
    rope_scaling: RopeScaling | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    mesh: MeshConfig = MeshConfig()
    devices: Size | None = 1
    distributed: bool = False
    hosts: DistributedConfig = DistributedConfig()
    seed: Seed = 0
    ignore: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        check_uses(
            self,
            needs={
                "system": "chat",
                "chat_template": "chat",
                "output": "prompts",
                "batch_size": "prompts",
                "draft_tokens": "draft",
            },
            excludes={"prompt": "prompts", "draft": "chat"},
        )


class Prompt(NamedTuple):
    """A prompt: its text, the tokens of the decoder, and the tokens of the encoder."""

    text: str
    tokens: list[int]
    source: list[int] | None


class TextGenerator(NamedTuple):
    """A loaded model with its generation options."""

    model: LoadedModel
    run: Generate
    mesh: Mesh
    drafts: Drafts | None = None

    def encode(self, text: str) -> tuple[list[int], list[int] | None]:
        """Encode a prompt, or a question with the chat template, and an encoder's source.

        Raises:
            ValueError: The text cannot be encoded.
        """
        if not self.run.chat:
            return self.model.encode_prompt(text)
        return self.model.encode_chat(
            [*self.system_messages(), {"role": "user", "content": text}]
        ), None

    def read_line(self, text: str, where: str) -> Prompt:
        """Encode a prompt of a file.

        Raises:
            ValueError: It cannot be continued; the message has its file and line.
        """
        try:
            tokens, source = self.encode(text)
            make_request(
                self.model.config,
                [tokens],
                max_new_tokens=self.run.max_new_tokens or 1,
                source=None if source is None else [source],
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return Prompt(text, tokens, source)

    def fitted(self, longest_prompt: int) -> "TextGenerator":
        """The same with a number of new tokens that suits the context, if it has none."""
        if self.run.max_new_tokens is not None:
            return self
        count, known = DEFAULT_NEW_TOKENS, self.model.known_length
        if known is not None and self.run.rope_scaling is None:
            count = max(1, min(count, known - longest_prompt))
        return self._replace(run=replace(self.run, max_new_tokens=count))

    def print_length_warning(self, longest_prompt: int) -> bool:
        """Print where prompt and answer may be longer than the model knows; return whether."""
        if self.run.rope_scaling is not None:
            return False
        length = longest_prompt + (self.run.max_new_tokens or 0)
        what = "prompt and new tokens are up to"
        remedy = "Pass a smaller --max-new-tokens, or scale RoPE by --rope-scaling."
        return self.model.print_length_warning(what, length, remedy)

    def system_messages(self) -> list[dict[str, str]]:
        """The system message, as a list of none or one."""
        return [{"role": "system", "content": self.run.system}] if self.run.system else []

    def generate_kwargs(self, seed: int) -> dict[str, Any]:
        """Keyword arguments of `jaxformer.generate`."""
        return {
            "max_new_tokens": self.run.max_new_tokens,
            "stop_tokens": self.model.stop_tokens,
            "vocab_size": min(self.model.tokenizer.vocab_size, self.model.config.vocab_size),
            "key": jax.random.key(seed),
            "dtype": self.run.dtype,
            "mesh": self.mesh,
            "sampler": self.run.sampler,
            "drafts": self.drafts,
        }


RUNS = {"default": Generate(checkpoint=Path("runs/pretrain-1"))}


@naming_fields()
def generate(run: Generate) -> str:
    """Print generated text as it is decoded, chat on the terminal, or continue a file of prompts.

        from jaxformer import run
        text = run.generate(run.Generate(checkpoint="runs/pretrain-1", prompt="def "))
        run.generate(run.Generate(checkpoint="runs/finetune-1", chat=True))

    Args:
        run: The model, the prompt and the sampling.

    Returns:
        The text.

    Raises:
        ValueError: The folder has no model, or the prompt cannot be encoded or continued.
    """
    with setup_devices(run):
        if run.prompts is not None:
            texts = data.lines(run.prompts, field="prompt")
            with output_file(run.output if is_primary_process() else None) as file:
                return continue_file(load_speaker(run), texts, file)
        generator = load_speaker(run)
        if run.chat and not run.prompt:
            return chat_loop(generator)
        prompt, source = generator.encode(run.prompt)
        generator = generator.fitted(len(prompt))
        generator.print_length_warning(len(prompt))
        text = "" if source is not None or run.chat else run.prompt
        print_text(text)
        return text + print_continuation(generator, prompt, source, seed=run.seed)


def main(arguments: list[str] | None = None) -> None:
    """Generate by the command line."""
    run_program(generate, RUNS, __doc__, arguments)


def load_speaker(run: Generate) -> TextGenerator:
    """Load the model of --checkpoint onto the mesh."""
    mesh = make_mesh(run.mesh, select_devices(run.devices))
    model = load_run(run.checkpoint, run.step, ignore=run.ignore, mesh=mesh, dtype=run.dtype)
    model = model._replace(chat_template=run.chat_template)
    if run.rope_scaling is not None:
        model = model._replace(config=model.config.with_rope_scaling(run.rope_scaling))
    if run.draft is None:
        return TextGenerator(model, run, mesh)
    if run.draft == "mtp":
        return TextGenerator(model, run, mesh, MTP(num_tokens=run.draft_tokens))
    draft = load_run(run.draft, mesh=mesh, dtype=run.dtype)
    drafts = DraftModel(config=draft.config, params=draft.params, num_tokens=run.draft_tokens)
    return TextGenerator(model, run, mesh, drafts)


def print_continuation(
    generator: TextGenerator, prompt: list[int], source: list[int] | None = None, *, seed: int
) -> str:
    """Print the continuation of a prompt token by token; returns it."""
    model, options = generator.model, generator.generate_kwargs(seed)
    options["source"] = None if source is None else [source]
    if isinstance(generator.run.sampler, Beam):
        generated = generate_tokens(model.config, model.params, [prompt], **options)
        tokens: Iterable[int] = truncate_at_stop(
            np.asarray(generated)[0, len(prompt) :].tolist(), model.stop_tokens
        )
    else:
        rows = stream(model.config, model.params, [prompt], **options)
        tokens = (int(row[0]) for row in printing_drafts(rows))
    return print_tokens(generator, tokens, prompt)


def printing_drafts(rows: Generator[Any, None, Speculation | None]) -> Iterator[Any]:
    """The rows of `stream`; at their end, print how many drafted tokens were right, if any."""
    result = yield from rows
    if result is not None:
        print_drafts([result])


def print_drafts(results: list[Speculation]) -> None:
    """Print to standard error how many drafted tokens were right."""
    passes, drafted, accepted = np.sum([x[1:] for x in results], axis=0)
    print(
        f"\n{accepted} of {drafted} drafted tokens were right, in {passes} passes of the model.",
        file=sys.stderr,
    )


def print_tokens(generator: TextGenerator, tokens: Iterable[int], prompt: list[int]) -> str:
    """Print tokens after a prompt as they are decoded; in a chat, Ctrl-C ends them."""
    model, text = generator.model, ""
    try:
        for piece in decode_stream(tokens, model.tokenizer.decode, prompt):
            print_text(piece)
            text += piece
    except KeyboardInterrupt:
        if not generator.run.chat or generator.run.prompt:
            raise
    print_text("\n")
    return text


def chat_loop(generator: TextGenerator) -> str:
    """Chat on the terminal: answer each typed line, given all before; returns the last answer."""
    model = generator.model
    model.load_chat_template()  # raises before anything is typed
    is_beam, conversation = isinstance(generator.run.sampler, Beam), None
    checkpoint_text = "" if model.step is None else f", checkpoint {model.step}"
    print_text(
        f"{generator.run.checkpoint}{checkpoint_text}, "
        f"{format_count(num_parameters(model.config))} parameters. An empty line ends the "
        "conversation, Ctrl-C an answer.\n"
    )
    messages, answer, is_warned = generator.system_messages(), "", False
    for seed in count(generator.run.seed):
        print_text("> ")
        user_text = sys.stdin.readline().strip()
        if not user_text:
            print_text("\n")
            return answer
        messages.append({"role": "user", "content": user_text})
        prompt = model.encode_chat(messages)
        generator = generator.fitted(len(prompt))
        is_warned = is_warned or generator.print_length_warning(len(prompt))
        if is_beam:
            answer = print_continuation(generator, prompt, seed=seed)
        else:
            if conversation is None:
                options = generator.generate_kwargs(seed)
                del options["key"], options["drafts"]
                conversation = Conversation(model.config, model.params, **options)
            with contextlib.closing(conversation.answer(prompt, key=jax.random.key(seed))) as new:
                answer = print_tokens(generator, new, prompt)
        messages.append({"role": "assistant", "content": answer})
    return answer


def continue_file(generator: TextGenerator, texts: list[tuple[str, str]], file: TextIO) -> str:
    """Continue the prompts of a file in batches; returns JSON lines.

    Raises:
        ValueError: A prompt cannot be continued; all are checked before the first batch.
    """
    model, written = generator.model, ""
    prompts = [generator.read_line(text, where) for text, where in texts]
    longest = max(len(each.tokens) for each in prompts)
    generator = generator.fitted(longest)
    generator.print_length_warning(longest)
    run, results = generator.run, list[Speculation]()
    for first in range(0, len(prompts), run.batch_size):
        batch = prompts[first : first + run.batch_size]
        options = generator.generate_kwargs(run.seed + first)
        tokens, sources = [each.tokens for each in batch], [each.source for each in batch]
        options["source"] = None if sources[0] is None else sources
        if generator.drafts is None:
            rows = generate_tokens(model.config, model.params, tokens, **options)
        else:
            results.append(speculate(model.config, model.params, tokens, **options))
            rows = results[-1].tokens
        for each, row in zip(batch, np.asarray(rows).tolist(), strict=True):
            new = truncate_at_stop(row[len(each.tokens) :][: run.max_new_tokens], model.stop_tokens)
            text = data.decode_continuation(model.tokenizer, each.tokens, new)
            line = json.dumps({"prompt": each.text, "text": text}) + "\n"
            file.write(line)
            written += line
        file.flush()
        if run.output is not None:
            print(f"{first + len(batch)} of {len(prompts)} prompts", flush=True)
    if results:
        print_drafts(results)
    return written


@contextlib.contextmanager
def output_file(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears when the block ends.

    Lines go to a temporary file beside it until then; a pipe or a device is written directly.
    """
    if path is None:
        yield sys.stdout
        return
    path = path.resolve()
    is_file = path.is_file() or not path.exists()
    with (
        atomic_file(path) if is_file else contextlib.nullcontext(path) as target,
        open(target, "w", encoding="utf-8") as file,
    ):
        yield file


def print_text(text: str) -> None:
    """Print without a newline and flush."""
    print(sanitize_text(text, sys.stdout), end="", flush=True)


def truncate_at_stop(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """Tokens up to the first stop token."""
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0]] if ends else tokens


def decode_stream(
    tokens: Iterable[int], decode: Callable[[list[int]], str], before: list[int]
) -> Iterator[str]:
    """Decode tokens incrementally, yielding only complete characters."""
    ids, decoded = list(before), decode(before)
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(decoded) :]
            decoded = text
    yield decode(ids)[len(decoded) :]
