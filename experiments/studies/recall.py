"""Recall tasks, drawn from a seed: associative recall and copying; accuracy by length."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from experiments.studies.results import ResultDict
from experiments.studies.train_seeds import StudyTraining, Variant, train_seeds
from jaxformer import Transformer, costs, data
from jaxformer.config import TransformerConfig
from jaxformer.run.pretraining import PackedCorpus

SEPARATOR = 0  # before a string and before its copy; keys follow, then values
TRAINED_LENGTHS = (1 / 8, 1 / 4, 1 / 2)  # of documents, relative to a row
TESTED_LENGTHS = (1 / 4, 1 / 2, 1, 2)
NUM_TESTED = 128  # documents of each task and length

Documents = tuple[Int[np.ndarray, "N T"], Bool[np.ndarray, "N T"]]


def associative_recall(
    generator: np.random.Generator, count: int, length: int, num_symbols: int
) -> Documents:
    """Draw key-value pairs, then the keys in another order, each with its value as the answer.

        k1 v1 k2 v2 ... kn vn   k3 v3 k1 v1 ...;    n = length / 4, all keys differ

    Args:
        generator: Random generator.
        count: Number of documents.
        length: Tokens of a document, a multiple of 4.
        num_symbols: Number of keys to draw from, at least n, and of values.

    Returns:
        The documents, and a mask of the tokens that are followed by an answer.

    References:
        Arora et al., Zoology: Measuring and Improving Recall in Efficient Language Models, 2023.
        arXiv:2312.04927, section 4 (multi-query associative recall)
    """
    pairs = length // 4
    rows = np.tile(np.arange(num_symbols), (count, 1))
    keys = generator.permuted(rows, axis=1)[:, :pairs]
    values = num_symbols + generator.integers(num_symbols, size=(count, pairs))
    written = 1 + np.stack([keys, values], axis=-1)
    question_order = generator.permuted(np.tile(np.arange(pairs), (count, 1)), axis=1)
    answers = np.take_along_axis(written, question_order[..., None], axis=1)
    documents = np.concatenate([written, answers], axis=1).reshape(count, length)
    place = np.arange(length)
    return documents, np.tile((place >= length // 2) & (place % 2 == 0), (count, 1))


def copying(generator: np.random.Generator, count: int, length: int, num_symbols: int) -> Documents:
    """Draw a string; the answer is the same string once more.

        separator s1 s2 ... sn   separator s1 s2 ... sn;    n = length / 2 - 1

    Args:
        generator: Random generator.
        count: Number of documents.
        length: Tokens of a document, even.
        num_symbols: Number of values from which the string is drawn.

    Returns:
        The documents, and a mask of the tokens that are followed by an answer.

    References:
        Jelassi et al., Repeat After Me: Transformers are Better than State Space Models at Copying,
        2024. arXiv:2402.01032, section 3
    """
    string = 1 + num_symbols + generator.integers(num_symbols, size=(count, length // 2 - 1))
    half = np.insert(string, 0, SEPARATOR, axis=1)
    place = np.arange(length)
    is_answered = (place >= length // 2) & (place < length - 1)
    return np.concatenate([half, half], axis=1), np.tile(is_answered, (count, 1))


TASKS: Mapping[str, Callable[[np.random.Generator, int, int, int], Documents]] = {
    "associative recall": associative_recall,
    "copying": copying,
}


def recall_rows(
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    num_rows: int,
    row_length: int,
    num_symbols: int,
    seed: int,
) -> data.PackedRows:
    """Rows of documents, only whose answers have loss; a row has one task and one length.

    Args:
        tasks: Names of `TASKS`.
        lengths: Tokens of documents; each divides the row length.
        num_rows: Number of rows of each task and length.
        row_length: Tokens of a row.
        num_symbols: Number of keys, and of values.
        seed: Random seed.

    Returns:
        The rows; documents do not see each other.
    """
    generator = np.random.default_rng(seed)
    parts, sizes = [], []
    for task in tasks:
        for length in lengths:
            count = num_rows * row_length // length
            parts.append(TASKS[task](generator, count, length, num_symbols))
            sizes += [length] * count
    tokens, loss_mask = (np.concatenate([part[i].ravel() for part in parts]) for i in (0, 1))
    starts = np.cumsum([0, *sizes[:-1]])
    return data.PackedRows(
        tokens=np.append(tokens, SEPARATOR),  # the target of the last input, without loss
        starts=starts,
        document_bytes=np.zeros_like(starts),
        num_inputs=len(tokens),
        row_length=row_length,
        end_of_text=SEPARATOR,
        num_documents=len(starts),
        num_bytes=0,
        num_targets=int(loss_mask.sum()),
        loss_mask=loss_mask,
    )


def recall_by_length(
    variant: Variant, params: Any, corpus: PackedCorpus, training: StudyTraining
) -> ResultDict:
    """Accuracy of recall in documents of several lengths, some longer than the training documents.

    The variant is trained on both tasks at once, with the tasks' vocabulary, and otherwise as on
    the text: the same seeds, optimizer, steps and shape of batches.
    """
    row_length = training.rows.row_length
    trained, tested = (
        [int(times * row_length) for times in factors if times * row_length % 4 == 0]
        for factors in (TRAINED_LENGTHS, TESTED_LENGTHS)
    )
    num_symbols = tested[-1] // 4  # as many keys as the longest document has
    model = replace(variant.model, vocab_size=1 + 2 * num_symbols)
    num_rows = math.ceil(training.run.steps * training.run.batch_size / (len(TASKS) * len(trained)))
    rows = recall_rows(
        list(TASKS),
        trained,
        num_rows=num_rows,
        row_length=row_length,
        num_symbols=num_symbols,
        seed=0,
    )
    results = train_seeds(
        replace(variant, model=model), training._replace(rows=rows), f"{variant.name}, recall"
    )
    accuracies: dict[str, dict[str, list[float]]] = {}
    for task in TASKS:
        accuracies[task] = {}
        for length in tested:
            rows = recall_rows(
                [task],
                [length],
                num_rows=NUM_TESTED,
                row_length=length,
                num_symbols=num_symbols,
                seed=1,
            )
            accuracies[task][str(length)] = answer_accuracies(model, results.params, rows, training)
    return {
        "recall": accuracies,
        "recall_trained_length": trained[-1],
        "cache_numbers": costs.cache_bytes(model, tested[-1], bytes_per_number=4) // 4,
    }


def answer_accuracies(
    model: TransformerConfig, params: Sequence[Any], rows: data.PackedRows, training: StudyTraining
) -> list[float]:
    """Share of the targets with loss that are the most likely token, for each seed."""
    module = Transformer(model, dtype=training.run.dtype)

    @jax.jit
    def num_correct(params: Any, batch: data.Batch) -> jax.Array:
        logits: Any = module.apply(
            {"params": params}, batch.tokens, positions=batch.positions, segments=batch.segments
        )
        is_correct = jnp.argmax(logits, axis=-1) == batch.targets
        return jnp.sum(is_correct & batch.loss_mask)

    batches = list(data.evaluation_batches(rows, batch_size=training.run.batch_size))
    return [
        round(sum(int(num_correct(one, batch)) for batch in batches) / rows.num_targets, 5)
        for one in params
    ]
