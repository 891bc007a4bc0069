"""Chat templates, and the (text, has loss) spans of instruction data.

A piece is text and whether it counts: what a model has to say counts, what it is told does not.
"""

from typing import Any

from jaxformer.data.chat_templates import ChatTemplate, Pieces

TOOLS = "tools"  # what datasets call the functions that a conversation may call


def pieces_of(
    line: dict[str, Any],
    *,
    prompt: str,
    answer: str,
    messages: str,
    template: ChatTemplate | None,
    where: str,
) -> Pieces:
    """(text, has loss) spans of one record: a conversation, or a prompt and its answer.

    With a template a prompt and its answer are a conversation of two messages; without one, text
    that stands behind each other. The last piece is empty, and says whether the end of text counts.

    Raises:
        ValueError: A field is missing, not read, or not what it should be; says where.
    """
    try:
        if messages in line:
            if line.get(TOOLS):
                raise ValueError(
                    f"{TOOLS} beside {messages} are not read: write them into a message of role "
                    f"system, or leave out {TOOLS}."
                )
            conversation = line[messages]
            is_valid = isinstance(conversation, list) and all(_is_message(m) for m in conversation)
            if not is_valid:
                raise ValueError(f"{messages} is no list of objects with role and content.")
            if template is None:
                raise ValueError(
                    f"{messages} needs a tokenizer with a chat template: pass --tokenizer FOLDER "
                    f"or --chat-template FILE, or lines with {prompt} and {answer}."
                )
            return template.pieces(conversation)
        missing = [name for name in (prompt, answer) if not isinstance(line.get(name), str)]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} is no text here; the line has {', '.join(line) or 'none'}"
            )
        if template is not None:
            user_message = {"role": "user", "content": line[prompt]}
            return template.pieces([user_message, {"role": "assistant", "content": line[answer]}])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return (line[prompt], False), (line[answer], True), ("", True)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
