"""Evaluate a model: bits per byte of text, multiple choice, or lm-evaluation-harness tasks.

    python -m experiments.evaluate runs/pretrain-1 --text my.txt
    python -m experiments.evaluate path/to/folder --text 'Instructions(path="answers.jsonl")'
    python -m experiments.evaluate path/to/folder --choices questions.jsonl
    python -m experiments.evaluate path/to/folder --tasks hellaswag arc_easy   # extra eval

The folder is the output of a run, or a Hugging Face folder. Of a text every token counts once,
given what stands before it in its document, as far back as --length reaches; of instructions the
answers count, each with its end. A line of choices is
{"prompt": "...", "choices": ["...", "..."], "answer": 0}.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from jax.sharding import Mesh

from experiments.command_line import read, readable_errors
from experiments.trained import Trained, load_trained
from experiments.training.run import (
    check_numbers,
    check_output_file,
    check_uses,
    chosen_devices,
    simulate,
)
from jaxformer import data
from jaxformer import functional as F
from jaxformer.generation import Likelihood, likelihoods, windows
from jaxformer.json_files import field
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.training.progress import format_count

SECONDS_BETWEEN = 10  # lines that say how far it is
Request = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Options: the model, and the text, questions or tasks to evaluate it on.

    Attributes:
        checkpoint: Output folder of a run, or a Hugging Face folder.
        text: The text, or the instructions.
        chat_template: How instructions and the questions of tasks are written, instead of as the
            folder says: a file of Jinja, or "chatml".
        choices: JSON lines of questions, each with its choices and the number of the right one,
            from 0.
        tasks: Names of tasks of lm-evaluation-harness.
        task_folder: Where tasks of your own are described.
        limit: At most so many questions of each task; None is all.
        step: Which checkpoint of the run; None is the newest, "best" the one saved with the lowest
            held-out loss.
        length: Most tokens that the model reads at once; None is that of the run's rows, or 1024.
        stride: Tokens from one window of a longer text to the next; None is half of the length.
            Fewer are slower, and give each token a longer context.
        batch_size: Windows, or choices, that are looked at together.
        dtype: Of the computation.
        mesh: How the devices share the work.
        devices: How many devices to use; None is all. On a CPU, how many to simulate.
        output: A JSON file for the figures.
        ignore: Attributes of a Hugging Face config.json that change nothing in the model, by your
            word.
    """

    checkpoint: tyro.conf.Positional[Path]
    text: data.TextFiles | data.Instructions | data.StandardLibrary | None = None
    chat_template: str | None = None
    choices: Path | None = None
    tasks: tuple[str, ...] = ()
    task_folder: Path | None = None
    limit: int | None = None
    step: int | Literal["best"] | None = None
    length: int | None = None
    stride: int | None = None
    batch_size: int = 8
    dtype: Literal["float32", "bfloat16"] = "float32"
    mesh: MeshConfig = MeshConfig()
    devices: int | None = 1
    output: Path | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self):
        check_numbers(self)
        check_uses(self, needs={"stride": "text", "limit": "tasks", "task_folder": "tasks"})
        if self.text is None and self.choices is None and not self.tasks:
            raise ValueError("There is nothing to measure: pass --text, --choices or --tasks.")
        templated = self.tasks or isinstance(self.text, data.Instructions)
        if self.chat_template is not None and not templated:
            raise ValueError("--chat-template is for --text 'Instructions(...)' and for --tasks.")


class Measured(NamedTuple):
    """A loaded model with the options of its evaluation."""

    model: Trained
    mesh: Mesh
    run: Evaluate

    @property
    def length(self) -> int:
        """Longest input in tokens."""
        most = self.model.config.max_length
        length = self.run.length or self.model.length or 1024
        return length if most is None else min(length, most)

    def likelihoods(self, requests: Iterable[Request]) -> Iterator[Likelihood]:
        """Log-likelihood of each continuation given its context."""
        return likelihoods(
            self.model.config,
            self.model.params,
            requests,
            length=self.length,
            batch_size=self.run.batch_size,
            dtype=self.run.dtype,
            mesh=self.mesh,
        )


def measured(run: Evaluate) -> Measured:
    """Load the model of a folder onto its devices."""
    simulate(run.devices)
    mesh = make_mesh(run.mesh, chosen_devices(run.devices))
    model = load_trained(run.checkpoint, run.step, ignore=run.ignore, mesh=mesh)
    return Measured(model._replace(chat_template=run.chat_template), mesh, run)


def main(run: Evaluate) -> dict[str, Any]:
    """Evaluate and print; returns the metrics."""
    if run.output is not None:
        check_output_file(run.output)
    if run.text is not None:
        data.documents(run.text)  # refuses a path that has no text
    questions = None if run.choices is None else read_questions(run.choices)
    if run.tasks:
        from experiments.harness import run_tasks, task_manager

        tasks = task_manager(run)
    evaluator = measured(run)
    figures_by_kind: dict[str, Any] = {}
    if run.text is not None:
        figures_by_kind["text"] = of_text(evaluator, run.text)
    if questions is not None:
        figures_by_kind["choices"] = of_choices(evaluator, questions)
    for name, figures in figures_by_kind.items():
        print(f"{getattr(run, name)}, at most {evaluator.length} tokens at a time:")
        for key, value in figures.items():
            value_text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            print(f"  {key.replace('_', ' ')}: {value_text}")
    if run.tasks:
        figures_by_kind["tasks"] = run_tasks(evaluator, tasks)
    if run.output is not None:
        write_figures(run.output, figures_by_kind)
    return figures_by_kind


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Write figures as JSON, which has no infinity: null stands for it."""
    text = json.dumps(figures, default=str)
    finite = json.loads(text, parse_constant=lambda _: None)
    path.write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")


def of_text(using: Measured, corpus: data.Source) -> dict[str, float]:
    """Bits per byte and perplexity of the documents of a corpus."""
    template = None
    if isinstance(corpus, data.Instructions):
        template = data.load_chat_template(using.model.folder, using.run.chat_template)
    documents, tokenizer = data.documents(corpus, template=template), using.model.tokenizer
    if not any(data.counted_text(document, tokenizer) for document in documents):
        raise ValueError(f"The answers of {corpus} are empty.")
    count = dict.fromkeys(("documents", "bytes", "words", "tokens"), 0)

    def requests() -> Iterator[Request]:
        for document in documents:
            text = data.counted_text(document, tokenizer)
            count["documents"] += 1
            count["bytes"] += len(text.encode())
            count["words"] += len(text.split())
            for request in of_document(using, document):
                count["tokens"] += len(request[1])
                yield request

    nats, printed_at = 0.0, time.monotonic()
    for likelihood in using.likelihoods(requests()):
        nats -= likelihood.log_probability
        if time.monotonic() - printed_at > SECONDS_BETWEEN:
            printed_at = time.monotonic()
            print(f"  {format_count(count['tokens'])} tokens of {count['documents']:,} documents")
    return {
        **count,
        "bits_per_byte": float(F.bits_per_byte(nats, count["bytes"])),
        "perplexity_of_a_token": perplexity(nats, count["tokens"]),
        "perplexity_of_a_word": perplexity(nats, max(1, count["words"])),
    }


def perplexity(nats: float, count: int) -> float:
    """Of each of so many; infinite beyond what a float holds."""
    try:
        return math.exp(nats / count)
    except OverflowError:
        return math.inf


def of_document(using: Measured, document: data.AnyDocument) -> Iterator[Request]:
    """Scoring requests of one document: rolling windows, or the assistant's answers."""
    model, length = using.model, using.length
    stride = min(length, using.run.stride or max(1, length // 2))
    tokens, loss_mask = data.tokens_of(document, model.tokenizer)
    if isinstance(document, data.Document):
        tokens.pop()  # the end of text is no part of it
    elif not document.opens:  # its template does
        yield from answers(tokens, loss_mask, length=length, stride=stride)
        return
    yield from answers([model.start[0], *tokens], [False, *loss_mask], length=length, stride=stride)


def answers(
    tokens: list[int], counts: list[bool], *, length: int, stride: int
) -> Iterator[Request]:
    """Scoring requests for each run of tokens in the loss mask, given the tokens before it."""
    for has_loss, group in groupby(range(len(tokens)), key=counts.__getitem__):
        first, *_, last = [*group] * 2
        if has_loss:
            yield from windows(tokens[: last + 1], length=length, stride=stride, begin=first)


class Question(NamedTuple):
    """A multiple-choice question: context, choices, index of the right choice."""

    prompt: str
    choices: list[str]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a JSON Lines file.

    Raises:
        ValueError: A line lacks something, or its answer is none of its choices.
    """
    questions = []
    for _, line, where in data.read_records(path, Question._fields):
        prompt = field(line, "prompt", str, where=where)
        choices = field(line, "choices", list, where=where)
        answer = field(line, "answer", int, where=where)
        if not all(isinstance(each, str) and each for each in choices):
            raise ValueError(f"{where}: choices must be texts; got {choices}.")
        if not 0 <= answer < len(choices):
            raise ValueError(f"{where}: answer {answer} is none of its {len(choices)} choices.")
        questions.append(Question(prompt, choices, answer))
    if not questions:
        raise ValueError(f"{path} has no questions.")
    return questions


def of_choices(using: Measured, questions: Sequence[Question]) -> dict[str, float]:
    """Accuracy by log-likelihood, and by log-likelihood per byte (lm-eval's acc and acc_norm)."""
    scores_iterator = using.likelihoods(
        request
        for question in questions
        for request in using.model.continuations(question.prompt, question.choices)
    )
    num_right = num_right_by_byte = 0
    for question in questions:
        scores = np.array([next(scores_iterator).log_probability for _ in question.choices])
        by_byte = scores / [len(choice.encode()) for choice in question.choices]
        num_right += int(scores.argmax()) == question.answer
        num_right_by_byte += int(by_byte.argmax()) == question.answer
    count = len(questions)
    return {
        "questions": count,
        "accuracy": num_right / count,
        "accuracy_by_byte": num_right_by_byte / count,
    }


if __name__ == "__main__":
    with readable_errors():
        main(read(Evaluate, __doc__))
