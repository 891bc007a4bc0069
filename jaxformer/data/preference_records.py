"""Records of two answers to one prompt, in the forms that TRL documents."""

import hashlib
import json
import os
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

from jaxformer.data.chat_templates import text_of_parts
from jaxformer.data.instructions import TOOLS
from jaxformer.data.records import Record

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
# Why a pair is left out.
EMPTY, EQUAL, FILLED, NO_PROMPT = REASONS = (
    "an answer is empty",
    "both answers are equal",
    "a row has nothing of the answers that differs",
    "there is no prompt, and the answers begin differently",
)
Messages: TypeAlias = list[dict[str, Any]]


class PreferencePair(NamedTuple):
    """Two answers to one prompt.

    Attributes:
        chosen: Record of the prompt and the preferred answer, or of their conversation.
        rejected: The same of the other answer.
        prompt_key: Hash of the prompt.
        is_rendered: Whether a chat template applies.
    """

    chosen: Record
    rejected: Record
    prompt_key: int
    is_rendered: bool


def read_pair(record: Record, *, where: str) -> PreferencePair | str:
    """The pair of a record, or the one of `REASONS` why it is left out.

    A prompt that is missing, or that both answers repeat, is the common beginning of the answers.
    Texts that begin with their prompt have their own form, so that no template applies.

    Args:
        record: Its prompt and its answers are text or lists of messages.
        where: Location for messages.

    Raises:
        ValueError: An answer is missing, or a field is neither text nor messages.
    """
    prompt, chosen, rejected = (_field(record, name, where) for name in (PROMPT, CHOSEN, REJECTED))
    if not (_has_answer(chosen) and _has_answer(rejected)):
        return EMPTY
    if chosen == rejected:
        return EQUAL
    if any(isinstance(part, list) for part in (prompt, chosen, rejected)):
        chosen, rejected = (_as_messages(part, "assistant") for part in (chosen, rejected))
        return _conversations(prompt, chosen, rejected, record.get(TOOLS))
    is_rendered = prompt is not None
    if prompt is None:
        size = _shared_text_length(chosen, rejected)
        if not size:
            return NO_PROMPT
        prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
    records = {PROMPT: prompt, CHOSEN: chosen}, {PROMPT: prompt, REJECTED: rejected}
    return PreferencePair(*records, prompt_key=_key(prompt), is_rendered=is_rendered)


def reasons_text(counts: Iterable[int]) -> str:
    """The number of pairs that were left out for each of `REASONS`, without zeros."""
    counted = zip(counts, REASONS, strict=True)
    return ", ".join(f"{count:,} because {reason}" for count, reason in counted if count)


def _field(record: Record, name: str, where: str) -> Any:
    """A field: text, messages without nulls whose parts are joined, or None."""
    match record.get(name):
        case str(text):
            return text
        case [*messages] if all(
            isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
        ):
            return [
                {
                    key: text_of_parts(x, where) if key == "content" else x
                    for key, x in m.items()
                    if x is not None
                }
                for m in messages
            ]
        case None if name in record or name == PROMPT:
            return None
    raise ValueError(
        f"{where}: {name} must be text or a list of messages, which are objects with role and "
        f"content; the record has {', '.join(record) or 'no fields'}."
    )


def _has_answer(answer: Any) -> bool:
    """Whether an answer has a text, or a message of the assistant with more than its role."""
    if not isinstance(answer, list):
        return bool(answer and answer.strip())
    values = (x for m in answer if m["role"] == "assistant" for k, x in m.items() if k != "role")
    return any(value.strip() if isinstance(value, str) else value for value in values)


def _as_messages(part: Any, role: str) -> Messages:
    return part if isinstance(part, list) else [{"role": role, "content": part}]


def _conversations(
    prompt: Any, chosen: Messages, rejected: Messages, tools: Any
) -> PreferencePair | str:
    """The pair of two conversations, of which those that begin with the prompt are whole."""
    num_shared = _num_shared_messages(chosen, rejected)
    shared = chosen[:num_shared]
    is_whole = any(answer[0]["role"] != "assistant" for answer in (chosen, rejected))
    if is_whole and isinstance(prompt, list) and not _is_part(prompt, shared):
        is_whole = False  # the answers continue the prompt
    if is_whole or prompt is None:
        if not shared:
            return NO_PROMPT
        prompt, chosen, rejected = shared, chosen[num_shared:], rejected[num_shared:]
        if not (_has_answer(chosen) and _has_answer(rejected)):
            return EMPTY
    prompt = _as_messages(prompt, "user")
    first, second = ({"messages": prompt + answer, TOOLS: tools} for answer in (chosen, rejected))
    return PreferencePair(first, second, prompt_key=_key(prompt), is_rendered=True)


def _num_shared_messages(chosen: Messages, rejected: Messages) -> int:
    """Number of messages at the beginning of both, each of which keeps at least one."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_part(prompt: Messages, shared: Messages) -> bool:
    """Whether messages occur in others, one after another."""
    starts = range(len(shared) - len(prompt) + 1)
    return any(shared[i : i + len(prompt)] == prompt for i in starts)


def _shared_text_length(chosen: str, rejected: str) -> int:
    """Length of the beginning of both texts, as `trl.extract_prompt`.

    It is without the space before they differ; of a text that the other continues, the last
    character is its answer.
    """
    size = len(os.path.commonprefix([chosen, rejected]))
    continues = size == min(len(chosen), len(rejected))
    return size - (continues or chosen[:size].endswith(" "))


def _key(prompt: str | Messages) -> int:
    """Hash of a prompt, the same for a text and for a message of the user."""
    match prompt:
        case [{"role": "user", "content": str(text), **rest}] if not rest:
            prompt = text
    digest = hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8])
