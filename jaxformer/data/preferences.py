"""Pairs of answers to one prompt, of which one is preferred, in batches of one row per answer."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt64

from jaxformer.checks import require
from jaxformer.data.batches import Batch, check_step
from jaxformer.data.cached_files import cached_arrays
from jaxformer.data.chat_templates import ChatTemplate
from jaxformer.data.file_digests import check_unchanged, file_state
from jaxformer.data.instructions import TOOLS, Instruction, Instructions, make_instruction
from jaxformer.data.records import Record, read_records
from jaxformer.data.tokenization import tokenize_documents
from jaxformer.data.tokenizers import Tokenizer, bos_token_id
from jaxformer.json_files import json_digest

FORMAT_VERSION = 1  # incremented when cached arrays change
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"


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
    """

    tokens: Int32[np.ndarray, " N"]
    loss_mask: Bool[np.ndarray, " N"]
    ends: Int64[np.ndarray, " 2P"]
    prompt_keys: UInt64[np.ndarray, " P"]
    row_length: int
    end_of_text: int
    num_truncated: int

    def __len__(self) -> int:
        return len(self.prompt_keys)

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

    A record has a prompt, a chosen and a rejected answer, all text or lists of messages. With a
    template they are rendered as a conversation, whose assistant's messages have loss; those of the
    prompt are the same in both rows, so that they change no difference. Without one, prompt, answer
    and end of text are concatenated. Rows that are too long are truncated.

    Args:
        path: JSON Lines, a JSON array, or a Parquet or Arrow table.
        tokenizer: Tokenizer.
        template: Chat template of the tokenizer.
        row_length: Inputs of a row.
        folder: Folder of caches; created if missing.

    Returns:
        The pairs, in the order of the file.

    Raises:
        ValueError: There are no pairs, or a field is missing or empty, both answers are equal, or a
            row leaves nothing of them that differs; the message has file and line.
    """
    path = Path(path)
    state = file_state(path)
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    template_key = None if template is None else template.key
    key = json_digest([FORMAT_VERSION, sha256, tokenizer.to_json(), template_key, row_length])[:32]
    cached = folder / f"preferences-{key}.npz"
    parts = folder / f".{cached.stem}.parts"

    def make() -> dict[str, Any]:
        arrays = _tokenize(path, tokenizer, template, row_length, parts)
        check_unchanged(path, state)
        return arrays

    arrays = cached_arrays(cached, [field.name for field in fields(Preferences)], make)
    shutil.rmtree(parts, ignore_errors=True)
    values: dict[str, Any] = {name: x if np.ndim(x) else int(x) for name, x in arrays.items()}
    return Preferences(**values)


def _tokenize(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate | None, row_length: int, parts: Path
) -> dict[str, Any]:
    """Fields of `Preferences`."""
    locations, prompt_keys = list[str](), list[int]()

    def answers() -> Iterator[Instruction]:
        for _, record, where in read_records(path, (PROMPT, CHOSEN, REJECTED, TOOLS)):
            _check_record(record, where)
            locations.append(where)
            prompt = json.dumps(record[PROMPT], sort_keys=True).encode()
            prompt_keys.append(int.from_bytes(hashlib.sha256(prompt).digest()[:8]))
            for answer in (CHOSEN, REJECTED):
                source, conversation = Instructions(path="", answer=answer), _joined(record, answer)
                yield make_instruction(where, conversation, source, template, where=where)

    rows, masks = list[np.ndarray](), list[np.ndarray]()
    num_truncated, first = 0, bos_token_id(tokenizer)
    for part in tokenize_documents(answers(), tokenizer, parts):
        for ids, mask, _, opens in part.documents():
            if opens:
                ids, mask = np.append(first, ids), np.append(False, mask)
            num_truncated += len(ids) > row_length + 1
            rows.append(ids[: row_length + 1].astype(np.int32))
            masks.append(mask[: row_length + 1].astype(bool))
            masks[-1][0] = False  # the first token is no target
            if len(rows) % 2 == 0:
                where = locations[len(rows) // 2 - 1]
                _check_rows(rows[-2:], masks[-2:], row_length, where)
    require(len(rows) > 0, f"{path} has no pairs.")
    return {
        "tokens": np.concatenate(rows),
        "loss_mask": np.concatenate(masks),
        "ends": np.cumsum([len(row) for row in rows]),
        "prompt_keys": np.array(prompt_keys, np.uint64),
        "row_length": row_length,
        "end_of_text": tokenizer.end_of_text,
        "num_truncated": num_truncated,
    }


def _check_record(record: Record, where: str) -> None:
    """Raise if a field is missing or empty, or the answers are equal."""
    for name in (PROMPT, CHOSEN, REJECTED):
        if not isinstance(record.get(name), str | list):
            raise ValueError(
                f"{where}: {name} must be text or a list of messages; the record has "
                f"{', '.join(record) or 'no fields'}."
            )
    for name in (CHOSEN, REJECTED):
        match record[name]:
            case str(text) if text.strip():
                continue
            case [{"role": role}, *_] if role != "assistant":
                raise ValueError(
                    f"{where}: {name} must begin with a message of the assistant; got one of "
                    f"{role}. The messages before it belong to {PROMPT}."
                )
            case [*messages] if any(_has_content(message) for message in messages):
                continue
        raise ValueError(f"{where}: {name} is empty.")
    if record[CHOSEN] == record[REJECTED]:
        raise ValueError(f"{where}: {CHOSEN} and {REJECTED} are equal.")


def _has_content(message: Any) -> bool:
    """Whether a message has more than a role; `make_instruction` refuses what is no message."""
    if not isinstance(message, dict):
        return True
    return any(value for key, value in message.items() if key != "role")


def _joined(record: Record, answer: str) -> Record:
    """A record of the prompt with one answer, as a conversation if one of them has messages."""
    parts = {"user": record[PROMPT], "assistant": record[answer]}
    if not any(isinstance(part, list) for part in parts.values()):
        return record
    messages = list[Any]()
    for role, part in parts.items():
        messages += part if isinstance(part, list) else [{"role": role, "content": part}]
    return {"messages": messages, TOOLS: record.get(TOOLS)}


def _check_rows(
    rows: list[np.ndarray], masks: list[np.ndarray], row_length: int, where: str
) -> None:
    """Raise if what is left of two answers does not differ."""
    num_both = min(map(len, rows))
    shared = np.append(rows[0][:num_both] == rows[1][:num_both], False).argmin()
    if not any(mask[shared:].any() for mask in masks):
        raise ValueError(
            f"{where}: a row of {row_length} tokens leaves nothing of {CHOSEN} and {REJECTED} that "
            "differs; use longer rows, or leave the record out."
        )
