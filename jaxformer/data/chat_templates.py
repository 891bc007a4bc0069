"""Chat templates: rendering of conversations, and their (text, has loss) spans."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from jaxformer.checks import require
from jaxformer.data.records import read_text
from jaxformer.data.tokenizer_loading import CONFIG, special_tokens
from jaxformer.extras import import_extra
from jaxformer.json_files import JSON_TYPE_NAMES, json_digest, read_json

Spans = tuple[tuple[str, bool], ...]
Message = Mapping[str, Any]

MARK = "70615243847362514051"  # digits, as no template strips, quotes or changes the case of these
# Built-in templates. A message ends with the end of text, so that the model learns to stop.
TEMPLATES = {
    "chatml": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{{ eos_token or '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
}
# Fields that a template may compare with constants.
UNMARKED_KEYS = ("role", "type", "id", "name", "tool_call_id")


class ChatTemplate:
    """A Jinja template that renders a conversation to text, as in transformers."""

    def __init__(self, source: str, tokens: Mapping[str, str]):
        """Compile the template in a sandbox, since it may be untrusted.

        Args:
            source: Jinja source of the template.
            tokens: Variables of the template beside messages, such as ``bos_token``.

        Raises:
            ValueError: The source is not a valid template.
            ImportError: ``jinja2`` is not installed.
        """
        import_extra("jinja2")
        from jaxformer.data.template_sandbox import Sandbox

        self.source = source
        self._sandbox, self._tokens = Sandbox(), dict(tokens)
        try:
            self._template = self._sandbox.compile_bounded(source)
        except Exception as error:  # Jinja's or Python's compiler
            raise ValueError(f"Invalid chat template: {_error_text(error)}") from error

    @property
    def key(self) -> str:
        """Digest of the source and the variables."""
        return json_digest([self.source, self._tokens])

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Render messages to text.

        Args:
            messages: Messages with ``role`` and ``content``.
            add_generation_prompt: Whether to append the start of the assistant's next message.

        Raises:
            ValueError: The template raises an error or does not end, or a message has no text.
        """
        return "".join(self._chunks(messages, add_generation_prompt=add_generation_prompt))

    def _chunks(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        brackets: tuple[str, str] = ("", ""),
    ) -> list[str]:
        normalised = [_normalised(*each) for each in enumerate(messages, start=1)]
        try:
            return self._sandbox.chunks(
                self._template,
                brackets=brackets,
                messages=normalised,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # expressions of the template may raise any type
            message = f"The chat template fails on these messages: {_error_text(error)}"
            raise ValueError(message) from error

    def spans(self, messages: Sequence[Message]) -> Spans:
        """Rendered conversation as (text, has loss) spans; the assistant's messages have loss.

        The spans with loss are those that the template marks by ``{% generation %}``. If it marks
        none, they are the assistant's messages, from after the generation prompt to the start of
        the next message.

        Raises:
            ValueError: The template fails, renders other messages differently depending on an
                assistant's message, or leaves out the assistant's messages; or a message has no
                text.
        """
        messages = [_normalised(*each) for each in enumerate(messages, start=1)]
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        require(bool(numbers), "The conversation has no assistant message, so no token has loss.")
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
                "The chat template changes the text that it marks by {% generation %}, so the loss "
                "mask cannot be determined."
            )
        counts = (part for part in enumerate(parts) if part[1])
        spans = tuple(
            ("".join(part for _, part in group), odd)
            for odd, group in groupby(counts, key=lambda part: part[0] % 2 == 1)
        )
        if not any(counts for _, counts in spans):
            raise ValueError(
                "The chat template leaves out the content of the assistant's messages, so no token "
                "has loss."
            )
        return (*spans, ("", False))

    def _answer(
        self, messages: Sequence[Message], number: int, text: str, *, after: int
    ) -> tuple[int, int]:
        """Start and end of an assistant's message in the rendered conversation.

        The conversation is rendered with marks instead of the message's content. Text before the
        first mark and after the last comes from the template; so does the text around the content
        if the message is the last one.
        """
        mark = _mark_for(text)
        marked = [*messages]
        marked[number] = _marked(messages[number], mark)
        parts = self._chunks(marked)
        last_parts = self._chunks(marked[: number + 1])
        whole, last = "".join(parts), "".join(last_parts)
        if mark not in whole or mark not in last:
            return after, after  # this template leaves out the message
        lead, alone = self._lead(marked, number, mark)
        before = whole[: whole.index(mark)].removesuffix(lead)
        ends = [joined.rindex(mark) + len(mark) for joined in (whole, last)]
        rest = whole[ends[0] :]
        closing = _common_prefix_length(last[ends[1] :], rest)
        if closing < min(len(rest), len(last) - ends[1]):
            # They differ inside a chunk: take whole chunks.
            bounds = [
                {bound - end for bound in accumulate(map(len, each))}
                for each, end in zip((parts, last_parts), ends, strict=True)
            ]
            closing = max((b for b in bounds[0] & bounds[1] if 0 <= b <= closing), default=closing)
        begin, end = len(before), len(text) - len(rest) + closing
        unchanged = text[:begin] == before and text[end:] == rest[closing:]
        if not (alone and after <= begin <= end and unchanged):
            raise ValueError(
                "The chat template renders other messages differently depending on message "
                f"{number + 1}, so the loss mask cannot be determined."
            )
        return begin, end

    def _lead(self, marked: Sequence[Message], number: int, mark: str) -> tuple[str, bool]:
        """Text that the template renders between the generation prompt and the first mark.

        The other messages contain another mark; the text after its last occurrence is compared with
        the generation prompt of this message.

        Returns:
            The text, and whether no other message is rendered between the marks.
        """
        reversed_mark = mark[::-1]

        def with_mark(text: str) -> str:
            """A text with a mark inserted in its middle."""
            middle = len(text) // 2
            return text[:middle] + reversed_mark + text[middle:] if text.strip() else text

        messages = [_map_texts(message, with_mark) for message in marked]
        messages[number] = marked[number]
        before, _, rest = self.render(messages).partition(mark)
        alone = reversed_mark not in rest.rpartition(mark)[0]
        if not number:  # templates treat the first message specially
            return "", alone
        prompt = self.render(messages[:number], add_generation_prompt=True)
        prompt = prompt.rpartition(reversed_mark)[2]
        before = before.rpartition(reversed_mark)[2]
        return before.removeprefix(prompt) if before.startswith(prompt) else "", alone


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _normalised(number: int, message: Message) -> dict[str, Any]:
    """A message as transformers passes it to templates: no nulls, reasoning under two names.

    Templates of text would print a list of parts, so its text replaces it.

    Raises:
        ValueError: It has no text.
    """
    known = {key: value for key, value in message.items() if value is not None}
    where = f"message {number} of role {known['role']}"
    if "content" in known:
        known["content"] = text_of_parts(known["content"], where)
    elif not any(value for key, value in known.items() if key not in UNMARKED_KEYS):
        raise ValueError(f"{where} has no content; give it a text, or remove the message.")
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in known:
            return {"thinking": known[name], **known, "reasoning_content": known[name]}
    return known


def text_of_parts(content: Any, where: str) -> str:
    """Content of a message: a text, or a list of texts and of objects with a text."""
    text = ""
    for part in content if isinstance(content, list) else [content]:
        piece = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(piece, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(
                f"the content of {where} must be a text, or a list of parts with a text; got "
                f"{kind}."
            )
        text += piece
    return text


def _mark_for(text: str) -> str:
    """A mark that neither forwards nor reversed occurs in the text."""
    mark = MARK
    while mark in text or mark[::-1] in text:
        mark += MARK
    return mark


def _marked(message: Message, mark: str) -> Message:
    """A message with its texts replaced by a mark."""
    marked = _map_texts(message, lambda text: mark if text.strip() else text, argument=mark)
    return _map_texts(message, lambda text: mark) if marked == message else marked


def _map_texts(value: Any, change: Callable[[str], str], *, argument: str = "") -> Any:
    """Apply `change` to all texts of a value, and add an argument to its tool calls."""
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


def _common_prefix_length(first: str, second: str) -> int:
    """Length of the common prefix of two texts."""
    if second.startswith(first):
        return len(first)
    return len(os.path.commonprefix([first, second]))


def load_chat_template(path: str | Path, override: str | None = None) -> ChatTemplate | None:
    """Load the chat template from a tokenizer's folder.

    Args:
        path: The tokenizer's ``tokenizer.json``, or its folder.
        override: Used instead of the folder's: a template file, or a name in `TEMPLATES`.

    Returns:
        The template of ``chat_template.jinja`` or ``tokenizer_config.json``; None without one.

    Raises:
        ValueError: The template or a file is invalid.
    """
    folder = Path(path).parent if Path(path).suffix == ".json" else Path(path)
    source: Any = None
    if override is not None:
        file = Path(override).expanduser()
        if override not in TEMPLATES and not file.is_file():
            raise ValueError(
                f"{override} is not a file of a chat template, nor one of {', '.join(TEMPLATES)}."
            )
        source = TEMPLATES.get(override) or read_text(file)
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
            f"{folder / CONFIG}: chat_template must be a string or a list of objects with name and "
            f"template; got {JSON_TYPE_NAMES[type(source)]}."
        )
    return ChatTemplate(source, special_tokens(folder))


def _default_template(named_templates: list[Any], *, path: Path) -> str:
    """The template named default, which is not for tools or documents."""
    templates = {}
    for each in named_templates:
        match each:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise ValueError(
                    f"{path}: chat_template must have objects with name and template; got "
                    f"{str(each)[:60]}."
                )
    if "default" not in templates:
        raise ValueError(
            f"{path}: chat_template has no template named default; it has "
            f"{', '.join(templates) or 'none'}."
        )
    return templates["default"]
