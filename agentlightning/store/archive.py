"""Archives: a whole store as JSON lines, to move it, keep it, or look into it.

The first line says what the file is, then follows one record a line, and the last line counts them, so that a file that
was cut off is recognised. An archive is read into a store that holds nothing yet, whole or not at all.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from agentlightning.errors import ConfigurationError, IncompatibleStore, InvalidTransition
from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour.attempts import known_attempt
from agentlightning.store.behaviour.rollouts import LATEST_RESOURCES, latest_resources_id
from agentlightning.store.behaviour.runs import metrics_of
from agentlightning.store.lifecycle import due_time
from agentlightning.store.local import Call, LocalStore
from agentlightning.store.selection import Selection
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
    counts: dict[str, int] = await _local(store)._read(Call("export", _write_records, (Path(path),)))
    return counts


async def import_store(store: LightningStore, path: str | Path) -> dict[str, int]:
    """Read an archive into an empty store, whole or not at all; returns how many records of each kind."""
    counts: dict[str, int] = await _local(store)._write(Call("import", _read_records, (Path(path),), is_large=True))
    return counts


def _local(store: LightningStore) -> LocalStore:
    inner = getattr(store, "store", store)
    if not isinstance(inner, LocalStore):
        raise ConfigurationError(
            f"A {type(store).__name__} cannot be exported or imported from here; do it where the store itself is."
        )
    return inner


# ---------------------------------------------------------------------- writing


def _write_records(tx: Transaction, now: float, path: Path) -> dict[str, int]:
    counts: Counter[str] = Counter()
    _check_replaceable(path)
    with path_errors(path), replaced_file(path) as file:
        file.write(_line("header", {"format": FORMAT, "version": VERSION, "time": now}))
        for kind, value in _records(tx):
            counts[kind] += 1
            file.write(_line(kind, value))
        file.write(_line("end", dict(counts)))
    return dict(counts)


def _check_replaceable(path: Path) -> None:
    """Refuse to have a file replaced by an archive, unless it is one, or empty."""
    with path_errors(path):
        if not path.exists():
            return
        with path.open("rb") as file:
            start = file.read(len(_ARCHIVE_START))
    if start not in (b"", _ARCHIVE_START):
        raise ConfigurationError(
            f"'{path}' exists and is not an archive; an export replaces an earlier export only. Give another path."
        )


def _line(kind: str, value: Any) -> bytes:
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
    yield from _rollout_records(tx)
    for rollout_id in tx.queue_ids():
        yield "queued", rollout_id


def _rollout_records(tx: Transaction) -> Iterator[tuple[str, Any]]:
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


# ---------------------------------------------------------------------- reading


def _read_records(tx: Transaction, now: float, path: Path) -> dict[str, int]:
    if any(tx.counts().values()):
        raise InvalidTransition(f"'{path}' can only be imported into an empty store; this one is not.")
    counts: Counter[str] = Counter()
    expected: dict[str, int] | None = None
    with path_errors(path):
        file = path.open("rb")
    with file:
        for number, line in enumerate(file, 1):
            kind, value = _parsed(line, path, number)
            if number == 1:
                _check_header(kind, value, path)
            elif kind == "end":
                expected = value
            else:
                counts[kind] += 1
                _put(tx, kind, value, where=f"'{path}' line {number}")
    if expected != counts:
        raise IncompatibleStore(f"'{path}' was cut off ({dict(counts)} of {expected}); nothing was imported.")
    return dict(counts)


def _parsed(line: bytes, path: Path, number: int) -> tuple[str, Any]:
    try:
        record = orjson.loads(line)
        kind, value = record["kind"], record["value"]
        if not isinstance(kind, str):
            raise TypeError(f"kind is {kind!r}")
        return kind, value
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise IncompatibleStore(f"'{path}' line {number} is not an archive record; nothing was imported.") from error


def _check_header(kind: str, value: Any, path: Path) -> None:
    if kind != "header" or not isinstance(value, dict) or value.get("format") != FORMAT:
        raise IncompatibleStore(f"'{path}' is not an archive of a store.")
    if value.get("version") != VERSION:
        raise IncompatibleStore(
            f"'{path}' has archive version {value.get('version')}, this release reads {VERSION}: "
            "read it with the release that wrote it, or a later one."
        )


def _put(tx: Transaction, kind: str, value: Any, *, where: str) -> None:
    try:
        if kind == "span":
            _put_span(tx, Span.model_validate(value))
        elif kind == "rollout":
            tx.put(Rollout.model_validate(value))
        elif kind == "attempt":
            _put_attempt(tx, Attempt.model_validate(value))
        elif kind == "sequence":
            tx.put_last_sequence(*value)
        elif kind == "queued":
            tx.push(value)
        elif kind == "metrics":
            _put_metrics(tx, MetricPoint.model_validate(value))
        elif kind == "latest_resources":
            tx.put(Setting(LATEST_RESOURCES, value))
        else:
            tx.put(_RECORDS[kind].model_validate(value))
    except (ValueError, LookupError, TypeError) as error:
        raise IncompatibleStore(f"{where}: not a valid '{kind}' record ({error}); nothing was imported.") from error


_RECORDS: dict[str, type[ResourcesUpdate] | type[Worker] | type[Run]] = {
    "resources": ResourcesUpdate,
    "worker": Worker,
    "run": Run,
}


def _put_metrics(tx: Transaction, point: MetricPoint) -> None:
    if tx.get(Run, point.run_id) is None:
        raise ValueError(f"there is no run '{point.run_id}' before it")
    tx.put(point)


def _put_attempt(tx: Transaction, attempt: Attempt) -> None:
    tx.put(attempt)
    rollout = tx.get(Rollout, attempt.rollout_id)
    if rollout is not None:
        tx.schedule(attempt.rollout_id, due_time(rollout, attempt))


def _put_span(tx: Transaction, span: Span) -> None:
    """Keep a span without taking it as a sign of life."""
    attempt = known_attempt(tx, span.rollout_id, span.attempt_id)
    tx.append_spans(attempt, [span], attempt.last_heartbeat_time or attempt.start_time)
    tx.put(attempt)
