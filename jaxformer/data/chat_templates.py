"""Chat templates: how a tokenizer's makers write a conversation, and what of it counts."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from jaxformer.data.records import read_text
from jaxformer.data.tokenizer_loading import CONFIG, special_tokens
from jaxformer.extras import import_extra
from jaxformer.json_files import JSON_TYPE_NAMES, read_json

Spans = tuple[tuple[str, bool], ...]
Message = Mapping[str, Any]

MARK = "70615243847362514051"  # digits, which no template trims, quotes or changes in case
# By the name that stands for one. A message ends as a text does, so that an answer ends too.
TEMPLATES = {
    "chatml": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{{ eos_token or '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
}
UNMARKED_KEYS = (
    "role",
    "type",
    "id",
    "name",
    "tool_call_id",
)  # what a template may compare with a word


class ChatTemplate:
    """How a tokenizer's makers write a conversation as one text, in the Jinja of transformers."""

    def __init__(self, source: str, tokens: Mapping[str, str]):
        """Compile the template in a sandbox, since it may be untrusted.

        Args:
            source: The template.
            tokens: What it may name beside messages, such as ``bos_token``.

        Raises:
            ValueError: It is no template.
            ImportError: It needs ``jinja2``, which is not installed.
        """
        import_extra("jinja2")
        from jaxformer.data.template_sandbox import Sandbox

        self.source = source
        self._sandbox, self._tokens = Sandbox(), dict(tokens)
        try:
            self._template = self._sandbox.compile_bounded(source)
        except Exception as error:  # of Python's own compiler too
            raise ValueError(f"The chat template is none: {_error_text(error)}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Render messages to text.

        Args:
            messages: Each with ``role`` and ``content``.
            add_generation_prompt: Whether the beginning of the assistant's next message follows.

        Raises:
            ValueError: The template refuses them, fails, or does not end.
        """
        return "".join(self._chunks(messages, add_generation_prompt=add_generation_prompt))

    def _chunks(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        brackets: tuple[str, str] = ("", ""),
    ) -> list[str]:
        try:
            return self._sandbox.chunks(
                self._template,
                brackets=brackets,
                messages=[_normalised(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # whatever an expression of the template raises
            refused = f"The chat template refuses these messages: {_error_text(error)}"
            raise ValueError(refused) from error

    def spans(self, messages: Sequence[Message]) -> Spans:
        """Rendered conversation as (text, has loss) spans; the assistant's messages have loss.

        What counts is what the template marks by ``{% generation %}``. Of one that marks nothing it
        is what follows the beginning of an assistant's message, up to what the template writes for
        the next message.

        Raises:
            ValueError: The template refuses it, changes what it marks or its other messages with
                what the assistant says, or writes nothing that the assistant says.
        """
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not numbers:
            raise ValueError("No message is the assistant's, so nothing would be learned from it.")
        text = self.render(messages)
        brackets = (mark := _mark_for(text)), mark[::-1]
        parts = re.split("|".join(brackets), "".join(self._chunks(messages, brackets=brackets)))
        if len(parts) == 1:  # the template marks nothing
            bounds = [0]
            for i in numbers:
                bounds += self._answer(messages, i, text, after=bounds[-1])
            parts = [text[begin:end] for begin, end in pairwise([*bounds, len(text)])]
        if "".join(parts) != text:
            raise ValueError(
                "The chat template changes what it marks by {% generation %}, so what counts in it "
                "cannot be told."
            )
        counts = (part for part in enumerate(parts) if part[1])
        spans = tuple(
            ("".join(part for _, part in group), odd)
            for odd, group in groupby(counts, key=lambda part: part[0] % 2 == 1)
        )
        if not any(counts for _, counts in spans):
            raise ValueError(
                "The chat template writes nothing that the assistant says, so nothing would be "
                "learned from it."
            )
        return (*spans, ("", False))

    def _answer(
        self, messages: Sequence[Message], number: int, text: str, *, after: int
    ) -> tuple[int, int]:
        """Where in the text of a conversation a message of the assistant begins and ends.

        The conversation is written with marks in the place of what the message says. What stands
        before the first mark and behind the last is of the template; so is what the message begins
        and ends with where it is the last.
        """
        mark = _mark_for(text)
        marked = [*messages]
        marked[number] = _marked(messages[number], mark)
        parts = self._chunks(marked)
        last_parts = self._chunks(marked[: number + 1])
        whole, last = "".join(parts), "".join(last_parts)
        if mark not in whole or mark not in last:
            return after, after  # this template leaves it out
        lead, alone = self._lead(marked, number, mark)
        before = whole[: whole.index(mark)].removesuffix(lead)
        ends = [joined.rindex(mark) + len(mark) for joined in (whole, last)]
        rest = whole[ends[0] :]
        closing = _common_prefix_length(last[ends[1] :], rest)
        if closing < min(len(rest), len(last) - ends[1]):  # they part within: take whole chunks
            bounds = [
                {bound - end for bound in accumulate(map(len, each))}
                for each, end in zip((parts, last_parts), ends, strict=True)
            ]
            closing = max((b for b in bounds[0] & bounds[1] if 0 <= b <= closing), default=closing)
        begin, end = len(before), len(text) - len(rest) + closing
        unchanged = text[:begin] == before and text[end:] == rest[closing:]
        if not (alone and after <= begin <= end and unchanged):
            raise ValueError(
                f"The chat template writes other messages otherwise with what number {number + 1} "
                "says, so what counts in it cannot be told."
            )
        return begin, end

    def _lead(self, marked: Sequence[Message], number: int, mark: str) -> tuple[str, bool]:
        """What the template writes between the beginning of a marked answer and its first mark.

        The other messages hold another mark, behind whose last one the beginning is compared with
        the prompt for this answer.

        Returns:
            That text, and whether no other message stands between the answer's marks.
        """
        other = mark[::-1]
        messages = [
            message if i == number else _map_texts(message, lambda text: _insert_mark(text, other))
            for i, message in enumerate(marked)
        ]
        before, _, rest = self.render(messages).partition(mark)
        alone = other not in rest.rpartition(mark)[0]
        if not number:  # templates look at the first message
            return "", alone
        prompt = self.render(messages[:number], add_generation_prompt=True).rpartition(other)[2]
        before = before.rpartition(other)[2]
        return before.removeprefix(prompt) if before.startswith(prompt) else "", alone


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _normalised(message: Message) -> dict[str, Any]:
    """A message as transformers hands it to a template: without null, reasoning by two names."""
    known = {key: value for key, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in known:
            return {"thinking": known[name], **known, "reasoning_content": known[name]}
    return known


def _mark_for(text: str) -> str:
    """A mark that a text holds neither as it is nor reversed."""
    mark = MARK
    while mark in text or mark[::-1] in text:
        mark += MARK
    return mark


def _marked(message: Message, mark: str) -> Message:
    """A message that says a mark, wherever it says something."""
    marked = _map_texts(message, lambda text: mark if text.strip() else text, argument=mark)
    return _map_texts(message, lambda text: mark) if marked == message else marked


def _map_texts(value: Any, change: Callable[[str], str], *, argument: str = "") -> Any:
    """A value whose texts are changed, and whose tool calls have one argument more."""
    if isinstance(value, Mapping):
        changed = {
            key: each if key in UNMARKED_KEYS else _map_texts(each, change, argument=argument)
            for key, each in value.items()
        }
        if argument and isinstance(value.get("arguments"), Mapping):
            changed["arguments"][argument] = argument
        return changed
    if isinstance(value, list):
        return [_map_texts(each, change, argument=argument) for each in value]
    return change(value) if isinstance(value, str) else value


def _insert_mark(text: str, mark: str) -> str:
    """A text with a mark in its middle, which begins and ends as it did."""
    middle = len(text) // 2
    return text[:middle] + mark + text[middle:] if text.strip() else text


def _common_prefix_length(first: str, second: str) -> int:
    """How many characters two texts begin with together."""
    if second.startswith(first):
        return len(first)
    return len(os.path.commonprefix([first, second]))


def load_chat_template(path: str | Path, override: str | None = None) -> ChatTemplate | None:
    """Load the chat template from a tokenizer's folder.

    Args:
        path: The tokenizer's ``tokenizer.json``, or its folder.
        override: Instead of the folder's own: a file of a template, or one of `TEMPLATES`.

    Returns:
        That of ``chat_template.jinja`` or of ``tokenizer_config.json``; None where there is none.

    Raises:
        ValueError: It is no template, or a file is not what it should be.
    """
    folder = Path(path).parent if Path(path).suffix == ".json" else Path(path)
    source: Any = None
    if override is not None:
        if override not in TEMPLATES and not Path(override).is_file():
            raise ValueError(
                f"{override} is no file of a chat template, and none of {', '.join(TEMPLATES)}."
            )
        source = TEMPLATES.get(override) or read_text(Path(override))
    elif (folder / "chat_template.jinja").is_file():
        source = read_text(folder / "chat_template.jinja")
    elif (folder / CONFIG).is_file():
        source = read_json(folder / CONFIG).get("chat_template")
        if isinstance(source, list):
            source = _default_template(source, path=folder / CONFIG)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(
            f"{folder / CONFIG}: chat_template is {JSON_TYPE_NAMES[type(source)]}, neither a "
            "string nor "
            "a list of objects with name and template."
        )
    return ChatTemplate(source, special_tokens(folder))


def _default_template(named_templates: list[Any], *, path: Path) -> str:
    """The one of several templates that is not for tools or documents."""
    templates = {}
    for each in named_templates:
        match each:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise ValueError(
                    f"{path}: chat_template has {str(each)[:60]}, no object with name and template."
                )
    if "default" not in templates:
        raise ValueError(
            f"{path}: chat_template has {', '.join(templates) or 'nothing'}, none named default."
        )
    return templates["default"]
