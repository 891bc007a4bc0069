"""Evaluate a model: bits per byte of text, multiple choice, or lm-evaluation-harness tasks.

    jaxformer evaluate runs/pretrain-1 --text my.txt
    jaxformer evaluate path/to/folder --text 'Instructions(path="answers.jsonl")'
    jaxformer evaluate path/to/folder --choices questions.jsonl
    jaxformer evaluate path/to/folder --tasks hellaswag arc_easy   # extra eval

The folder is the output of a run, or a Hugging Face folder. Every token of a text is scored once,
given up to --length tokens before it in its document. Of instructions only the answers are scored,
each with its end-of-text token. Each line of the file of choices is
{"prompt": "...", "choices": ["...", "..."], "answer": 0}.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer import data
from jaxformer import functional as F
from jaxformer.errors import naming_fields
from jaxformer.generation import rolling_windows
from jaxformer.json_files import get_field
from jaxformer.run.command_line import run_program
from jaxformer.run.evaluator import Evaluate, Evaluator, ScoringRequest, load_evaluator
from jaxformer.training.progress import format_count

PROGRESS_SECONDS = 10  # between progress lines


@naming_fields()
def evaluate(run: Evaluate) -> dict[str, Any]:
    """Evaluate a model on text, questions or tasks, and print the metrics.

        from jaxformer import data, run
        text = data.TextFiles(path="my.txt")
        metrics = run.evaluate(run.Evaluate(checkpoint="runs/pretrain-1", text=text))

    Args:
        run: The model, and what to evaluate it on.

    Returns:
        The metrics, under "text", "choices" and "tasks".

    Raises:
        ValueError: The folder has no model, or the text, the questions or the tasks cannot be read.
    """
    if run.output is not None:
        text = getattr(run.text, "path", None)
        check_output_file(run.output, inputs=[text, run.choices])
    if run.text is not None:
        data.documents(run.text)  # raises if there is no text
    questions = None if run.choices is None else read_questions(run.choices)
    if run.tasks:
        from jaxformer.run.lm_eval_harness import run_lm_eval_tasks, task_manager

        tasks = task_manager(run)
    evaluator = load_evaluator(run)
    figures_by_kind: dict[str, Any] = {}
    if run.text is not None:
        figures_by_kind["text"] = evaluate_text(evaluator, run.text)
    if questions is not None:
        figures_by_kind["choices"] = evaluate_choices(evaluator, questions)
    for name, figures in figures_by_kind.items():
        print(f"{getattr(run, name)}, with a context of at most {evaluator.length} tokens:")
        for key, value in figures.items():
            value_text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            print(f"  {key.replace('_', ' ')}: {value_text}")
    if run.tasks:
        figures_by_kind["tasks"] = run_lm_eval_tasks(evaluator, tasks)
    if run.output is not None:
        write_figures(run.output, figures_by_kind)
    return figures_by_kind


def main(arguments: list[str] | None = None) -> None:
    """Evaluate by the command line."""
    run_program(evaluate, Evaluate, __doc__, arguments)


def check_output_file(path: Path, inputs: Sequence[str | Path | None] = ()) -> None:
    """Check before a long computation that its output file can be written.

    Raises:
        ValueError: It is a folder, or one of the inputs, or it is not writable, or its folder does
            not exist.
    """
    if any(x is not None and path.exists() and path.samefile(x) for x in inputs):
        raise ValueError(f"output {path} is the file that is read; name another.")
    if path.is_dir():
        raise ValueError(f"output must name a file; {str(path)!r} is a folder.")
    if not path.parent.is_dir():
        raise ValueError(f"output {path}: the folder {path.parent} does not exist.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"output {path} is not writable.")


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Write metrics as JSON, with null for infinity, which JSON lacks."""
    text = json.dumps(figures, default=str)
    finite = json.loads(text, parse_constant=lambda _: None)
    path.write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")


def evaluate_text(evaluator: Evaluator, corpus: data.TextSource) -> dict[str, float]:
    """Bits per byte and perplexity of the documents of a corpus."""
    template = None
    if isinstance(corpus, data.Instructions):
        template = data.load_chat_template(
            evaluator.model.tokenizer_folder, evaluator.run.chat_template
        )
    documents, tokenizer = data.documents(corpus, template=template), evaluator.model.tokenizer
    if not any(data.loss_text(document, tokenizer) for document in documents):
        raise ValueError(f"The answers of {corpus} are empty.")
    count = dict.fromkeys(("documents", "bytes", "words", "tokens"), 0)

    def requests() -> Iterator[ScoringRequest]:
        for document in documents:
            text = data.loss_text(document, tokenizer)
            count["documents"] += 1
            count["bytes"] += len(text.encode())
            count["words"] += len(text.split())
            for request in document_requests(evaluator, document):
                count["tokens"] += len(request[1])
                yield request

    nats, printed_at = 0.0, time.monotonic()
    for likelihood in evaluator.log_likelihoods(requests()):
        nats -= likelihood.log_probability
        if time.monotonic() - printed_at > PROGRESS_SECONDS:
            printed_at = time.monotonic()
            print(f"  {format_count(count['tokens'])} tokens of {count['documents']:,} documents")
    return {
        **count,
        "bits_per_byte": float(F.bits_per_byte(nats, count["bytes"])),
        "token_perplexity": perplexity(nats, count["tokens"]),
        "word_perplexity": perplexity(nats, max(1, count["words"])),
    }


def perplexity(nats: float, count: int) -> float:
    """Perplexity exp(nats / count); infinite on overflow."""
    try:
        return math.exp(nats / count)
    except OverflowError:
        return math.inf


def document_requests(evaluator: Evaluator, document: data.AnyDocument) -> Iterator[ScoringRequest]:
    """Scoring requests of one document: rolling windows, or the assistant's answers."""
    model, length = evaluator.model, evaluator.length
    stride = min(length, evaluator.run.stride or max(1, length // 2))
    tokens, loss_mask = data.tokenize_document(document, model.tokenizer)
    if isinstance(document, data.Document):
        tokens.pop()  # the end of text is not scored
    elif not document.prepend_end_of_text:  # the template has a first token
        yield from loss_requests(tokens, loss_mask, length=length, stride=stride)
        return
    yield from loss_requests(
        [model.bos_tokens[0], *tokens], [False, *loss_mask], length=length, stride=stride
    )


def loss_requests(
    tokens: list[int], loss_mask: list[bool], *, length: int, stride: int
) -> Iterator[ScoringRequest]:
    """Scoring requests for each run of tokens in the loss mask, given the tokens before it."""
    for has_loss, group in groupby(range(len(tokens)), key=loss_mask.__getitem__):
        first, *_, last = [*group] * 2
        if has_loss:
            yield from rolling_windows(
                tokens[: last + 1], max_length=length, stride=stride, start=first
            )


class Question(NamedTuple):
    """A multiple-choice question: context, choices, index of the right choice."""

    prompt: str
    choices: list[str]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a JSON Lines file.

    Raises:
        ValueError: A line lacks a field, or its answer is not the index of a choice.
    """
    questions = []
    for _, line, where in data.read_records(path, Question._fields):
        prompt = get_field(line, "prompt", str, location=where)
        choices = get_field(line, "choices", list, location=where)
        answer = get_field(line, "answer", int, location=where)
        if not all(isinstance(each, str) and each for each in choices):
            raise ValueError(f"{where}: choices must be non-empty strings; got {choices}.")
        if not 0 <= answer < len(choices):
            raise ValueError(
                f"{where}: answer must be an index from 0 to {len(choices) - 1}; got {answer}."
            )
        questions.append(Question(prompt, choices, answer))
    if not questions:
        raise ValueError(f"{path} has no questions.")
    return questions


def evaluate_choices(evaluator: Evaluator, questions: Sequence[Question]) -> dict[str, float]:
    """Accuracy by log-likelihood, and by log-likelihood per byte (lm-eval's acc and acc_norm)."""
    scores_iterator = evaluator.log_likelihoods(
        request
        for question in questions
        for request in evaluator.model.continuations(question.prompt, question.choices)
    )
    num_right = num_right_by_byte = 0
    for question in questions:
        scores = np.array([next(scores_iterator).log_probability for _ in question.choices])
        by_byte = scores / [len(choice.encode()) for choice in question.choices]
        num_right += int(scores.argmax()) == question.answer
        num_right_by_byte += int(by_byte.argmax()) == question.answer
    count = len(questions)
    return {"questions": count, "acc": num_right / count, "acc_norm": num_right_by_byte / count}
