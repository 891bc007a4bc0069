"""Prompts and answers: read from JSON lines, rendered by a chat template, cut into pieces.

A piece is text and whether it counts: what a model has to say counts, what it is told does not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.extras import import_extra
from jaxformer.json_files import read_json

Pieces = tuple[tuple[str, bool], ...]
Message = Mapping[str, Any]


class ChatTemplate:
    """How a tokenizer's makers write a conversation as one text, in Jinja."""

    def __init__(self, source: str, tokens: Mapping[str, str]):
        """Compile a template, in a sandbox: it may come from anywhere.

        Args:
            source: The template.
            tokens: What it may name beside messages, such as ``bos_token``.

        Raises:
            ValueError: It is no template.
            ImportError: It needs ``jinja2``, which is not installed.
        """
        jinja2 = import_extra("jinja2")
        sandbox = import_extra("jinja2.sandbox").ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        sandbox.globals["raise_exception"] = _refuse
        self._errors, self._tokens = (jinja2.TemplateError, TypeError), dict(tokens)
        try:
            self._template = sandbox.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"The chat template is none: {error}") from error

    def render(self, messages: Sequence[Message], *, answering: bool = False) -> str:
        """The text of a conversation.

        Args:
            messages: Each with ``role`` and ``content``.
            answering: Whether the beginning of the assistant's next message follows.

        Raises:
            ValueError: The template refuses them.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=answering, **self._tokens
            )
        except self._errors as error:
            raise ValueError(f"The chat template refuses these messages: {error}") from error

    def pieces(self, messages: Sequence[Message]) -> Pieces:
        """The text of a conversation, of which the assistant's messages count.

        Raises:
            ValueError: The template refuses it, writes a message otherwise once others follow, or
                no message is the assistant's.
        """
        found: list[tuple[str, bool]] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            for text, counts in (
                (self.render(messages[:i], answering=True), False),
                (self.render(messages[: i + 1]), True),
            ):
                if not text.startswith(done):
                    raise ValueError(
                        f"The chat template writes the messages before number {i + 1} otherwise "
                        "once it follows, so what counts in it cannot be told."
                    )
                found.append((text[len(done) :], counts))
                done = text
        if not found:
            raise ValueError("No message is the assistant's, so nothing would be learned from it.")
        return (*found, ("", False))


def _refuse(message: str) -> None:
    raise ValueError(message)


def load_chat_template(path: str | Path) -> ChatTemplate | None:
    """The chat template beside a tokenizer.

    Args:
        path: The tokenizer's ``tokenizer.json``, or its folder.

    Returns:
        That of ``chat_template.jinja`` or of ``tokenizer_config.json``; None where there is none.

    Raises:
        ValueError: It is no template.
    """
    folder = Path(path).parent if Path(path).suffix == ".json" else Path(path)
    config = folder / "tokenizer_config.json"
    said = read_json(config) if config.is_file() else {}
    source = said.get("chat_template")
    if isinstance(source, list):  # several by name
        source = next((x["template"] for x in source if x["name"] == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if source is None:
        return None
    tokens = {
        name: str(token["content"] if isinstance(token, dict) else token)
        for name, token in said.items()
        if name.endswith("_token") and token is not None
    }
    return ChatTemplate(source, tokens)


def pieces_of(
    line: dict[str, Any],
    *,
    prompt: str,
    answer: str,
    messages: str,
    template: ChatTemplate | None,
    where: str,
) -> Pieces:
    """The pieces of one line: a conversation, or a prompt and its answer.

    With a template a prompt and its answer are a conversation of two messages; without one, text
    that stands behind each other. The last piece is empty, and says whether the end of text counts.

    Raises:
        ValueError: A field is missing, or is not what it should be; says where.
    """
    try:
        if messages in line:
            spoken = line[messages]
            whole = isinstance(spoken, list) and all(_is_message(m) for m in spoken)
            if not whole:
                raise ValueError(f"{messages} is no list of objects with role and content.")
            if template is None:
                raise ValueError(
                    f"{messages} needs a tokenizer with a chat template: pass --tokenizer FOLDER, "
                    f"or lines with {prompt} and {answer}."
                )
            return template.pieces(spoken)
        missing = [name for name in (prompt, answer) if not isinstance(line.get(name), str)]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} is no text here; the line has {', '.join(line) or 'none'}"
            )
        if template is not None:
            asked = {"role": "user", "content": line[prompt]}
            return template.pieces([asked, {"role": "assistant", "content": line[answer]}])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return (line[prompt], False), (line[answer], True), ("", True)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
