"""Building a part from whatever the user gave for it: an instance, a class, a factory, a name, or a dictionary.

`build_component` is the one entry; the other functions are its steps. The error for a specification that cannot be used
names the argument, the value, and what is accepted. What a constructor itself raises is not reworded.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from agentlightning.errors import ConfigurationError
from agentlightning.utils.deprecation import REMOVED

__all__ = ["OptionalDefaults", "build_component", "instantiate_component", "instantiate_from_spec", "load_class"]

ValueT = TypeVar("ValueT")
OptionalDefaults: TypeAlias = Mapping[str, Any]
"""Values for parameters that a constructor may or may not have; a callable is called to make its value."""


def build_component(
    spec: object,
    *,
    expected_type: type[ValueT],
    spec_name: str,
    default_factory: Callable[[], object] | None = None,
    allow_none: bool = False,
    optional_defaults: OptionalDefaults | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., object] | None = None,
    type_error_fmt: str = "{spec_name} factory returned {type_name}, which is not a {expected_type} subclass.",
    invalid_spec_error_fmt: str = "{spec_name} cannot be {value}. {accepted}",
    registry: Mapping[str, str] | None = None,
) -> ValueT:
    """Return an instance of the expected type, or None where that is allowed.

    Args:
        spec: An instance, a subclass of the expected type, a function of no arguments, a name or a dictionary as
            `instantiate_from_spec` reads them, or None.
        spec_name: The argument the user gave this for, as errors call it.
        default_factory: Makes the part if None was given.
        type_error_fmt: Message for a part of the wrong type, with `{type_name}` and `{expected_type}`.
        invalid_spec_error_fmt: Message for any other specification, with `{actual_type}` and `{expected_type}`.

    Raises:
        ValueError: None was given where something is needed, or something in none of these forms.
        TypeError: What was built is of another type.
    """
    if isinstance(spec, expected_type):
        return spec
    if spec is None and default_factory is not None:
        built = default_factory()
    elif spec is None and allow_none:
        return None  # type: ignore[return-value] # whoever allows it expects it
    elif spec is None:
        raise ConfigurationError(f"{spec_name} cannot be None. {_accepted(expected_type, registry)}")
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
        built = instantiate_component(spec, {}, optional_defaults, spec_name=spec_name)
    elif callable(spec) and not isinstance(spec, type):
        built = instantiate_component(spec, {}, None, spec_name=spec_name)
    else:
        fields = {"value": _described(spec), "accepted": _accepted(expected_type, registry)}
        types = {"actual_type": type(spec).__name__, "expected_type": expected_type.__name__}
        raise ConfigurationError(invalid_spec_error_fmt.format(spec_name=spec_name, **fields, **types))
    if not isinstance(built, expected_type):
        types = {"type_name": type(built).__name__, "expected_type": expected_type.__name__}
        raise TypeError(type_error_fmt.format(spec_name=spec_name, **types))
    return built


def instantiate_from_spec(
    spec: str | Mapping[str, object],
    *,
    spec_name: str,
    optional_defaults: OptionalDefaults | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., object] | None = None,
    registry: Mapping[str, str] | None = None,
) -> Any:
    """Build what a name or a dictionary describes.

    A name is looked up in the registry, then taken as an import path. A dictionary says under `type` (or, where there
    is a registry, under `name`) what to build, and its other keys are arguments.

    Args:
        spec_name: The argument the user gave this for, as errors call it.
        dict_requires_type: Whether a dictionary must say what to build.
        dict_default_cls: What a dictionary builds that does not say.
    """
    if isinstance(spec, str):
        return instantiate_component(_resolved(spec, spec_name, registry), {}, optional_defaults, spec_name=spec_name)
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
    return instantiate_component(target, arguments, optional_defaults, spec_name=spec_name)


def _resolved(name: object, spec_name: str, registry: Mapping[str, str] | None) -> Callable[..., object]:
    """The class or function that a name of the registry or an import path stands for."""
    known = registry or {}
    if not isinstance(name, str) or (name not in known and "." not in name):
        registered = f"one of {_listed(known)} or " if known else ""
        raise ConfigurationError(
            f"{spec_name} cannot be {_described(name)}; name {registered}an import path such as 'package.module.Class'."
        )
    try:
        target: Callable[..., object] = load_class(known.get(name, name))
    except ConfigurationError as error:
        raise ConfigurationError(f"{spec_name} {error}") from error.__cause__
    if not callable(target):
        raise ConfigurationError(f"{spec_name} {name!r} is {_described(target)}, which is no class and no function.")
    return target


def load_class(path: str) -> Any:
    """What the import path `package.module.Class` stands for; a ConfigurationError if it stands for nothing."""
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigurationError(f"{path!r} is no import path; write 'package.module.Class'.")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (AttributeError, ImportError) as error:  # a module may load its names on first touch
        removed = REMOVED.get(name) if path.startswith("agentlightning.") else None
        raise ConfigurationError(f"{path!r} cannot be imported: {(removed or str(error)).rstrip('.')}.") from error


def instantiate_component(
    cls: Callable[..., object],
    provided_kwargs: Mapping[str, object] | None = None,
    optional_defaults: OptionalDefaults | None = None,
    *,
    spec_name: str | None = None,
) -> Any:
    """Call a class, or a function in its place, with the arguments given for it.

    An optional default is added if the constructor has a parameter of that name and no argument was given for it;
    `**kwargs` is no such parameter. Arguments that do not fit are a TypeError that lists the parameters, and names what
    the user gave this for.
    """
    arguments = dict(provided_kwargs or {})
    constructor: Any = cls
    try:
        signature = inspect.signature(constructor.__init__ if isinstance(cls, type) else constructor)
    except ValueError:  # a builtin hides its parameters
        return cls(**arguments)
    parameters = list(signature.parameters.values())[1 if isinstance(cls, type) else 0 :]
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    for name, default in (optional_defaults or {}).items():
        if name in named and name not in arguments:
            arguments[name] = default() if callable(default) else default
    try:
        signature.replace(parameters=parameters).bind(**arguments)
    except TypeError as error:
        raise TypeError(
            f"{spec_name or getattr(cls, '__name__', repr(cls))} cannot be built: {error}; {_described(cls)} takes "
            f"{_listed(one.name for one in parameters)} and was given {_listed(arguments)}."
        ) from error
    return cls(**arguments)


def _accepted(expected_type: type[object], registry: Mapping[str, str] | None) -> str:
    names = f"a name ({_listed(registry)}), " if registry else ""
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
