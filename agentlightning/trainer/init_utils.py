"""Building a part from whatever the user gave for it: an instance, a class, a factory, a name, or a dictionary.

`build_component` is the one entry; the other functions are its steps. A specification that cannot be understood is
answered with the name of the argument, what was given, and what would be accepted. What a constructor itself raises is
raised on unchanged.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar, overload

from agentlightning.errors import ConfigurationError

__all__ = ["OptionalDefaults", "build_component", "instantiate_component", "instantiate_from_spec", "load_class"]

T = TypeVar("T")

OptionalDefaults: TypeAlias = Mapping[str, Any]
"""Values for parameters that a constructor may or may not have; a callable is called to make its value."""

ComponentSpec: TypeAlias = T | type[T] | Callable[[], T] | str | Mapping[str, Any] | None
"""Every form in which a part of type `T` may be given."""

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_WRONG_TYPE = "{spec_name} factory returned {type_name}, which is not a {expected_type} subclass."


# ---------------------------------------------------------------------- the whole way


@overload
def build_component(
    spec: ComponentSpec[T],
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: Literal[False] = False,
    optional_defaults: OptionalDefaults | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., T] | None = None,
    type_error_fmt: str | None = None,
    invalid_spec_error_fmt: str | None = None,
    registry: Mapping[str, str] | None = None,
) -> T: ...
@overload
def build_component(
    spec: ComponentSpec[T],
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: bool,
    optional_defaults: OptionalDefaults | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., T] | None = None,
    type_error_fmt: str | None = None,
    invalid_spec_error_fmt: str | None = None,
    registry: Mapping[str, str] | None = None,
) -> T | None: ...


def build_component(
    spec: ComponentSpec[T],
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: bool = False,
    optional_defaults: OptionalDefaults | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., T] | None = None,
    type_error_fmt: str | None = None,
    invalid_spec_error_fmt: str | None = None,
    registry: Mapping[str, str] | None = None,
) -> T | None:
    """The part that was asked for, built if need be.

    Args:
        spec: an instance, a subclass of the expected type, a function of no arguments, a name or a dictionary as
            `instantiate_from_spec` reads them, or None.
        spec_name: the argument the user gave this for, as errors call it.
        default_factory: makes the part if None was given.
        type_error_fmt: words for a part of the wrong type, with `{type_name}` and `{expected_type}`.
        invalid_spec_error_fmt: words for any other specification, with `{actual_type}` and `{expected_type}`.

    Raises:
        ValueError: None was given where something is needed, or something in none of these forms.
        TypeError: what was built is of another type.
    """
    built: object
    if isinstance(spec, expected_type):
        return spec
    if spec is None:
        if default_factory is None and not allow_none:
            raise ConfigurationError(f"{spec_name} cannot be None. {_accepted(expected_type, registry)}")
        if default_factory is None:
            return None
        built = default_factory()
    elif isinstance(spec, (str, Mapping)):
        built = instantiate_from_spec(
            spec,
            spec_name=spec_name,
            optional_defaults=optional_defaults,
            dict_requires_type=dict_requires_type,
            dict_default_cls=dict_default_cls,
            registry=registry,
        )
    elif isinstance(spec, type) and issubclass(spec, expected_type):
        built = _called(spec, {}, optional_defaults, spec_name)
    elif callable(spec) and not isinstance(spec, type):
        built = _called(spec, {}, None, spec_name)
    else:
        wording = invalid_spec_error_fmt or f"{spec_name} cannot be {{value}}. {_accepted(expected_type, registry)}"
        names = {"actual_type": type(spec).__name__, "expected_type": expected_type.__name__}
        raise ConfigurationError(wording.format(value=_described(spec), **names))
    if isinstance(built, expected_type):
        return built
    names = {"type_name": type(built).__name__, "expected_type": expected_type.__name__}
    raise TypeError((type_error_fmt or _WRONG_TYPE).format(spec_name=spec_name, **names))


# ---------------------------------------------------------------------- from names and dictionaries


def instantiate_from_spec(
    spec: str | Mapping[str, Any],
    *,
    spec_name: str,
    optional_defaults: OptionalDefaults | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., Any] | None = None,
    registry: Mapping[str, str] | None = None,
) -> Any:
    """Build what a name or a dictionary describes.

    A name is looked up in the registry, then taken as an import path. A dictionary says under `type` (or, where there
    is a registry, under `name`) what to build, and its other keys are arguments.

    Args:
        spec_name: the argument the user gave this for, as errors call it.
        dict_requires_type: whether a dictionary must say what to build.
        dict_default_cls: what a dictionary builds that does not say.
    """
    if isinstance(spec, str):
        return _called(_resolved(spec, spec_name, registry), {}, optional_defaults, spec_name)
    if not isinstance(spec, Mapping):
        raise TypeError(f"{spec_name} spec must be a string or dict; it is {_described(spec)}.")
    arguments = dict(spec)
    key = "type" if "type" in arguments or not registry else "name"
    if key in arguments:
        target = _resolved(arguments.pop(key), spec_name, registry)
    elif not dict_requires_type and dict_default_cls is not None:
        target = dict_default_cls
    else:
        or_name = f" or a 'name' key with one of {_listed(registry)}" if registry else ""
        raise ConfigurationError(
            f"{spec_name} dict must have a 'type' key with an import path{or_name}; it has {_listed(arguments)}."
        )
    return _called(target, arguments, optional_defaults, spec_name)


def _resolved(name: object, spec_name: str, registry: Mapping[str, str] | None) -> Callable[..., Any]:
    """What a name of the registry or an import path stands for."""
    known = registry or {}
    if not isinstance(name, str) or (name not in known and "." not in name):
        registered = f"one of {_listed(known)} or " if known else ""
        raise ConfigurationError(
            f"{spec_name} cannot be {_described(name)}; name {registered}an import path such as 'package.module.Class'."
        )
    target = _imported(known.get(name, name), f"{spec_name} ")
    if not callable(target):
        raise ConfigurationError(f"{spec_name} {name!r} is {_described(target)}, which is no class and no function.")
    found: Callable[..., Any] = target
    return found


def load_class(path: str) -> Any:
    """What the import path `package.module.Class` stands for; a ConfigurationError if it stands for nothing."""
    return _imported(path, "")


def _imported(path: str, prefix: str) -> Any:
    """As `load_class`; errors begin with the prefix."""
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigurationError(f"{prefix}{path!r} is no import path; write 'package.module.Class'.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(f"{prefix}{path!r} cannot be imported: {str(error).rstrip('.')}.") from error
    try:
        return getattr(module, name)
    except (AttributeError, ImportError) as error:  # a module may load its names on first touch
        raise ConfigurationError(f"{prefix}{path!r} cannot be imported: {str(error).rstrip('.')}.") from error


# ---------------------------------------------------------------------- from classes


def instantiate_component(
    cls: Callable[..., T],
    provided_kwargs: Mapping[str, Any] | None = None,
    optional_defaults: OptionalDefaults | None = None,
) -> T:
    """Call a class, or a function in its place, with the arguments given for it.

    An optional default is added if the constructor has a parameter of that name and no argument was given for it;
    `**kwargs` is no such parameter. Arguments that do not fit are a TypeError that lists the parameters.
    """
    return _called(cls, provided_kwargs or {}, optional_defaults, getattr(cls, "__name__", repr(cls)))


def _called(
    target: Callable[..., T],
    provided: Mapping[str, Any],
    optional_defaults: OptionalDefaults | None,
    spec_name: str,
) -> T:
    signature = _signature_of(target)
    arguments = dict(provided)
    for name, default in (optional_defaults or {}).items():
        if name not in arguments and _takes(signature, name):
            arguments[name] = default() if callable(default) else default
    try:
        return target(**arguments)
    except TypeError as error:
        if signature is None or _fits(signature, arguments):
            raise
        raise TypeError(
            f"{spec_name} cannot be built: {error}; "
            f"{_described(target)} takes {_listed(signature.parameters)} and was given {_listed(arguments)}."
        ) from error


def _signature_of(target: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function, or of the constructor of a class; None if a builtin hides them."""
    try:
        return _constructor_of(target) if isinstance(target, type) else inspect.signature(target)
    except ValueError:
        return None


def _constructor_of(cls: type[Any]) -> inspect.Signature:
    signature = inspect.signature(cls.__init__)
    _self, *parameters = signature.parameters.values()
    return signature.replace(parameters=parameters)


def _takes(signature: inspect.Signature | None, name: str) -> bool:
    return signature is not None and name in signature.parameters and signature.parameters[name].kind in _BY_KEYWORD


def _fits(signature: inspect.Signature, arguments: Mapping[str, Any]) -> bool:
    try:
        signature.bind(**arguments)
    except TypeError:
        return False
    return True


# ---------------------------------------------------------------------- words for errors


def _accepted(expected_type: type[object], registry: Mapping[str, str] | None) -> str:
    names = f"a name ({', '.join(map(repr, registry))}), " if registry else ""
    return (
        f"It may be an instance or a subclass of {expected_type.__name__}, a function that makes one, "
        f"{names}an import path such as 'package.module.Class', or a dict with a 'type' and arguments."
    )


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    return f"{value!r:.80} ({type(value).__name__})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
