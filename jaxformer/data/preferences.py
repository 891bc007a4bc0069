"""Pairs of answers to one prompt, of which one is preferred, in batches of one row per answer."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt64

from jaxformer.data.batches import Batch, check_step
from jaxformer.data.cached_files import cached_arrays
from jaxformer.data.chat_templates import ChatTemplate
from jaxformer.data.instructions import TOOLS, Instruction, Instructions, make_instruction
from jaxformer.data.preference_records import (
    CHOSEN,
    FILLED,
    PROMPT,
    REASONS,
    REJECTED,
    read_pair,
    reasons_text,
)
from jaxformer.data.records import read_records
from jaxformer.data.shard_files import LocalFiles
from jaxformer.data.tokenization import TokenizedPart, tokenize_documents
from jaxformer.data.tokenizers import Tokenizer, bos_token_id
from jaxformer.json_files import json_digest

FORMAT_VERSION = 2  # incremented when cached arrays change


class PreferenceBatch(NamedTuple):
    """A batch of pairs: row i of `chosen` and row i of `rejected` answer the same prompt.

    Attributes:
        chosen: Rows of the preferred answers, one in each.
        rejected: Rows of the other answers.
        chosen_reference: Log-likelihood of each target of `chosen` under the reference, in nats; 0
            without loss.
        rejected_reference: The same of `rejected`.
    """

    chosen: Batch
    rejected: Batch
    chosen_reference: Float32[np.ndarray, "P T"]
    rejected_reference: Float32[np.ndarray, "P T"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Preferences:
    """Tokenized pairs of answers. Row 2 i is the chosen answer of pair i, row 2 i + 1 the other.

    A row has the prompt and one answer. Arrays of rows are concatenated.

    Attributes:
        tokens: Tokens of the rows: first inputs, then targets.
        loss_mask: Whether a token has loss: those of answers.
        ends: End of each row in `tokens`.
        prompt_keys: Hash of each pair's prompt.
        row_length: Maximum number of inputs of a row.
        end_of_text: Token that fills rows.
        num_truncated: Number of rows that were truncated.
        left_out: Number of pairs that were left out for each of `REASONS`.
    """

    tokens: Int32[np.ndarray, " N"]
    loss_mask: Bool[np.ndarray, " N"]
    ends: Int64[np.ndarray, " 2P"]
    prompt_keys: UInt64[np.ndarray, " P"]
    row_length: int
    end_of_text: int
    num_truncated: int
    left_out: Int64[np.ndarray, " R"]

    def __len__(self) -> int:
        return len(self.prompt_keys)

    @property
    def left_out_text(self) -> str:
        """The number of pairs that were left out for each reason; empty if there are none."""
        return reasons_text(self.left_out.tolist())

    @property
    def digest(self) -> str:
        """SHA-256 of all that determines a batch, in hexadecimal."""
        digest = hashlib.sha256(f"{self.row_length} {self.end_of_text}".encode())
        for x in (self.tokens, self.loss_mask, self.ends, self.prompt_keys):
            digest.update(x.tobytes())
        return digest.hexdigest()

    def split(self, held_out: float) -> tuple[Int64[np.ndarray, " A"], Int64[np.ndarray, " B"]]:
        """Numbers of the pairs to train on and of those that are held out.

        In the order of a hash of their prompts, prompts are held out with all of their pairs until
        these reach the fraction.

        Args:
            held_out: Fraction of the pairs to hold out, between 0 and 1.

        Returns:
            Both, increasing.

        Raises:
            ValueError: The fraction is not between 0 and 1, or a part would be empty.
        """
        if not 0 < held_out < 1:
            raise ValueError(f"held_out must be a fraction between 0 and 1; got {held_out}.")
        order = np.argsort(self.prompt_keys, kind="stable")
        wanted = max(1, round(held_out * len(self)))
        last = self.prompt_keys[order[min(wanted, len(self)) - 1]]
        is_held_out = self.prompt_keys <= last
        if is_held_out.all():
            raise ValueError(
                f"held_out={held_out} of {len(self)} pairs with {len(set(self.prompt_keys))} "
                "prompts leaves no pair for training; use more prompts or another held_out."
            )
        return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)

    def rows(self, numbers: Int64[np.ndarray, " B"]) -> Batch:
        """The rows with these numbers, filled up to the row length."""
        tokens, loss_mask = (self._padded(x, numbers) for x in (self.tokens, self.loss_mask))
        places = np.arange(self.row_length, dtype=np.int32)
        begins = np.append(0, self.ends)[numbers]
        is_input = places < (self.ends[numbers] - begins - 1)[:, None]
        return Batch(
            tokens=np.where(is_input, tokens[:, :-1], np.int32(self.end_of_text)),
            targets=np.where(is_input, tokens[:, 1:], np.int32(self.end_of_text)),
            positions=np.where(is_input, places, np.int32(0)),
            segments=is_input.astype(np.int32),
            loss_mask=loss_mask[:, 1:],
        )

    def batch(
        self, numbers: Int64[np.ndarray, " P"], reference: Float32[np.ndarray, " N"]
    ) -> PreferenceBatch:
        """The pairs with these numbers.

        Args:
            numbers: Numbers of pairs.
            reference: Log-likelihood of each of `tokens` under the reference, 0 without loss.
        """
        chosen, rejected = 2 * numbers, 2 * numbers + 1
        references = (self._padded(reference, x)[:, 1:] for x in (chosen, rejected))
        return PreferenceBatch(self.rows(chosen), self.rows(rejected), *references)

    def _padded(self, values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The values of some rows, one for each token, filled with 0."""
        padded = np.zeros((len(numbers), self.row_length + 1), values.dtype)
        begins = np.append(0, self.ends)
        for row, number in zip(padded, numbers.tolist(), strict=True):
            part = values[begins[number] : begins[number + 1]]
            row[: len(part)] = part
        return padded


class PreferenceBatches:
    """Infinite batches of pairs; ``batches[step]`` depends on arguments and step only.

    Every epoch has each pair once, in a new order; a batch may span several epochs.
    """

    def __init__(
        self,
        preferences: Preferences,
        reference: Float32[np.ndarray, " N"],
        numbers: Int64[np.ndarray, " P"],
        *,
        num_pairs: int,
        seed: int,
    ):
        """Set up the batches.

        Args:
            preferences: The pairs.
            reference: As for `Preferences.batch`.
            numbers: Numbers of the pairs to draw from.
            num_pairs: Pairs of a batch.
            seed: Random seed.

        Raises:
            ValueError: There are no pairs, or a batch has none.
        """
        if not len(numbers) or num_pairs < 1:
            raise ValueError(
                f"Batches need at least one pair; got {num_pairs} of {len(numbers)} pairs."
            )
        self._preferences, self._reference, self._numbers = preferences, reference, numbers
        self._num_pairs, self._seed = num_pairs, seed

    def __getitem__(self, step: SupportsIndex) -> PreferenceBatch:
        first = check_step(step) * self._num_pairs
        epochs, places = np.divmod(np.arange(first, first + self._num_pairs), len(self._numbers))
        numbers = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            order = np.random.default_rng([self._seed, epoch]).permutation(self._numbers)
            numbers[epochs == epoch] = order[places[epochs == epoch]]
        return self._preferences.batch(numbers, self._reference)


def read_preferences(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None,
    row_length: int,
    folder: Path,
) -> Preferences:
    """Read and tokenize pairs of answers, or open those of an earlier call.

    A record has a prompt, a chosen and a rejected answer, all text or lists of messages, as in TRL.
    With a template they are rendered as a conversation, whose assistant's messages have loss; the
    prompt's messages are the same in both rows, so that they change no difference. Without one,
    prompt, answer and end of text are concatenated. Rows that are too long are truncated.

    Answers may begin with the prompt, where a record has none, or where they are conversations that
    repeat it. The prompt is then their common beginning. Such texts are not rendered.

    A pair is left out and counted if an answer is empty, both are equal, a row has nothing of them
    that differs, or they are conversations that begin differently.

    Args:
        path: JSON Lines, a JSON array, or a Parquet or Arrow table.
        tokenizer: Tokenizer.
        template: Chat template of the tokenizer.
        row_length: Inputs of a row.
        folder: Folder of caches; created if missing.

    Returns:
        The pairs, in the order of the file.

    Raises:
        ValueError: No pair is left, with the reasons; or a field is missing or is neither text nor
            messages, with file and line.
    """
    path = Path(path)
    record = folder / "files" / f"{json_digest(str(path.resolve()))[:32]}.json"
    files = LocalFiles(lambda: {path.name: path}, record)
    sha256 = files.versions[path.name]
    template_key = None if template is None else template.key
    key = json_digest([FORMAT_VERSION, sha256, tokenizer.to_json(), template_key, row_length])[:32]
    cached = folder / f"preferences-{key}.npz"
    parts = folder / f".{cached.stem}.parts"

    def make() -> dict[str, Any]:
        with files.open(folder, keep=False):
            return _tokenize(path, tokenizer, template, row_length, parts)

    arrays = cached_arrays(cached, [field.name for field in fields(Preferences)], make)
    shutil.rmtree(parts, ignore_errors=True)
    values: dict[str, Any] = {name: x if np.ndim(x) else int(x) for name, x in arrays.items()}
    return Preferences(**values)


def _tokenize(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate | None, row_length: int, parts: Path
) -> dict[str, Any]:
    """Fields of `Preferences`."""
    all_keys, left_out = list[int](), dict.fromkeys(REASONS, 0)

    def answers() -> Iterator[Instruction]:
        for _, record, where in read_records(path, (PROMPT, CHOSEN, REJECTED, TOOLS)):
            pair = read_pair(record, where=where)
            if isinstance(pair, str):
                left_out[pair] += 1
                continue
            all_keys.append(pair.prompt_key)
            used = template if pair.is_rendered else None
            for answer, each in ((CHOSEN, pair.chosen), (REJECTED, pair.rejected)):
                source = Instructions(path="", answer=answer)
                yield make_instruction(where, each, source, used, where=where)

    rows, masks, prompt_keys, num_truncated = list[np.ndarray](), list[np.ndarray](), list[int](), 0
    encoded = _rows(tokenize_documents(answers(), tokenizer, parts), bos_token_id(tokenizer))
    for number, pair in enumerate(zip(encoded, encoded, strict=True)):
        tokens, loss_masks = (
            [x[: row_length + 1] for x in each] for each in zip(*pair, strict=True)
        )
        if not _differ(tokens, loss_masks):
            left_out[FILLED] += 1
            continue
        rows += tokens
        masks += loss_masks
        prompt_keys.append(all_keys[number])
        num_truncated += sum(len(ids) > row_length + 1 for ids, _ in pair)
    if not rows:
        reasons = reasons_text(left_out.values())
        raise ValueError(
            f"{path} has no pair that a row of {row_length} tokens can use: {reasons}."
            if reasons
            else f"{path} has no pairs."
        )
    return {
        "tokens": np.concatenate(rows),
        "loss_mask": np.concatenate(masks),
        "ends": np.cumsum([len(row) for row in rows]),
        "prompt_keys": np.array(prompt_keys, np.uint64),
        "row_length": row_length,
        "end_of_text": tokenizer.end_of_text,
        "num_truncated": num_truncated,
        "left_out": np.array([*left_out.values()]),
    }


def _rows(
    parts: Iterable[TokenizedPart], first: int
) -> Iterator[tuple[Int32[np.ndarray, " N"], Bool[np.ndarray, " N"]]]:
    """Tokens and loss mask of each prompt with one answer."""
    for part in parts:
        for ids, mask, _, opens in part.documents():
            if opens:
                ids, mask = np.append(first, ids), np.append(False, mask)
            mask = mask.astype(bool)
            mask[0] = False  # the first token is no target
            yield ids.astype(np.int32), mask


def _differ(rows: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> bool:
    """Whether what is left of two answers differs."""
    num_both = min(map(len, rows))
    shared = np.append(rows[0][:num_both] == rows[1][:num_both], False).argmin()
    return any(mask[shared:].any() for mask in masks)
