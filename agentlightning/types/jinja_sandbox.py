"""Templates of the engine `jinja`: rendered in a sandbox, with a bound on what they do.

An optimiser's model may have written the template. Jinja's sandbox keeps it from leaving its values; here it also gets
a budget of steps (turns of loops, calls, items of ranges) and of characters. Not covered is what a single expression
can build with filters and methods, such as `{{ x | center(n) }}`, where no loop is needed to be costly.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from jinja2 import StrictUndefined, nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentlightning.errors import TemplateError

MAX_STEPS: Final = 100_000
"""Turns of loops, calls and items of ranges in one rendering."""
MAX_CHARACTERS: Final = 10_000_000
"""Of a rendered prompt, and of any text or list that `+` and `*` make."""
_MAX_POWER_BITS: Final = 10_000
_TURNS: Final = "agentlightning_turns"
"""The filter that counts the turns of a loop."""


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """For one rendering."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, keep_trailing_newline=True)
        self._steps = 0
        self.filters[_TURNS] = self._turns
        self.globals["range"] = self._range

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise TemplateError(f"The template takes more than {MAX_STEPS} steps; shorten its loops.")

    def _turns(self, items: Iterable[object]) -> Iterator[object]:
        for item in items:
            self._spend(1)
            yield item

    def _range(self, *arguments: int) -> range:
        numbers = range(*arguments)
        self._spend(_length(numbers))
        return numbers

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 # as the sandbox has it
        __self._spend(1)
        if isinstance(__obj, LoopContext) and args:  # a recursive loop goes down
            args = (__self._turns(args[0]), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            bits = left.bit_length() if isinstance(left, int) else 0
            is_large = bits * abs(right if isinstance(right, int) else 1) > _MAX_POWER_BITS
        elif operator == "*":
            is_large = _length(left) * _count(right) > MAX_CHARACTERS or _length(right) * _count(left) > MAX_CHARACTERS
        else:
            is_large = _length(left) + _length(right) > MAX_CHARACTERS
        if is_large:
            raise TemplateError(f"The template makes too large a value with '{operator}'.")
        return super().call_binop(context, operator, left, right)


def _length(value: object) -> int:
    if isinstance(value, range):
        return max(0, (value.stop - value.start + value.step - (1 if value.step > 0 else -1)) // value.step)
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def render_jinja(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template; jinja2's errors for what it cannot fill, TemplateError for what takes too much."""
    environment = _BoundedEnvironment()
    tree = environment.parse(template)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None, lineno=loop.lineno)
    pieces: list[str] = []
    length = 0
    for piece in environment.from_string(tree).generate(**values):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"The template renders to more than {MAX_CHARACTERS} characters.")
        pieces.append(piece)
    return "".join(pieces)
