"""Chat templates, and the (text, has loss) spans of instruction data.

A piece is text and whether it counts: what a model has to say counts, what it is told does not.
"""

from typing import Any

from jaxformer.data.chat_templates import ChatTemplate, Spans

TOOLS = "tools"  # what datasets call the functions that a conversation may call


def instruction_spans(
    record: dict[str, Any],
    *,
    prompt: str,
    answer: str,
    messages: str,
    template: ChatTemplate | None,
    where: str,
) -> Spans:
    """(text, has loss) spans of one record: a conversation, or a prompt and its answer.

    With a template a prompt and its answer are a conversation of two messages; without one, text
    that stands behind each other. The last piece is empty, and says whether the end of text counts.

    Raises:
        ValueError: A field is missing, not read, or not what it should be; says where.
    """
    try:
        if messages in record:
            if record.get(TOOLS):
                raise ValueError(
                    f"{TOOLS} beside {messages} are not read: write them into a message of role "
                    f"system, or leave out {TOOLS}."
                )
            conversation = record[messages]
            is_valid = isinstance(conversation, list) and all(_is_message(m) for m in conversation)
            if not is_valid:
                raise ValueError(f"{messages} is no list of objects with role and content.")
            if template is None:
                raise ValueError(
                    f"{messages} needs a tokenizer with a chat template: pass --tokenizer FOLDER "
                    f"or --chat-template FILE, or lines with {prompt} and {answer}."
                )
            return template.spans(conversation)
        missing = [name for name in (prompt, answer) if not isinstance(record.get(name), str)]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} is no text here; the line has "
                f"{', '.join(record) or 'none'}"
            )
        if template is not None:
            user_message = {"role": "user", "content": record[prompt]}
            return template.spans([user_message, {"role": "assistant", "content": record[answer]}])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return (record[prompt], False), (record[answer], True), ("", True)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
