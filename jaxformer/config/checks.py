"""Refusals that several configurations share."""

import dataclasses
from typing import Any, get_args, get_type_hints


def require(condition: bool, message: str) -> None:
    """Refuse an impossible choice with a ValueError that says why."""
    if not condition:
        raise ValueError(message)


def require_positive(config: Any, *names: str) -> None:
    """Refuse sizes and bounds that are not above 0.

    None, where a field allows it, is no size; a word is refused by `check_words`.
    """
    for name in names:
        value = getattr(config, name)
        require(
            value is None or isinstance(value, str) or value > 0,
            f"{type(config).__name__}.{name} must be positive; got {value}.",
        )


def require_pattern(config: Any, *names: str) -> None:
    """Refuse what cannot be cycled over the layers."""
    for name in names:
        value = getattr(config, name)
        require(
            isinstance(value, tuple) and len(value) > 0,
            f"{type(config).__name__}.{name} is cycled over the layers, so it is a tuple with at "
            f"least one entry; got {value!r}.",
        )


def check_words(config: Any, path: str) -> None:
    """Refuse a word that is none of those a field may hold, in a dataclass or those inside it."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        for item in value if isinstance(value, tuple) else (value,):
            choices = get_args(get_args(hint)[0] if isinstance(value, tuple) else hint)
            words = [choice for choice in choices if isinstance(choice, str)]
            if isinstance(item, str) and str not in choices:
                expected = f"is one of {words}" if words else "is no string"
                require(item in words, f"{path}.{name} {expected}; got {item!r}.")
            if dataclasses.is_dataclass(item):
                check_words(item, f"{path}.{name}")
