"""A journal of answered calls whose spans the store does not have yet.

A call is written here before its answer goes out, and forgotten when its spans are stored. What a process that was
killed left behind is read by the next one that opens the journal. The file lies in the operating system's hands as
soon as it is written: it outlives the process, though not a loss of power.

A journal is a directory of segments, each written by one process, which holds a lock on it while it lives. An entry is
a header with the lengths and the checksum of its four parts; what a torn last write left is told by them.
"""

import contextlib
import logging
import os
import struct
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.records import CallRecord

__all__ = ["Journal"]

logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 8 * 1024**2
"""A segment that has grown to this is closed, and goes when all its calls are stored."""
_HEAD: Final = struct.Struct("<4sIIIII")
_MAGIC: Final = b"AGLJ"
_SUFFIX: Final = ".calls"


class _Segment:
    """A file of entries, some of which may be settled by now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.size = 0
        self.open_calls = 0
        _lock(self.file)

    def close(self) -> None:
        """Give the file up; it is removed if nothing in it is open."""
        if self.open_calls == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self.file)


class Journal:
    """Answered calls on their way to the store. Used by one thread at a time."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._current: _Segment | None = None
        self._segment_of: dict[str, _Segment] = {}  # by span id
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigurationError(
                f"The journal of calls cannot be kept in '{directory}': {error}. Name another directory."
            ) from error

    def write(self, record: CallRecord) -> None:
        """Keep a call until it is settled; OSError if the disk does not take it."""
        parts = record.to_bytes()
        body = b"".join(parts)
        head = _HEAD.pack(_MAGIC, zlib.crc32(body), *(len(part) for part in parts))
        segment = self._writable()
        entry = head + body
        written = os.write(segment.file, entry)
        if written != len(entry):  # the disk is full: the piece is as good as a torn write
            os.ftruncate(segment.file, segment.size)
            raise OSError(f"Only {written} of {len(entry)} bytes could be written to '{segment.path}'.")
        segment.size += written
        segment.open_calls += 1
        self._segment_of[record.span_id] = segment

    def settle(self, span_id: str) -> None:
        """The call is stored, or given up; one that was not written is none of ours."""
        segment = self._segment_of.pop(span_id, None)
        if segment is None:
            return
        segment.open_calls -= 1
        if segment.open_calls == 0:
            if segment is self._current:
                os.ftruncate(segment.file, 0)
                segment.size = 0
            else:
                segment.close()

    def left_behind(self) -> Iterator[tuple[Path, list[CallRecord]]]:
        """Segments of processes that are gone, with their calls; to be removed with `forget` once these are stored."""
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            if self._current is not None and path == self._current.path:
                continue
            with contextlib.suppress(FileNotFoundError):
                file = os.open(path, os.O_RDWR)
                try:
                    if _lock(file):
                        yield path, list(_entries(path))
                finally:
                    os.close(file)

    def forget(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def close(self) -> None:
        """Calls that are still open stay, for the next process."""
        segments = {*self._segment_of.values()} | ({self._current} if self._current is not None else set())
        for segment in segments:
            segment.close()
        self._segment_of.clear()
        self._current = None

    def _writable(self) -> _Segment:
        if self._current is not None and self._current.size >= self._segment_bytes:
            if self._current.open_calls == 0:
                self._current.close()
            self._current = None
        if self._current is None:
            self._current = _Segment(self.directory / f"{uuid.uuid4().hex}{_SUFFIX}")
        return self._current


def _entries(path: Path) -> Iterator[CallRecord]:
    content = path.read_bytes()
    position = 0
    while position + _HEAD.size <= len(content):
        magic, checksum, *lengths = _HEAD.unpack_from(content, position)
        start = position + _HEAD.size
        end = start + sum(lengths)
        if magic != _MAGIC or end > len(content) or zlib.crc32(content[start:end]) != checksum:
            logger.warning("The journal '%s' is torn after %d bytes; what lies behind is left out.", path, position)
            return
        parts = []
        for length in lengths:
            parts.append(content[start : start + length])
            start += length
        yield CallRecord.from_bytes(*parts)
        position = end
    if position != len(content):
        logger.warning("The journal '%s' ends in the middle of a call, which was not answered.", path)


def _lock(file: int) -> bool:
    """Take the lock of a segment; False if a living process has it. Where there are no locks, every segment is free."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
