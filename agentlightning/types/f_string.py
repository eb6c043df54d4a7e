"""Templates of the engine `f-string`: `str.format`, without the ways out of the values that it offers.

An optimiser's model may have written the template. `str.format` follows attributes to the globals of a module, and
fills up to any width; this formatter does neither. Otherwise it answers and fails as `str.format` does.
"""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.errors import TemplateNotAllowed

__all__ = ["format_f_string"]

MAX_WIDTH: Final = 10_000
"""The largest width or precision of a placeholder."""
_STEP: Final = re.compile(r"[.\[\]]+")
_NUMBER: Final = re.compile(r"\d+")
_OF_THE_INTERPRETER: Final = frozenset(
    f"{kind}_{part}" for kind in ("ag", "cr", "gi", "tb") for part in ("await", "code", "frame", "yieldfrom")
) | {"f_back", "f_builtins", "f_code", "f_globals", "f_locals", "mro"}
"""Attributes of generators, frames and classes that lead out of a value, as Jinja's sandbox knows them."""


class _Formatter(string.Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for step in _STEP.split(field_name)[1:]:
            if step.startswith("_") or step in _OF_THE_INTERPRETER:
                raise TemplateNotAllowed(
                    f"The template asks for '{step}' in '{{{field_name}}}'; names that begin with an underscore, and "
                    "those of frames, are not for templates: pass what the prompt needs as a value of its own."
                )
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> Any:
        for number in _NUMBER.findall(format_spec):
            if len(number) > len(str(MAX_WIDTH)) or int(number) > MAX_WIDTH:
                raise TemplateNotAllowed(
                    f"The template formats a value with ':{format_spec:.40}'; {MAX_WIDTH} is the largest width or "
                    "precision."
                )
        return super().format_field(value, format_spec)


def format_f_string(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template; KeyError for a name without a value."""
    return _Formatter().vformat(template, (), values)
