"""Command lines from constructors: `lightning_cli(Trainer, MyAgent)` reads `sys.argv` and builds both.

Every parameter of a constructor becomes an option `--{class}.{parameter}`, with the class in lower case and dashes for
underscores: `--trainer.n-runners 4`. A parameter without default is required unless it may be None. The type of a
parameter decides how its text is read; what we do not know stays text. What argparse cannot read ends the program with
its message and code 2; what a constructor raises is logged and raised on.
"""

import argparse
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

_DestByParameter = dict[str, str]
"""Where the parsed arguments hold the value of each parameter."""


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
    for cls in classes:
        if not inspect.isclass(cls):
            raise ConfigurationError(f"lightning_cli takes classes; {cls!r} is an instance of {type(cls).__name__}.")
    if not classes:
        return ()
    parser = _create_argument_parser()
    dests_by_class: dict[type[Any], _DestByParameter] = {}
    for cls in classes:
        _add_arguments_for_class(parser, cls, dests_by_class)
    instances = _instantiate_classes(parser.parse_args(), classes, dests_by_class)
    return instances[0] if len(instances) == 1 else instances


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


def _str_to_bool(value: str | bool) -> bool:
    if isinstance(value, bool):
        return value
    if value.lower() in _TRUE_WORDS:
        return True
    if value.lower() in _FALSE_WORDS:
        return False
    raise argparse.ArgumentTypeError(
        f"{value!r} is no boolean; use one of {', '.join(_TRUE_WORDS)} or {', '.join(_FALSE_WORDS)}"
    )


def _nullable_bool(value: str | bool) -> bool | None:
    return None if isinstance(value, str) and nullable_str(value) is None else _str_to_bool(value)


@dataclass(frozen=True, eq=False)
class _OneOf:
    """Reads one of a closed set of values by its text; argparse looks readers up by identity."""

    value_by_text: Mapping[str, object]
    shown: tuple[str, ...]
    """The texts to tell the user; an enum's members may also be given by name."""

    def __call__(self, text: str) -> object:
        if text not in self.value_by_text:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(self.shown)}")
        return self.value_by_text[text]


def _one_of(core_type: object, *, is_optional: bool) -> _OneOf | None:
    """How a `Literal` or an `Enum` is read; None for other types."""
    by_name: dict[str, object] = {}
    if get_origin(core_type) is Literal:
        by_text = {"none" if value is None else str(value): value for value in get_args(core_type)}
    elif inspect.isclass(core_type) and issubclass(core_type, Enum):
        by_text = {str(member.value): member for member in core_type}
        by_name = dict(core_type.__members__)
    else:
        return None
    words_for_none = dict.fromkeys(_NONE_WORDS) if is_optional else {}
    return _OneOf({**words_for_none, **by_name, **by_text}, (*by_text, *list(words_for_none)[:1]))


# ---------------------------------------------------------------------- from annotations to options

_READERS: dict[object, Callable[[str], object]] = {int: int, float: float, bool: _str_to_bool}
_NULLABLE_READERS: dict[object, Callable[[str], object]] = {
    str: nullable_str,
    int: nullable_int,
    float: nullable_float,
    bool: _nullable_bool,
}


def _get_param_type_details(param_annotation: object) -> tuple[object, bool, bool]:
    """The type without None, whether None is allowed, and whether the type is a list."""
    core_type, is_optional = param_annotation, False
    if get_origin(param_annotation) in (Union, UnionType):
        members = tuple(member for member in get_args(param_annotation) if member is not NoneType)
        is_optional = len(members) < len(get_args(param_annotation))
        core_type = Union[members]  # noqa: UP007 # `|` cannot join members that are known only now
    return core_type, is_optional, core_type is list or get_origin(core_type) is list


def _determine_argparse_type(param_annotation: object) -> Callable[[str], object]:
    """What reads one value of this type; text for what we do not know."""
    core_type, is_optional, _ = _get_param_type_details(param_annotation)
    one_of = _one_of(core_type, is_optional=is_optional)
    if one_of is not None:
        return one_of
    readers = _NULLABLE_READERS if is_optional else _READERS
    return readers.get(core_type, str)


def _determine_argparse_type_and_nargs(core_type: object, is_list: bool) -> dict[str, Any]:
    """The `type` of an option and, for a list, its `nargs`. A type that may be None is given with its None."""
    if not is_list:
        return {"type": _determine_argparse_type(core_type)}
    return {"type": _determine_argparse_type(_element_type(core_type)), "nargs": "*"}


def _element_type(core_type: object) -> object:
    if get_origin(core_type) is list:
        return next(iter(get_args(core_type)), str)
    return str if core_type is list else core_type


def _build_help_string(cls_name: str, param_name: str, core_type: object, is_optional: bool, is_list: bool) -> str:
    sentences = [f"For {cls_name}: '{param_name}'.", f"Inferred type: {_type_name(core_type)}."]
    if is_optional:
        sentences.append("May be none.")
    if is_list:
        sentences.append("Takes any number of values.")
    one_of = _one_of(_element_type(core_type) if is_list else core_type, is_optional=False)
    if one_of is not None:
        sentences.append(f"One of: {', '.join(one_of.shown)}.")
    return " ".join(sentences)


def _type_name(annotation: object) -> str:
    if annotation is inspect.Parameter.empty:
        return "str"
    if get_origin(annotation) is None and isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


# ---------------------------------------------------------------------- the parser


def _create_argument_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description="CLI configurator for application components.")


def _add_arguments_for_class(
    parser: argparse.ArgumentParser, cls: type[object], dests_by_class: dict[type[object], _DestByParameter]
) -> None:
    """Add an option for each parameter of the constructor, and note in the map where its value will be."""
    prefix = cls.__name__.lower()
    for other in dests_by_class:
        if other.__name__.lower() == prefix:
            raise ConfigurationError(
                f"Both {other.__module__}.{other.__qualname__} and {cls.__module__}.{cls.__qualname__} would be set by "
                f"'--{prefix}.*'; give each class once, under names that differ by more than case."
            )
    taken = {dest for dests in dests_by_class.values() for dest in dests.values()}
    dests = dests_by_class[cls] = {}
    annotations = _resolved_annotations(cls)
    for param_name, param_obj in _parameters_of(cls).items():
        dest_name = f"{prefix}_{param_name}"
        while dest_name in taken:  # `A(b_c)` and `A_B(c)` would share one
            dest_name += "_"
        dests[param_name] = dest_name
        annotation = annotations.get(param_name, param_obj.annotation)
        _add_argument_for_parameter(parser, cls, param_name, param_obj, dest_name, resolved_param_annotation=annotation)


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


def _add_argument_for_parameter(
    parser: argparse.ArgumentParser,
    cls: type[object],
    param_name: str,
    param_obj: inspect.Parameter,
    dest_name: str,
    resolved_param_annotation: object = None,
) -> None:
    """Add the option of one parameter; without a resolved annotation, the parameter's own counts."""
    annotation = param_obj.annotation if resolved_param_annotation is None else resolved_param_annotation
    core_type, is_optional, is_list = _get_param_type_details(annotation)
    options = _determine_argparse_type_and_nargs(core_type if is_list else annotation, is_list)
    help_text = _build_help_string(cls.__name__, param_name, core_type, is_optional, is_list)
    if param_obj.default is not inspect.Parameter.empty:
        options["default"] = _default_for_argparse(param_obj.default, options["type"])
        shown = param_obj.default.value if isinstance(param_obj.default, Enum) else param_obj.default
        help_text += f" Default: {shown!r}."
    elif is_optional:
        options["default"] = None
        help_text += " Default: None."
    else:
        options["required"] = True
        help_text += " Required."
    option = f"--{cls.__name__.lower()}.{param_name.replace('_', '-')}"
    parser.add_argument(option, dest=dest_name, help=help_text.replace("%", "%%"), **options)


def _default_for_argparse(default: object, read: Callable[[str], object]) -> object:
    """The default, unless argparse, which reads defaults that are text, would change it: then the constructor's."""
    if not isinstance(default, str):
        return default
    try:
        return default if read(default) is default else argparse.SUPPRESS
    except (argparse.ArgumentTypeError, ValueError):
        return argparse.SUPPRESS


# ---------------------------------------------------------------------- the instances


def _instantiate_classes(
    parsed_args: argparse.Namespace,
    classes: Sequence[type[object]],
    dests_by_class: Mapping[type[object], _DestByParameter],
) -> tuple[Any, ...]:
    """The classes, in order, each built from its values; a value that was not parsed is left to the constructor."""
    instances: list[Any] = []
    for cls in classes:
        dests = dests_by_class.get(cls, {})
        arguments = {name: getattr(parsed_args, dest) for name, dest in dests.items() if hasattr(parsed_args, dest)}
        by_name = dict(arguments)
        by_position = [
            by_name.pop(name, parameter.default)
            for name, parameter in _parameters_of(cls).items()
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        ]
        try:
            instances.append(cls(*by_position, **by_name))
        except Exception as error:
            logger.error("Error instantiating %s with arguments %s. Error: %s", cls.__name__, arguments, error)
            raise
    return tuple(instances)
