"""A journal of answered calls whose spans the store does not have yet.

A call is written here before its answer goes out, and forgotten when its spans are stored. The next process that opens
the journal reads what a killed one left behind. The operating system has the data as soon as it is written: it outlives
the process, though not a loss of power.

A journal is a directory of segments, each written by one process, which holds a lock on it while it lives. An entry is
a header with the lengths and the checksum of its four parts, by which a torn last write is found. A stored entry is
marked in its header, so that whoever reads the segment has only the others to store.
"""

import contextlib
import logging
import os
import struct
import uuid
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.call_record import CallRecord
from agentlightning.utils.once import fork_handlers
from agentlightning.utils.private_files import check_own_folder, create_file

logger = logging.getLogger(__name__)

FOLDER_SUFFIX: Final = ".proxy-journal"
"""Of the directory beside the file of a store."""
SEGMENT_BYTES: Final = 8 * 1024**2
"""A segment that has grown to this is closed, and removed when all its calls are stored."""
_HEAD: Final = struct.Struct("<4sIIIII")
_MAGIC: Final = b"AGLJ"
_STORED: Final = b"AGLS"
_SUFFIX: Final = ".calls"
_UNREADABLE: Final = ".unreadable"
"""Appended to the name of a segment that nobody can read, so that it is kept and not tried again."""


class _Segment:
    """An open file of entries, locked where the file system has locks.

    A forked child closes its copy of the file, since the copy of the lock would outlive the process that took it.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self.file = file
        self.is_locked = _lock(file)
        fork_handlers().add(self, _Segment.close_file)

    def mark_stored(self, place: int) -> None:
        """If the mark cannot be written the call is stored a second time, which the store does not mind."""
        with contextlib.suppress(OSError):
            os.pwrite(self.file, _STORED, place)

    def close_file(self) -> None:
        if self.file >= 0:
            with contextlib.suppress(OSError):
                os.close(self.file)
        self.file = -1


class _OwnSegment(_Segment):
    """A segment that this process writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, create_file(path))
        self.size = 0
        self.open_calls = 0
        # Until it is locked another process may take the empty file for a dead one's, and remove it.
        self.is_ours = self.is_locked and os.fstat(self.file).st_nlink > 0

    def append(self, entry: bytes) -> int:
        """Write an entry and return its place; OSError if it is not there as a whole."""
        place = self.size
        written = os.pwrite(self.file, entry, place)
        if written != len(entry):  # the disk is full: the piece is as good as a torn write
            os.ftruncate(self.file, self.size)
            raise OSError(f"Only {written} of {len(entry)} bytes could be written to '{self.path}'.")
        self.size += written
        return place

    def read(self, place: int) -> CallRecord:
        head = os.pread(self.file, _HEAD.size, place)
        body = os.pread(self.file, sum(_HEAD.unpack(head)[2:]), place + _HEAD.size)
        ((_, record),) = _entries(head + body, self.path)
        return record

    def empty(self) -> None:
        os.ftruncate(self.file, 0)
        self.size = 0

    def close(self) -> None:
        """Give the file up, and remove it if every call in it is stored."""
        if self.open_calls == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.close_file()


class OldSegment(_Segment):
    """A segment of a process that is gone."""

    calls: list[CallRecord]
    _places: dict[str, int]

    def load(self) -> bool:
        """Read its calls; False if it is gone by now or cannot be read."""
        try:
            entries = list(_entries(self.path.read_bytes(), self.path))
        except FileNotFoundError:
            return False
        except (ValueError, TypeError, KeyError) as error:  # whole by its checksum, but not written by this release
            aside = self.path.with_name(self.path.name + _UNREADABLE)
            self.path.rename(aside)
            logger.error("The calls in the journal '%s' cannot be read, so they are not stored: %r", aside, error)
            return False
        self.calls = [record for _, record in entries]
        self._places = {record.span_id: place for place, record in entries}
        return True

    def settle(self, span_id: str) -> None:
        """A call is stored: should this process be killed, the next one leaves it out."""
        self.mark_stored(self._places[span_id])

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class Journal:
    """Answered calls on their way to the store. Used by one thread at a time."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self._segment_bytes = segment_bytes
        # An empty directory that somebody made for us and named stays.
        self._is_removed_when_empty = directory.name.endswith(FOLDER_SUFFIX) or not directory.exists()
        self._current: _OwnSegment | None = None
        self._places: dict[str, tuple[_OwnSegment, int]] = {}  # by span id
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
            self._retire()  # the next call begins a new segment, should this one be beyond repair
            raise
        segment.open_calls += 1
        self._places[record.span_id] = segment, place

    def read(self, span_id: str) -> CallRecord:
        """A call that is written and not settled."""
        segment, place = self._places[span_id]
        return segment.read(place)

    def settle(self, span_id: str) -> None:
        """The call is stored, or given up; does nothing for one that was not written."""
        if span_id not in self._places:
            return
        segment, place = self._places.pop(span_id)
        segment.open_calls -= 1
        if segment.open_calls:
            segment.mark_stored(place)
        elif segment is self._current:
            segment.empty()
        else:
            segment.close()

    def old_segments(self) -> Generator[OldSegment, None, None]:
        """Segments of processes that are gone. While one is looked at no other process gets it."""
        own = {segment.path for segment, _ in self._places.values()}
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            if path in own or (self._current is not None and path == self._current.path):
                continue
            try:
                segment = OldSegment(path, os.open(path, os.O_RDWR))
            except FileNotFoundError:
                continue
            try:
                if segment.is_locked and segment.load():
                    yield segment
            finally:
                segment.close_file()

    def close(self) -> None:
        """Calls that are still open stay, for the next process."""
        segments = {segment for segment, _ in self._places.values()}
        if self._current is not None:
            segments.add(self._current)
        for segment in segments:
            segment.close()
        self._places.clear()
        self._current = None
        if self._is_removed_when_empty:
            with contextlib.suppress(OSError):  # it is not empty, or gone
                self.directory.rmdir()

    def _writable(self) -> _OwnSegment:
        if self._current is not None and self._current.size >= self._segment_bytes:
            self._retire()
        while self._current is None:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # another proxy may have found it empty
            segment = _OwnSegment(self.directory / f"{uuid.uuid4().hex}{_SUFFIX}")
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


def _entries(content: bytes, path: Path) -> Iterator[tuple[int, CallRecord]]:
    """Calls that are not stored, with their places."""
    position = 0
    while position + _HEAD.size <= len(content):
        magic, checksum, *lengths = _HEAD.unpack_from(content, position)
        start = position + _HEAD.size
        end = start + sum(lengths)
        if magic not in (_MAGIC, _STORED) or end > len(content) or zlib.crc32(content[start:end]) != checksum:
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
