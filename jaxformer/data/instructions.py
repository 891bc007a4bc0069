"""The (text, has loss) spans of instruction data; only answers have loss."""

from typing import Any

from jaxformer.data.chat_templates import ChatTemplate, Spans

TOOLS = "tools"  # key of function definitions in datasets


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

    With a template, prompt and answer are a conversation of two messages; without one, they are
    concatenated. The last span is empty and stands for the end of text.

    Raises:
        ValueError: A field is missing, invalid or not supported; the message has the location.
    """
    try:
        if messages in record:
            if record.get(TOOLS):
                raise ValueError(
                    f"the field {TOOLS} is not supported: write the tools into a message of role "
                    f"system, or remove {TOOLS}."
                )
            conversation = record[messages]
            is_valid = isinstance(conversation, list) and all(_is_message(m) for m in conversation)
            if not is_valid:
                raise ValueError(f"{messages} must be a list of objects with role and content.")
            if template is None:
                raise ValueError(
                    f"{messages} needs a tokenizer with a chat template: pass --tokenizer FOLDER "
                    f"or --chat-template FILE, or use records with {prompt} and {answer}."
                )
            return template.spans(conversation)
        missing = [name for name in (prompt, answer) if not isinstance(record.get(name), str)]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} must be text; the record has "
                f"{', '.join(record) or 'no fields'}."
            )
        if template is not None:
            user_message = {"role": "user", "content": record[prompt]}
            return template.spans([user_message, {"role": "assistant", "content": record[answer]}])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return (record[prompt], False), (record[answer], True), ("", True)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
