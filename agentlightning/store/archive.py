"""Archives: a whole store as JSON lines, to move it, keep it, or look into it.

The first line says what the file is, then follows one record a line, and the last line counts them, so that a file that
was cut off is recognised. An archive is read into a store that holds nothing yet, whole or not at all.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field, StrictStr, TypeAdapter

from agentlightning.errors import ConfigurationError, IncompatibleStore, InvalidTransition
from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour.attempts import known_attempt
from agentlightning.store.behaviour.records import LATEST_RESOURCES, latest_resources_id, metrics_of
from agentlightning.store.behaviour.rollouts import known_rollout
from agentlightning.store.lifecycle import due_time, is_queuing
from agentlightning.store.local import Call, LocalStore, local_store
from agentlightning.store.selection import LARGEST_NUMBER, Selection
from agentlightning.store.transaction import Setting, Transaction
from agentlightning.store.values import as_json, check_json
from agentlightning.types import Attempt, MetricPoint, ResourcesUpdate, Rollout, Run, Span, Worker
from agentlightning.utils.private_files import path_errors, replaced_file

__all__ = ["export_store", "import_store"]

FORMAT = "agentlightning-store"
VERSION = 1
ROLLOUTS_AT_ONCE = 500

_ARCHIVE_START = b'{"kind":"header",'

_EVERYTHING = Selection()


async def export_store(store: LightningStore, path: str | Path) -> dict[str, int]:
    """Write everything in a store, as it is at one moment, to a file; returns how many records of each kind.

    An earlier archive of that name is replaced at the end. Another file is not: `ConfigurationError`.
    """
    counts: dict[str, int] = await _local(store)._read(Call("export", _write_archive, (Path(path),)))
    return counts


async def import_store(store: LightningStore, path: str | Path) -> dict[str, int]:
    """Read an archive into an empty store, whole or not at all; returns how many records of each kind."""
    call = Call("import", _read_archive, (Path(path),), is_large=True, spills=True)
    counts: dict[str, int] = await _local(store)._write(call)
    return counts


def _local(store: LightningStore) -> LocalStore:
    inner = local_store(store)
    if inner is None:
        raise ConfigurationError(
            f"A {type(store).__name__} cannot be exported or imported from here; do it where the store itself is."
        )
    return inner


# ---------------------------------------------------------------------- writing


def _write_archive(tx: Transaction, now: float, path: Path) -> dict[str, int]:
    counts: Counter[str] = Counter()
    with path_errors(path):
        if path.exists():
            with path.open("rb") as earlier:
                start = earlier.read(len(_ARCHIVE_START))
            if start not in (b"", _ARCHIVE_START):
                raise ConfigurationError(
                    f"'{path}' exists and is not an archive; an export replaces an earlier export only. "
                    "Give another path."
                )
        with replaced_file(path) as file:
            file.write(_line("header", {"format": FORMAT, "version": VERSION, "time": now}))
            for kind, value in _records(tx):
                counts[kind] += 1
                file.write(_line(kind, value))
            file.write(_line("end", dict(counts)))
    return dict(counts)


def _line(kind: str, value: object) -> bytes:
    if isinstance(value, Rollout):
        for name in ("input", "output"):  # a memory store may hold what JSON cannot
            check_json(getattr(value, name), name)
    body = value.model_dump_json().encode() if isinstance(value, BaseModel) else as_json(value, kind)
    return b'{"kind":"%s","value":%s}\n' % (kind.encode(), body)


def _records(tx: Transaction) -> Iterator[tuple[str, Any]]:
    for resources in tx.select(ResourcesUpdate, _EVERYTHING).items:
        yield "resources", resources
    latest = latest_resources_id(tx)
    if latest is not None:
        yield "latest_resources", latest
    for worker in tx.select(Worker, _EVERYTHING).items:
        yield "worker", worker
    for run in tx.select(Run, _EVERYTHING).items:
        yield "run", run
        for point in metrics_of(tx, run.run_id):
            yield "metrics", point
    offset = 0
    while page := tx.select(Rollout, Selection(limit=ROLLOUTS_AT_ONCE, offset=offset)).items:
        for rollout in page:
            yield "rollout", rollout
            for attempt in tx.get_attempts(rollout.rollout_id):
                yield "attempt", attempt
            for span in tx.select(Span, _EVERYTHING, of=rollout.rollout_id).items:
                yield "span", span
            yield "sequence", [rollout.rollout_id, tx.get_last_sequence(rollout.rollout_id)]
        offset += len(page)
    for rollout_id in tx.queue_ids():
        yield "queued", rollout_id


# ---------------------------------------------------------------------- reading


def _read_archive(tx: Transaction, now: float, path: Path) -> dict[str, int]:
    if any(tx.counts().values()):
        raise InvalidTransition(f"'{path}' can only be imported into an empty store; this one is not.")
    counts: Counter[str] = Counter()
    expected: dict[str, int] | None = None
    with path_errors(path):
        file = path.open("rb")
    with file:
        for number, line in enumerate(file, 1):
            where = f"'{path}' line {number}"
            try:
                record = orjson.loads(line)
                kind, value = record["kind"], record["value"]
                if not isinstance(kind, str):
                    raise TypeError(f"kind is {kind!r}")
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise IncompatibleStore(f"{where} is not an archive record; nothing was imported.") from error
            if number == 1:
                _check_header(kind, value, path)
            elif kind == "end":
                expected = value
            else:
                try:
                    _put(tx, kind, value)
                except (ValueError, LookupError, TypeError) as error:
                    message = f"{where}: not a valid '{kind}' record ({error}); nothing was imported."
                    raise IncompatibleStore(message) from error
                tx.spill()
                counts[kind] += 1
    if expected != counts:
        raise IncompatibleStore(f"'{path}' was cut off ({dict(counts)} of {expected}); nothing was imported.")
    return dict(counts)


def _check_header(kind: str, value: object, path: Path) -> None:
    if kind != "header" or not isinstance(value, dict) or value.get("format") != FORMAT:
        raise IncompatibleStore(f"'{path}' is not an archive of a store.")
    if value.get("version") != VERSION:
        raise IncompatibleStore(
            f"'{path}' has archive version {value.get('version')}, this release reads {VERSION}: "
            "read it with the release that wrote it, or a later one."
        )


_MODELS: dict[str, type[Rollout] | type[ResourcesUpdate] | type[Worker] | type[Run]] = {
    "rollout": Rollout,
    "resources": ResourcesUpdate,
    "worker": Worker,
    "run": Run,
}


_ID = TypeAdapter(StrictStr)
_SEQUENCE = TypeAdapter(tuple[StrictStr, Annotated[int, Field(strict=True, ge=0, le=LARGEST_NUMBER)]])


def _put(tx: Transaction, kind: str, value: Any) -> None:
    for name, number in value.items() if isinstance(value, dict) else ():
        if isinstance(number, int) and not -LARGEST_NUMBER <= number <= LARGEST_NUMBER:
            raise ValueError(f"{name} is a number of more than 63 bits")
    if kind == "span":
        span = Span.model_validate(value)
        attempt = known_attempt(tx, span.rollout_id, span.attempt_id)
        tx.append_spans(attempt, [span], None)
    elif kind == "attempt":
        attempt = Attempt.model_validate(value)
        tx.put(attempt)
        tx.schedule(attempt.rollout_id, due_time(known_rollout(tx, attempt.rollout_id), attempt))
    elif kind == "metrics":
        point = MetricPoint.model_validate(value)
        if tx.get(Run, point.run_id) is None:
            raise ValueError(f"there is no run '{point.run_id}' before it")
        tx.put(point)
    elif kind == "sequence":
        rollout_id, last = _SEQUENCE.validate_python(value)
        tx.put_last_sequence(known_rollout(tx, rollout_id).rollout_id, last)
    elif kind == "queued":
        rollout = known_rollout(tx, _ID.validate_python(value))
        if not is_queuing(rollout):
            raise ValueError(f"rollout '{rollout.rollout_id}' is '{rollout.status}', which does not queue")
        tx.push(rollout.rollout_id)
    elif kind == "latest_resources":
        if tx.get(ResourcesUpdate, _ID.validate_python(value)) is None:
            raise ValueError(f"there are no resources '{value}' before it")
        tx.put(Setting(LATEST_RESOURCES, value))
    else:
        tx.put(_MODELS[kind].model_validate(value))
