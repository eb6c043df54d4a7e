"""Command lines from constructors: `lightning_cli(Trainer, MyAgent)` reads `sys.argv` and builds both.

Every parameter of a constructor becomes an option `--{class}.{parameter}`, with the class in lower case and dashes for
underscores: `--trainer.n-runners 4`. A parameter without default is required unless it may be None. The type of a
parameter decides how its text is read; what we do not know stays text. What argparse cannot read ends the program with
its message and code 2; what a constructor raises is logged and raised on.
"""

import argparse
import inspect
import logging
from collections.abc import Callable
from enum import Enum
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from agentlightning.errors import ConfigurationError

__all__ = ["lightning_cli"]

logger = logging.getLogger(__name__)

_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")

_NONE_WORDS = ("none", "null", "~", "nil")
_TRUE_WORDS = ("yes", "true", "t", "y", "1")
_FALSE_WORDS = ("no", "false", "f", "n", "0")

_UNRESOLVED = (NameError, AttributeError, TypeError, SyntaxError)
"""What an annotation that is text may raise where it is resolved."""


@overload
def lightning_cli() -> tuple[()]: ...
@overload
def lightning_cli(cls_a: type[_A], /) -> _A: ...
@overload
def lightning_cli(cls_a: type[_A], cls_b: type[_B], /) -> tuple[_A, _B]: ...
@overload
def lightning_cli(cls_a: type[_A], cls_b: type[_B], cls_c: type[_C], /) -> tuple[_A, _B, _C]: ...
@overload
def lightning_cli(*classes: type[object]) -> Any: ...


def lightning_cli(*classes: type[object]) -> Any:
    """Build the classes, in order, from the options on the command line.

    One class gives its instance, several give a tuple, none gives `()`. `--help` lists all options and their defaults.
    """
    if not classes:
        return ()
    parser = argparse.ArgumentParser(description="CLI configurator for application components.")
    class_by_prefix: dict[str, type[object]] = {}
    for cls in classes:
        if not inspect.isclass(cls):
            raise ConfigurationError(f"lightning_cli takes classes; {cls!r} is an instance of {type(cls).__name__}.")
        prefix = cls.__name__.lower()
        if (other := class_by_prefix.get(prefix)) is not None:
            raise ConfigurationError(
                f"Both {other.__module__}.{other.__qualname__} and {cls.__module__}.{cls.__qualname__} would be set by "
                f"'--{prefix}.*'; give each class once, under names that differ by more than case."
            )
        class_by_prefix[prefix] = cls
        _add_options(parser, cls)
    values = vars(parser.parse_args())
    instances = tuple(_built(cls, values) for cls in classes)
    return instances[0] if len(instances) == 1 else instances


def _add_options(parser: argparse.ArgumentParser, cls: type[object]) -> None:
    """Add an option for each parameter of a constructor; `_built` finds its value by class and parameter."""
    annotations = _resolved_annotations(cls)
    for name, parameter in _parameters_of(cls).items():
        kind, is_optional = _without_none(annotations.get(name, parameter.annotation))
        is_list = kind is list or get_origin(kind) is list
        item = next(iter(get_args(kind)), str) if is_list else kind
        item_kind, may_item_be_none = _without_none(item)
        # A list as a whole may be None without its items being so.
        read = _reader(item_kind, is_optional=may_item_be_none if is_list else is_optional)
        options: dict[str, Any] = {"type": read, **({"nargs": "*"} if is_list else {})}
        sentences = [f"For {cls.__name__}: '{name}'.", f"Inferred type: {_type_name(kind)}."]
        if is_optional:
            sentences.append("May be none.")
        if is_list:
            sentences.append("Takes any number of values.")
        if choices := _choices(item_kind):
            sentences.append(f"One of: {', '.join(choices)}.")
        if parameter.default is not parameter.empty:
            options["default"] = _default_for_argparse(parameter.default, read)
            shown = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
            sentences.append(f"Default: {shown!r}.")
        else:
            options["required"] = not is_optional
            sentences.append("Default: None." if is_optional else "Required.")
        prefix = cls.__name__.lower()
        parser.add_argument(
            f"--{prefix}.{name.replace('_', '-')}",
            dest=f"{prefix}.{name}",
            metavar=f"{prefix}_{name}".upper(),
            help=" ".join(sentences).replace("%", "%%"),
            **options,
        )


def _built(cls: type[object], values: dict[str, Any]) -> object:
    """An instance from the values of its options; one that was not parsed is left to the constructor."""
    prefix = cls.__name__.lower()
    parameters = _parameters_of(cls)
    arguments = {name: values[dest] for name in parameters if (dest := f"{prefix}.{name}") in values}
    by_name = dict(arguments)
    by_position = [
        by_name.pop(name, parameter.default)
        for name, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_ONLY
    ]
    try:
        return cls(*by_position, **by_name)
    except Exception as error:
        logger.error("Error instantiating %s with arguments %s. Error: %s", cls.__name__, arguments, error)
        raise


# ---------------------------------------------------------------------- how text is read


def nullable_str(value: str) -> str | None:
    """The text itself; `none`, `null`, `~` and `nil` in any case are None."""
    return None if value.lower() in _NONE_WORDS else value


def nullable_int(value: str) -> int | None:
    """A whole number, or None as in `nullable_str`."""
    return _nullable_number(value, int, "a whole number")


def nullable_float(value: str) -> float | None:
    """A number, or None as in `nullable_str`."""
    return _nullable_number(value, float, "a number")


def _nullable_number(value: str, read: Callable[[str], _A], expected: str) -> _A | None:
    text = nullable_str(value)
    try:
        return None if text is None else read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is neither {expected} nor 'none'") from error


def _bool(text: str) -> bool:
    if text.lower() in (*_TRUE_WORDS, *_FALSE_WORDS):
        return text.lower() in _TRUE_WORDS
    raise argparse.ArgumentTypeError(
        f"{text!r} is no boolean; use one of {', '.join(_TRUE_WORDS)} or {', '.join(_FALSE_WORDS)}"
    )


def _nullable_bool(text: str) -> bool | None:
    return None if nullable_str(text) is None else _bool(text)


_READERS: dict[object, tuple[Callable[[str], object], Callable[[str], object]]] = {
    str: (str, nullable_str),
    int: (int, nullable_int),
    float: (float, nullable_float),
    bool: (_bool, _nullable_bool),
}
"""By type: how its text is read, and how where it may be None."""


def _reader(kind: object, *, is_optional: bool) -> Callable[[str], object]:
    """What reads one value of a type; of an enum its members may also be given by name."""
    choices = _choices(kind)
    if not choices:
        return _READERS.get(kind, (str, str))[is_optional]
    nothing = dict.fromkeys(_NONE_WORDS) if is_optional else {}
    value_by_text = {**nothing, **getattr(kind, "__members__", {}), **choices}
    shown = ", ".join([*choices, *list(nothing)[:1]])

    def read(text: str) -> object:
        if text not in value_by_text:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {shown}")
        return value_by_text[text]

    return read


def _choices(kind: object) -> dict[str, object]:
    """The values of a `Literal` or an `Enum` by their texts; empty for other types."""
    if get_origin(kind) is Literal:
        return {"none" if value is None else str(value): value for value in get_args(kind)}
    return {str(one.value): one for one in kind} if isinstance(kind, type) and issubclass(kind, Enum) else {}


# ---------------------------------------------------------------------- constructors


def _parameters_of(cls: type[object]) -> dict[str, inspect.Parameter]:
    """The named parameters of the constructor, without `self`, `*args` and `**kwargs`."""
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    _self, *parameters = inspect.signature(cls.__init__).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind not in unnamed}


def _resolved_annotations(cls: type[object]) -> dict[str, Any]:
    """The types of the constructor's parameters; those that cannot be resolved are left out, with a warning."""
    constructor = inspect.unwrap(cls.__init__)
    resolved: dict[str, Any] = {}
    unresolved: dict[str, Exception] = {}
    for name, annotation in getattr(constructor, "__annotations__", {}).items():
        alone = SimpleNamespace(__annotations__={name: annotation})
        try:
            resolved |= get_type_hints(alone, globalns=constructor.__globals__)
        except _UNRESOLVED as error:
            unresolved[name] = error
    if unresolved:
        names, reason = ", ".join(unresolved), next(iter(unresolved.values()))
        logger.warning(
            "the types of %s of %s cannot be resolved (%s); they are read as text", names, cls.__name__, reason
        )
    return resolved


def _without_none(annotation: object) -> tuple[object, bool]:
    """A type without None, and whether None was one of its members."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, False
    members = tuple(member for member in get_args(annotation) if member is not NoneType)
    is_optional = len(members) < len(get_args(annotation))
    annotation = Union[members]  # noqa: UP007 # `|` cannot join members that are known only now
    return annotation, is_optional


def _type_name(annotation: object) -> str:
    if annotation is inspect.Parameter.empty:
        return "str"
    if get_origin(annotation) is None and isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _default_for_argparse(default: object, read: Callable[[str], object]) -> object:
    """The default, unless argparse, which reads defaults that are text, would change it: then the constructor's."""
    if not isinstance(default, str):
        return default
    try:
        return default if read(default) is default else argparse.SUPPRESS
    except (argparse.ArgumentTypeError, ValueError):
        return argparse.SUPPRESS
