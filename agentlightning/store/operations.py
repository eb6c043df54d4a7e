"""Operations: how a declared store method can travel.

`LightningStore` declares each method once and marks it with `@operation(verb, path)`. Everything else is derived from
that declaration: this module turns it into an `Operation` that knows its route, can name the arguments of a call, and
can carry arguments and results as JSON. Wrappers, servers and clients ask for `operations_of(LightningStore)`; none of
them lists methods.

Each argument is dumped by its own adapter (dumping one request model with `exclude_unset` would drop nested defaults
such as generated ids), and results are dumped as what they are (or the attempt inside an AttemptedRollout would be
lost).
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

__all__ = ["ALL_ITEMS", "UNSET", "Unset", "Operation", "Route", "operation", "operations_of", "forward_operations"]

MethodT = TypeVar("MethodT", bound=Callable[..., Any])
StoreT = TypeVar("StoreT")
Verb = Literal["GET", "POST"]


class _UnsetType:
    """The type of `UNSET`: an update that leaves the field alone, where None is a value."""

    __slots__ = ()
    _instance: "_UnsetType | None" = None

    def __new__(cls) -> "_UnsetType":
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> tuple[type["_UnsetType"], tuple[()]]:
        return _UnsetType, ()


UNSET = _UnsetType()
Unset = _UnsetType


@dataclass(frozen=True)
class Route:
    """Where an operation is found below `/v1/agl`."""

    verb: Verb
    path: str
    body: str | None
    """The argument that is the whole request body; None sends the arguments as one object."""
    status: int


Who = Literal["admin", "runner", "attempt"]

ALL_ITEMS = -1
"""The limit that is none."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One store method that can travel, and what others must know to call it."""

    name: str
    signature: inspect.Signature
    declared: Callable[..., Any]
    route: Route
    who: Who
    """Who may call it: the admin alone, runners too, or also an attempt about itself. Readers may call what runners may
    and what changes nothing."""
    mutates: bool
    ids: tuple[str, ...]
    """Arguments that identify a call: a repeat with the same ones does nothing new. A client makes those not given."""
    watchdog: bool
    """Whether overdue attempts are marked first; not before spans, for a late one must find its attempt as it was."""
    many: str | None
    """The argument that may hold very many items."""
    hot: bool
    """Whether every rollout needs it, so that its codec is built before processes are forked."""
    loose: str | None
    """The mapping that the store itself checks, because it takes it in more than one form."""
    echoes: str | None
    """The argument that is also the result, or of which None takes the place where it was not kept."""

    @property
    def is_claim(self) -> bool:
        """Whether it gives out rollouts."""
        return "claim_id" in self.ids

    @functools.cached_property
    def is_query(self) -> bool:
        """Whether the result is a page, of a length that the caller may choose."""
        limit = self.signature.parameters.get("limit")
        return limit is not None and limit.default == ALL_ITEMS

    def may_wait(self, arguments: Mapping[str, object]) -> bool:
        """Whether a call with these arguments may wait for something to happen."""
        return bool(arguments.get("wait")) or ("timeout" in self.signature.parameters and arguments.get("timeout") != 0)

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """Parameter name -> type, without the `Unset` alternative."""
        hints = {
            name: _without_unset(hint) for name, hint in get_type_hints(self.declared, include_extras=True).items()
        }
        return {name: hint for name, hint in hints.items() if name != "return"}

    @functools.cached_property
    def adapters(self) -> dict[str, TypeAdapter[Any]]:
        return {name: TypeAdapter(hint) for name, hint in self.hints.items()}

    @functools.cached_property
    def result(self) -> TypeAdapter[Any]:
        return TypeAdapter(get_type_hints(self.declared, include_extras=True)["return"])

    @functools.cached_property
    def _positional(self) -> tuple[str, ...]:
        return tuple(name for name, p in self.signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)

    @functools.cached_property
    def _required(self) -> frozenset[str]:
        return frozenset(name for name, p in self.signature.parameters.items() if p.default is p.empty)

    def name_arguments(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Any]:
        """The arguments of one call by name, leaving out the ones not given or `UNSET`."""
        given = {**dict(zip(self._positional, args, strict=False)), **kwargs}
        if len(given) < len(args) + len(kwargs) or not self._required <= given.keys() <= self.hints.keys():
            self.signature.bind(*args, **kwargs)  # raises what Python would
        return {name: value for name, value in given.items() if value is not UNSET}

    def brief(self, result: object) -> Any:
        """The result of an operation that echoes spans, in short: the number of each that was kept, False if not."""
        if isinstance(result, list):
            return [self.brief(item) for item in result]
        return result is not None and (getattr(result, "sequence_id", None) or True)

    def expand(self, brief: Any, arguments: Mapping[str, Any]) -> Any:
        """The result that was told in short."""
        given = arguments[self.echoes or ""]
        if isinstance(brief, list):
            return [_numbered(item, kept) for item, kept in zip(given, brief, strict=True)]
        return _numbered(given, brief)


def _numbered(span: Any, kept: "int | bool") -> object:
    """A span with the number under which it was kept; None if it was not."""
    if not kept:
        return None
    return span if kept is True or span.sequence_id else span.model_copy(update={"sequence_id": kept})


def operation(
    verb: Verb,
    path: str,
    *,
    who: Who,
    ids: str = "",
    body: str | None = None,
    status: int = 200,
    mutates: bool | None = None,
    watchdog: bool = True,
    many: str | None = None,
    hot: bool = False,
    loose: str | None = None,
    echoes: str | None = None,
) -> Callable[[MethodT], MethodT]:
    """Declare a store method as an operation; `ids` are names with blanks between, and a GET mutates nothing."""
    declared = functools.partial(
        Operation,
        route=Route(verb, path, body, status),
        who=who,
        ids=tuple(ids.split()),
        mutates=verb != "GET" if mutates is None else mutates,
        watchdog=watchdog,
        many=many,
        hot=hot,
        loose=loose,
        echoes=echoes,
    )

    def mark(method: MethodT) -> MethodT:
        @functools.wraps(method)
        async def missing(self: Any, *args: object, **kwargs: object) -> object:
            return await self._compose(method.__name__, *args, **kwargs)

        setattr(missing, "__operation__", declared)  # noqa: B010
        return cast("MethodT", missing)

    return mark


@functools.cache
def operations_of(store_type: type) -> Mapping[str, Operation]:
    """Every operation a store type declares or inherits, by name, in the order of declaration."""
    found: dict[str, Operation] = {}
    for owner in reversed(store_type.__mro__):
        for name, method in vars(owner).items():
            declare: functools.partial[Operation] | None = getattr(method, "__operation__", None)
            if declare is not None and name not in found:
                signature = inspect.signature(method)
                parameters = [p for p in signature.parameters.values() if p.name != "self"]
                signature = signature.replace(parameters=parameters)
                found[name] = declare(name=name, signature=signature, declared=method)
    return types.MappingProxyType(found)


def forward_operations(
    make_method: Callable[[Operation], Callable[..., object]],
) -> Callable[[type[StoreT]], type[StoreT]]:
    """Class decorator: give the class a method for every operation it does not define itself."""

    def fill(store_type: type[StoreT]) -> type[StoreT]:
        operations = operations_of(store_type)  # type: ignore[arg-type] # mypy: type[T] is not known to be hashable
        for op in operations.values():
            if op.name not in vars(store_type):
                setattr(store_type, op.name, functools.wraps(op.declared)(make_method(op)))
        return store_type

    return fill


def _without_unset(hint: object) -> object:
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(member for member in get_args(hint) if member is not Unset)]  # noqa: UP007 # built at run time
    return hint
