"""The tiny model's vocabulary: one token for every printable ASCII character and a few that structure a chat.

Every token has one character of its own: special tokens have characters of Unicode's private use area, so that any
tokens whatever become text and come back unchanged (`text_of`, `tokens_of`). Only what the model itself wrote is read
that way; text of others goes through `encode`, which has no way to say a special token.
"""

from collections.abc import Iterable
from typing import Final

__all__ = [
    "PAD",
    "SYSTEM",
    "USER",
    "ASSISTANT",
    "TOOL",
    "CALL",
    "NAMED",
    "TOOLS",
    "END",
    "VOCABULARY_SIZE",
    "encode",
    "decode",
    "text_of",
    "tokens_of",
    "token_text",
]

PAD: Final = 0
SYSTEM: Final = 1
USER: Final = 2
ASSISTANT: Final = 3
TOOL: Final = 4
CALL: Final = 5
"""Begins a tool call."""
NAMED: Final = 6
"""Stands between a tool's name and its arguments, where the name has to be written."""
TOOLS: Final = 7
"""Begins the list of tools, where there are several."""
END: Final = 8
"""Ends every message."""

_SPECIAL: Final = ("<pad>", "<system>", "<user>", "<assistant>", "<tool>", "<call>", "<named>", "<tools>", "<end>")
_PLAIN: Final = "".join(chr(code) for code in range(32, 127)) + "\n"
_CHARACTERS: Final = "".join(chr(0xE000 + token) for token in range(len(_SPECIAL))) + _PLAIN
_PLAIN_TOKENS: Final = {character: token for token, character in enumerate(_PLAIN, start=len(_SPECIAL))}
_TOKENS: Final = {character: token for token, character in enumerate(_CHARACTERS)}
_UNKNOWN: Final = _PLAIN_TOKENS["?"]

VOCABULARY_SIZE: Final = len(_CHARACTERS)


def encode(text: str) -> list[int]:
    """Tokens of text that somebody wrote; a character outside the vocabulary is a question mark."""
    return [_PLAIN_TOKENS.get(character, _UNKNOWN) for character in text]


def tokens_of(text: str) -> list[int]:
    """Tokens of text that came from `text_of`; as `encode` for everything else."""
    return [_TOKENS.get(character, _UNKNOWN) for character in text]


def text_of(tokens: Iterable[int]) -> str:
    """Text from which `tokens_of` makes the same tokens again."""
    return "".join([_CHARACTERS[token] for token in tokens])


def decode(tokens: Iterable[int]) -> str:
    """Text for people: special tokens are left out."""
    return "".join([_CHARACTERS[token] for token in tokens if token >= len(_SPECIAL)])


def token_text(token: int) -> str:
    """One token; a special one by its name."""
    return _SPECIAL[token] if token < len(_SPECIAL) else _CHARACTERS[token]
