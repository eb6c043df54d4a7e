"""Names that say that their value is a secret: of environment variables, and of entries in configurations.

One rule for all who must not show or hand on such values. It goes by names, so it knows neither a secret under an
innocent name nor that `eos_token` is harmless.
"""

import re
from typing import Any, Final

MASK: Final = "***"
_WORD_BORDER: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET: Final = re.compile(
    r"(^|_)(API)?(KEY|TOKEN|SECRET|CREDENTIAL|AUTHORIZATION|PASSPHRASE)S?$|(PASSWORD|PASSWD)S?$", re.IGNORECASE
)


def is_secret_name(name: str) -> bool:
    """Whether a name such as `OPENAI_API_KEY`, `apiKey` or `x-api-key` is that of a secret."""
    return _SECRET.search(_WORD_BORDER.sub("_", name).replace("-", "_").replace(".", "_")) is not None


def masked(value: Any) -> Any:
    """A copy of a plain value in which `***` stands for every text under a secret name, at any depth.

    Numbers stay: `max_tokens` is not a secret.
    """
    if isinstance(value, dict):
        return {
            name: _hidden(item) if isinstance(name, str) and is_secret_name(name) else masked(item)
            for name, item in value.items()
        }
    return type(value)(map(masked, value)) if type(value) in (list, tuple) else value


def _hidden(value: Any) -> object:
    """The value with all its texts masked; those that are empty show that nothing was given."""
    if isinstance(value, dict):
        return {name: _hidden(item) for name, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_hidden, value))
    return MASK if isinstance(value, (str, bytes)) and value else value
