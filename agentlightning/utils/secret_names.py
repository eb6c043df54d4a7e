"""Secrets in environments and configurations: known by their names, or by their place in an address or a command line.

One rule for all who must not show or hand on such values. It knows neither a secret under an innocent name nor that
`eos_token` is harmless.
"""

import re
from typing import Any, Final

MASK: Final = "***"
_WORD_BORDER: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET: Final = re.compile(
    r"(password|passwd|passphrase|secret|credential|authorization|cookie)s?(?![a-z])"
    r"|(token|pwd|dsn|(^|_)key|api_?key)(_?\d+)?$"
    r"|(^|(api|auth|access|refresh|secret|private)_?)(key|token)s$"
)
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
_PARAMETER: Final = re.compile(r"(?P<before>[?&](?P<name>[^=&?\s]+)=)(?P<value>[^&#\s]+)")
_OPTION: Final = re.compile(r"(?P<before>(?<![\w-])--(?P<name>\w[\w-]*)[= ])(?P<value>[^\s-]\S*)")


def is_secret_name(name: str) -> bool:
    """Whether a name such as `OPENAI_API_KEY`, `apiKey`, `clientsecret` or `x-api-key` is that of a secret."""
    words = _WORD_BORDER.sub("_", name).replace("-", "_").replace(".", "_").lower()
    # Variables of shells.
    return name not in ("PWD", "OLDPWD") and _SECRET.search(words) is not None


def masked_text(text: str) -> str:
    """The text without passwords in addresses, and secrets among their parameters and among options of a command."""
    text = _CREDENTIALS.sub(MASK, text)
    for pattern in (_PARAMETER, _OPTION):
        text = pattern.sub(lambda m: m["before"] + MASK if is_secret_name(m["name"]) else m[0], text)
    return text


def masked(value: Any) -> Any:
    """A copy of a plain value in which `***` stands for secrets, at any depth.

    They are texts under a secret name or, as in a command line, after an option of such a name, and parts of texts.

    Numbers stay.
    """
    if isinstance(value, dict):
        return {
            name: _hidden(item) if isinstance(name, str) and is_secret_name(name) else masked(item)
            for name, item in value.items()
        }
    if type(value) in (list, tuple):
        options = [isinstance(item, str) and item.startswith("--") and is_secret_name(item) for item in value]
        return type(value)(
            _hidden(item) if is_after_option else masked(item)
            for item, is_after_option in zip(value, [False, *options], strict=False)
        )
    return masked_text(value) if isinstance(value, str) else value


def _hidden(value: Any) -> object:
    """The value with all its texts masked; those that are empty show that nothing was given."""
    if isinstance(value, dict):
        return {name: _hidden(item) for name, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_hidden, value))
    return MASK if isinstance(value, (str, bytes)) and value else value
