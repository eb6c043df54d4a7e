"""A journal of answered calls whose spans the store does not have yet.

A call is written here before its answer goes out, and forgotten when its spans are stored. What a process that was
killed left behind is read by the next one that opens the journal. The file lies in the operating system's hands as
soon as it is written: it outlives the process, though not a loss of power.

A journal is a directory of segments, each written by one process, which holds a lock on it while it lives. An entry is
a header with the lengths and the checksum of its four parts; what a torn last write left is told by them. An entry that
is settled is marked in its header, so that whoever reads the segment has only the others to store.
"""

import contextlib
import logging
import os
import struct
import uuid
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.forking import inheritance
from agentlightning.llm_proxy.records import CallRecord
from agentlightning.utils.private_files import check_own_folder, create_file

__all__ = ["FOLDER_SUFFIX", "Journal", "LeftBehind"]

logger = logging.getLogger(__name__)

FOLDER_SUFFIX: Final = ".proxy-journal"
"""Of the directory beside the file of a store."""
SEGMENT_BYTES: Final = 8 * 1024**2
"""A segment that has grown to this is closed, and goes when all its calls are stored."""
_HEAD: Final = struct.Struct("<4sIIIII")
_MAGIC: Final = b"AGLJ"
_SETTLED: Final = b"AGLS"
_SUFFIX: Final = ".calls"
_UNREADABLE: Final = ".unreadable"
"""Appended to the name of a segment that nobody can read, so that it is kept and not tried again."""


@dataclass(frozen=True)
class LeftBehind:
    """A segment of a process that is gone."""

    path: Path
    calls: list[CallRecord]
    _file: int
    _places: dict[str, int]

    def settle(self, span_id: str) -> None:
        """A call is stored: should this process be killed, the next one leaves it out."""
        _mark(self._file, self._places[span_id])


class _Segment:
    """A file of entries, some of which may be settled by now. Locked, unless it could not be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = create_file(path)
        self.size = 0
        self.open_calls = 0
        # Until it is locked another process may take the empty file for a dead one's, and remove it.
        self.is_ours = _lock(self.file) and os.fstat(self.file).st_nlink > 0
        inheritance().keep_file(self.file)

    def append(self, entry: bytes) -> int:
        """Write an entry and tell where it stands; OSError if it is not there as a whole."""
        place = self.size
        written = os.pwrite(self.file, entry, place)  # all, a part, or an error and nothing
        if written != len(entry):  # the disk is full: the piece is as good as a torn write
            os.ftruncate(self.file, self.size)
            raise OSError(f"Only {written} of {len(entry)} bytes could be written to '{self.path}'.")
        self.size += written
        return place

    def read(self, place: int) -> CallRecord:
        head = os.pread(self.file, _HEAD.size, place)
        length = sum(_HEAD.unpack(head)[2:])
        ((_, record),) = _entries(head + os.pread(self.file, length, place + _HEAD.size), self.path)
        return record

    def empty(self) -> None:
        os.ftruncate(self.file, 0)
        self.size = 0

    def close(self) -> None:
        """Give the file up; it is removed if nothing in it is open."""
        if self.open_calls == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
        inheritance().release_file(self.file)
        os.close(self.file)


class Journal:
    """Answered calls on their way to the store. Used by one thread at a time."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self._segment_bytes = segment_bytes
        # A directory that somebody made for us and named stays when it is empty.
        self._goes_when_empty = directory.name.endswith(FOLDER_SUFFIX) or not directory.exists()
        self._current: _Segment | None = None
        self._places: dict[str, tuple[_Segment, int]] = {}  # by span id
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_own_folder(directory)
        except OSError as error:
            raise ConfigurationError(
                f"The journal of calls cannot be kept in '{directory}': {error}. Name another directory."
            ) from error

    def __contains__(self, span_id: object) -> bool:
        """Whether a call is written and not settled."""
        return span_id in self._places

    def write(self, record: CallRecord) -> None:
        """Keep a call until it is settled; OSError if the disk does not take it."""
        parts = record.to_bytes()
        body = b"".join(parts)
        head = _HEAD.pack(_MAGIC, zlib.crc32(body), *(len(part) for part in parts))
        segment = self._writable()
        try:
            place = segment.append(head + body)
        except OSError:
            self._retire()  # the next call begins a new one, should this one be beyond repair
            raise
        segment.open_calls += 1
        self._places[record.span_id] = segment, place

    def read(self, span_id: str) -> CallRecord:
        """A call that is written and not settled."""
        segment, place = self._places[span_id]
        return segment.read(place)

    def settle(self, span_id: str) -> None:
        """The call is stored, or given up; one that was not written is none of ours."""
        segment, place = self._places.pop(span_id, (None, 0))
        if segment is None:
            return
        segment.open_calls -= 1
        if segment.open_calls:
            _mark(segment.file, place)
        if segment.open_calls == 0:
            if segment is self._current:
                segment.empty()
            else:
                segment.close()

    def left_behind(self) -> Generator[LeftBehind, None, None]:
        """Segments of processes that are gone; each is to be removed with `forget` once its calls are stored.

        While one is looked at nobody else gets it.
        """
        own = {segment.path for segment, _ in self._places.values()}
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            if path in own or (self._current is not None and path == self._current.path):
                continue
            try:
                file = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue
            inheritance().keep_file(file)
            try:
                if _lock(file):
                    yield from _found(path, file)
            finally:
                inheritance().release_file(file)
                os.close(file)

    def forget(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def close(self) -> None:
        """Calls that are still open stay, for the next process."""
        segments = {segment for segment, _ in self._places.values()}
        if self._current is not None:
            segments.add(self._current)
        for segment in segments:
            segment.close()
        self._places.clear()
        self._current = None
        if self._goes_when_empty:
            with contextlib.suppress(OSError):  # it is not empty, or gone
                self.directory.rmdir()

    def _writable(self) -> _Segment:
        if self._current is not None and self._current.size >= self._segment_bytes:
            self._retire()
        while self._current is None:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # another proxy may have found it empty
            segment = _Segment(self.directory / f"{uuid.uuid4().hex}{_SUFFIX}")
            if segment.is_ours:
                self._current = segment
            else:
                segment.close()
        return self._current

    def _retire(self) -> None:
        """Begin a new segment with the next call; the current one goes when its calls are settled."""
        if self._current is not None and self._current.open_calls == 0:
            self._current.close()
        self._current = None


def _found(path: Path, file: int) -> Iterator[LeftBehind]:
    """A segment with its calls; none, if it is gone by now or cannot be read."""
    try:
        entries = list(_entries(path.read_bytes(), path))
    except FileNotFoundError:
        return
    except (ValueError, TypeError, KeyError) as error:  # whole by its checksum, but not written by this release
        aside = path.with_name(path.name + _UNREADABLE)
        path.rename(aside)
        logger.error("The calls in the journal '%s' cannot be read, so they are not stored: %r", aside, error)
        return
    calls = [record for _, record in entries]
    yield LeftBehind(path, calls, file, {record.span_id: place for place, record in entries})


def _mark(file: int, place: int) -> None:
    """An entry is settled; if that cannot be written it is stored a second time, which the store does not mind."""
    with contextlib.suppress(OSError):
        os.pwrite(file, _SETTLED, place)


def _entries(content: bytes, path: Path) -> Iterator[tuple[int, CallRecord]]:
    """Calls that are not settled, with their places."""
    position = 0
    while position + _HEAD.size <= len(content):
        magic, checksum, *lengths = _HEAD.unpack_from(content, position)
        start = position + _HEAD.size
        end = start + sum(lengths)
        if magic not in (_MAGIC, _SETTLED) or end > len(content) or zlib.crc32(content[start:end]) != checksum:
            logger.warning("The journal '%s' is torn after %d bytes; what lies behind is left out.", path, position)
            return
        parts = []
        for length in lengths:
            parts.append(content[start : start + length])
            start += length
        if magic == _MAGIC:
            yield position, CallRecord.from_bytes(*parts)
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
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
