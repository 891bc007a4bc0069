"""Instruction data: conversations, or prompts and answers; only answers have loss."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jaxformer.checks import AtPath, require
from jaxformer.data.chat_templates import ChatTemplate, Spans
from jaxformer.data.records import RECORD_SUFFIXES, Record

TOOLS = "tools"  # key of function definitions in datasets
ALPACA_PAIR = INSTRUCTION, OUTPUT = "instruction", "output"
SHAREGPT = "conversations"
OTHER_FORMS = (*ALPACA_PAIR, "input", "history", SHAREGPT, "system")
SHAREGPT_ROLES = {x: x for x in ("system", "user", "assistant")}
SHAREGPT_ROLES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


@dataclass(frozen=True, kw_only=True)
class Instructions(AtPath):
    """Instruction data; the loss is on the answers only.

    JSON Lines, or rows of Parquet or Arrow, with a prompt and an answer, or with messages of roles
    system, user and assistant; a field of tools beside messages raises an error. Both are rendered
    with the tokenizer's chat template. Without one, the text is prompt, answer and end of text.

    Records with other keys are read in two forms: Alpaca's (instruction, input, output; the input
    follows the instruction on a new line) and ShareGPT's (conversations of from and value), each
    with system, and Alpaca's with history.

    Attributes:
        path: File of records, as in `TextFiles`, a folder of such files, or an address in a store.
        prompt: Key of the prompt.
        answer: Key of the answer.
        messages: Key of the conversation, in records that have one.
    """

    path: str
    prompt: str = "prompt"
    answer: str = "answer"
    messages: str = "messages"

    suffixes: ClassVar = RECORD_SUFFIXES

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a record."""
        return self.prompt, self.answer, self.messages, *OTHER_FORMS

    def __str__(self) -> str:
        return self.path


class Instruction(NamedTuple):
    """One instruction: a text of which only some spans have loss.

    Attributes:
        name: Unique name in its corpus.
        text: The whole text.
        spans: (text, has loss) spans in order; the last one is empty and stands for the end of
            text.
        prepend_end_of_text: Whether an end of text precedes it; chat templates have a first token.
    """

    name: str
    text: str
    spans: Spans
    prepend_end_of_text: bool


def is_instruction(record: Collection[str]) -> bool:
    """Whether a record has the keys of a prompt and an answer, or of a conversation."""
    forms = ["prompt", "answer"], ["prompt", "completion"], ["messages"], [*ALPACA_PAIR], [SHAREGPT]
    return any(set(form) <= set(record) for form in forms)


def make_instruction(
    name: str, record: Record, source: Instructions, template: ChatTemplate | None, *, where: str
) -> Instruction:
    """The instruction of one record: a conversation, or a prompt and its answer.

    With a template, prompt and answer are a conversation of two messages; without one, they are
    concatenated.

    Raises:
        ValueError: A field is missing, invalid or not supported; the message has the location.
    """
    try:
        known = {key: value for key, value in record.items() if value is not None}
        spans = _spans(_converted(known, source), source, template)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    text = "".join(piece for piece, _ in spans)
    return Instruction(name, text, spans, prepend_end_of_text=template is None)


def _converted(record: Record, source: Instructions) -> Record:
    """A record of Alpaca's or ShareGPT's form with the keys of the source; others unchanged."""
    before = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    if source.messages in record or {source.prompt, source.answer} <= record.keys():
        return record
    if SHAREGPT in record:
        messages = [*before, *map(_message_of_sharegpt, _list_of(record, SHAREGPT))]
        return {source.messages: messages, TOOLS: record.get(TOOLS)}
    if not set(ALPACA_PAIR) <= record.keys():
        return record
    prompt = [record[INSTRUCTION], *filter(None, [record.get("input")])]
    if not all(isinstance(text, str) for text in prompt):
        raise ValueError(f"{INSTRUCTION} and input must be text; got {prompt}.")
    pair = "\n".join(prompt), record[OUTPUT]
    history = _list_of(record, "history") if record.get("history") else []
    is_turns = all(isinstance(turn, list) and len(turn) == 2 for turn in history)
    require(is_turns, f"history must be pairs of texts; got {str(history)[:60]}.")
    if not before and not history:
        return dict(zip((source.prompt, source.answer), pair, strict=True))
    for turn in (*history, pair):
        before += [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
    return {source.messages: before}


def _list_of(record: Record, key: str) -> list[Any]:
    require(isinstance(record[key], list), f"{key} must be a list; got {str(record[key])[:60]!r}.")
    return record[key]


def _message_of_sharegpt(turn: Any) -> Any:
    """A message of role and content for one of from and value; others unchanged."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    if turn["from"] not in SHAREGPT_ROLES:
        raise ValueError(
            f"{SHAREGPT} has a message from {turn['from']!r}; {', '.join(SHAREGPT_ROLES)} are "
            "read. Write it as messages of role and content."
        )
    return {"role": SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")}


def _spans(record: Record, source: Instructions, template: ChatTemplate | None) -> Spans:
    prompt, answer, messages = source.prompt, source.answer, source.messages
    if messages in record:
        if record.get(TOOLS):
            raise ValueError(
                f"the field {TOOLS} is not supported: write the tools into a message of role "
                f"system, or remove {TOOLS}."
            )
        conversation = record[messages]
        is_valid = isinstance(conversation, list) and all(_is_message(m) for m in conversation)
        require(is_valid, f"{messages} must be a list of objects with role and content.")
        if template is None:
            raise ValueError(
                f"{messages} needs a tokenizer with a chat template: pass --tokenizer FOLDER or "
                f"--chat-template FILE, or use records with {prompt} and {answer}."
            )
        return template.spans(conversation)
    if missing := [name for name in (prompt, answer) if not isinstance(record.get(name), str)]:
        raise ValueError(
            f"{' and '.join(missing)} must be text; the record has "
            f"{', '.join(record) or 'no fields'}. Other keys are named by Instructions(path=..., "
            "prompt=..., answer=...) or messages=...."
        )
    if template is None:
        return (record[prompt], False), (record[answer], True), ("", True)
    user = {"role": "user", "content": record[prompt]}
    return template.spans([user, {"role": "assistant", "content": record[answer]}])


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
