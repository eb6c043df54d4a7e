"""One connection's transaction in progress: statements are sent in a pipeline.

Statements go through psycopg's layer over libpq. Its cursors know pipelines too, but each of their statements is a
system call and a wait: a transaction of six small statements took 0.7 ms with them, and takes 0.14 ms.
"""

import functools
import itertools
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

import psycopg
from psycopg import generators
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from agentlightning.store.tables import Row

MOST_PREPARED: Final = 200
"""Statements that a connection keeps prepared; later ones are parsed each time."""


class Connection(psycopg.Connection[Row]):
    """A connection, and the names of the statements that are prepared on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statements: dict[str, tuple[bytes, tuple[int, ...]]] = {}
        """Names and types of parameters, by their texts."""
        self.prepared = 0


class PostgresSession:
    """A transaction; all of it has succeeded when the block ends, or the first error is raised.

    Statements have `?` for their parameters, as SQLite's have, and cast those that are arrays.
    """

    def __init__(self, connection: Connection, *, is_reader: bool = False) -> None:
        self.is_reader = is_reader
        self._connection = connection
        self._pgconn = connection.pgconn
        self._rows = Transformer.from_context(connection)
        self._sent = 0
        self._results: list[PGresult] = []
        self._preparations: dict[int, str] = {}  # what is prepared, by the place of the statement that does it

    def __enter__(self) -> "PostgresSession":
        self._pgconn.enter_pipeline_mode()
        self.send("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY" if self.is_reader else "BEGIN")
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._pgconn.pipeline_sync()
            self._sent += 1
            failure = self._receive()
            self._pgconn.exit_pipeline_mode()
        except psycopg.Error:
            self._connection.close()
            if error is None:
                raise
        else:
            if failure is not None and error is None:
                raise failure

    def send(self, sql: str, parameters: Sequence[object] = ()) -> int:
        """Send a statement without waiting; returns its place, under which its rows may be fetched later."""
        text, item_types = _translated(sql)
        encoded = list(map(_encoded, parameters, item_types))
        types, values = tuple([oid for oid, _ in encoded]), [value for _, value in encoded]
        connection = self._connection
        name, known = connection.statements.get(sql, (b"", types))
        wanted = tuple([given or before for given, before in zip(types, known, strict=True)])  # None is of any type
        if (not name or wanted != known) and connection.prepared < MOST_PREPARED:
            connection.prepared += 1
            name, known = connection.statements[sql] = b"agl%d" % connection.prepared, wanted
            self._pgconn.send_prepare(name, text, wanted)
            self._preparations[self._sent] = sql
            self._sent += 1
        if not name or wanted != known:
            self._pgconn.send_query_params(text, values, types, [Format.BINARY] * len(values), Format.BINARY)
        else:
            self._pgconn.send_query_prepared(name, values, [Format.BINARY] * len(values), Format.BINARY)
        self._sent += 1
        return self._sent - 1

    def put(self, sql: str, rows: Iterable[Row]) -> None:
        """Send a statement that unnests the columns of rows, if there are any."""
        columns = list(zip(*rows, strict=True))
        if columns:
            self.send(sql, columns)

    def fetch(self, place: int) -> list[Row]:
        """The rows of a statement that was sent; waits for all that were."""
        if place >= len(self._results):
            self._pgconn.send_flush_request()
            failure = self._receive()
            if failure is not None:
                raise failure
        self._rows.set_pgresult(self._results[place])
        return self._rows.load_rows(0, self._results[place].ntuples, tuple)

    def select(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """The rows of a statement."""
        return self.fetch(self.send(sql, parameters))

    def _receive(self) -> psycopg.Error | None:
        """Wait for all that was sent; the first failure of what came now."""
        failure: psycopg.Error | None = None
        self._connection.wait(generators.send(self._pgconn))
        while len(self._results) < self._sent:
            results = self._connection.wait(generators.fetch_many(self._pgconn))
            if not results:
                raise psycopg.OperationalError("the connection is lost")
            result = results[-1]
            self._results.append(result)
            if result.status in _GOOD:
                continue
            self._connection.statements.pop(self._preparations.get(len(self._results) - 1, ""), None)
            is_first = result.status == ExecStatus.FATAL_ERROR
            failure = failure or (error_from_result(result) if is_first else psycopg.errors.PipelineAborted())
        return failure


_GOOD: Final = frozenset([ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.PIPELINE_SYNC])


@functools.lru_cache(1024)
def _translated(sql: str) -> tuple[bytes, list[str]]:
    """A statement with PostgreSQL's marks for its parameters, and the types to which it casts arrays."""
    numbers = itertools.count(1)
    return re.sub(r"\?", lambda _: f"${next(numbers)}", sql).encode(), re.findall(r"\?(?:::(\w+)\[\])?", sql)


# ---------------------------------------------------------------------- values in PostgreSQL's binary form

_OIDS: Final = {"bigint": 20, "float8": 701, "text": 25, "bytea": 17}
_NUMBERS: Final = {"bigint": struct.Struct("!iq"), "float8": struct.Struct("!id")}
_LENGTH: Final = struct.Struct("!i")
_NULL: Final = _LENGTH.pack(-1)


def _encoded(value: Any, item_type: str) -> tuple[int, bytes | None]:
    """The type of a value, 0 where the statement gives it, and its bytes."""
    if value is None:
        return 0, None
    if item_type:
        return 0, _array(value, item_type)
    if isinstance(value, str):
        return _OIDS["text"], value.encode()
    if isinstance(value, bytes):
        return _OIDS["bytea"], value
    kind = "float8" if isinstance(value, float) else "bigint"
    return _OIDS[kind], _NUMBERS[kind].pack(8, value)[4:]


def _array(items: Sequence[Any], item_type: str) -> bytes:
    """Items, some of which may be None. Psycopg does this too, but looks at each item several times."""
    parts = [struct.pack("!iiIii", 1, 1, _OIDS[item_type], len(items), 1)]
    if item_type in _NUMBERS:
        pack = _NUMBERS[item_type].pack
        parts += [_NULL if item is None else pack(8, item) for item in items]
    else:
        for item in items:
            data = item.encode() if item_type == "text" and item is not None else item
            parts += (_NULL,) if data is None else (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


_UNSTORABLE: Final = re.compile("[\\0\ud800-\udfff]")


def is_storable(value: object) -> bool:
    """Whether a column of texts can hold it: neither NUL nor a lone surrogate."""
    return isinstance(value, str) and not _UNSTORABLE.search(value)
