"""Checks of texts that people and programs enter."""

import unicodedata

from django.core.exceptions import ValidationError

from rabbit.names import INVISIBLE


def check_line(text: str, max_length: int) -> None:
    """Raise ValidationError unless this is one line of visible text, not blank and within the maximum length."""
    if not text.strip():
        raise ValidationError("The text is empty. Enter a text.")
    if len(text) > max_length:
        raise ValidationError(f"The text has {len(text)} characters; at most {max_length} are allowed.")
    if has_control_characters(text):
        raise ValidationError("The text contains a control character, such as a line break. Remove it.")
    if INVISIBLE.search(text) or any(unicodedata.category(character) == "Cf" for character in text):
        raise ValidationError("The text contains an invisible character, such as a right-to-left mark. Remove it.")


def has_control_characters(text: str) -> bool:
    """Return whether the text contains line breaks, NULs, other control characters, or surrogates."""
    return any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text)
