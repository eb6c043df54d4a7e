"""The journal of answered calls: torn writes, several segments, several processes, a disk that is full."""

import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy import journal as journals
from agentlightning.llm_proxy.call_record import CallRecord, Origin
from agentlightning.llm_proxy.journal import Journal
from tests import warm_python
from tests.llm_proxy.accounts import record
from tests.stub_model.raw import until


def found(directory: Path) -> list[CallRecord]:
    """What another process finds there; it leaves it."""
    return [call for segment in Journal(directory).old_segments() for call in segment.calls]


def ids(calls: list[CallRecord]) -> list[str]:
    return sorted(call.span_id for call in calls)


def written(directory: Path, count: int, **options: int) -> tuple[Journal, list[CallRecord]]:
    journal = Journal(directory, **options)
    calls = [record(number=number) for number in range(count)]
    for call in calls:
        journal.write(call)
    return journal, calls


def test_calls_that_are_not_settled_are_found_again(tmp_path: Path) -> None:
    journal, calls = written(tmp_path / "journal", 4)
    journal.settle(calls[1].span_id)
    journal.settle("0" * 16)  # one that was not written
    journal.close()

    assert found(tmp_path / "journal") == [calls[0], *calls[2:]]


def test_segment_and_a_directory_that_it_made_go_when_all_is_settled(tmp_path: Path) -> None:
    journal, calls = written(tmp_path / "journal", 3)
    for call in calls:
        journal.settle(call.span_id)

    assert [path.stat().st_size for path in journal.directory.iterdir()] == [0]
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_another_proxy_found_empty_is_made_again(tmp_path: Path) -> None:
    journal, other = Journal(tmp_path / "runs.db.proxy-journal"), Journal(tmp_path / "runs.db.proxy-journal")
    other.close()

    journal.write(record())
    journal.close()

    assert ids(found(journal.directory)) == [record().span_id]


def test_full_segments_go_one_by_one_and_calls_can_be_read_back(tmp_path: Path) -> None:
    journal, calls = written(tmp_path, 40, segment_bytes=2000)
    files = len(list(tmp_path.iterdir()))
    assert [journal.read(call.span_id) for call in calls] == calls

    for call in calls[:-1]:
        journal.settle(call.span_id)

    assert (calls[0].span_id in journal, calls[-1].span_id in journal) == (False, True)
    assert files > 5
    assert len(list(tmp_path.iterdir())) == 1
    journal.close()
    assert calls[-1].span_id in ids(found(tmp_path))


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bodies=st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300)), max_size=8),
    agent=st.none() | _TEXTS,
    error=st.none() | _TEXTS,
    usage=st.none() | st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)),
)
def test_every_call_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    bodies: list[tuple[bytes, bytes, bytes]],
    agent: str | None,
    error: str | None,
    usage: tuple[int, int] | None,
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    journal = Journal(directory, segment_bytes=1000)
    calls = [
        record(number=n, origin=Origin("ro", "at", agent), request=a, sent=b, response=c, error=error, usage=usage)
        for n, (a, b, c) in enumerate(bodies)
    ]
    for call in calls:
        journal.write(call)
    journal.close()

    assert sorted(found(directory), key=lambda call: call.span_id) == calls


# ---------------------------------------------------------------------- torn writes


def test_write_torn_at_any_byte_costs_the_last_call_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    journal = Journal(tmp_path / "whole")
    calls = [record(number=number, request=b"{}", response=b"{}") for number in range(2)]
    ends = []
    for call in calls:
        journal.write(call)
        (segment,) = (tmp_path / "whole").iterdir()
        ends.append(segment.stat().st_size)
    journal.close()
    whole = segment.read_bytes()
    torn = tmp_path / "torn"
    torn.mkdir()

    head, body = range(ends[0], ends[0] + 40), range(ends[0] + 40, len(whole) + 1, 17)
    for size in (0, 1, 23, 24, ends[0] - 1, *head, *body, len(whole)):
        (torn / "a.calls").write_bytes(whole[:size])

        assert found(torn) == [call for call, end in zip(calls, ends, strict=True) if end <= size]


@pytest.mark.parametrize("position", [0, 5, 30, 200])
def test_changed_byte_ends_the_segment_there(tmp_path: Path, position: int, caplog: pytest.LogCaptureFixture) -> None:
    journal, _ = written(tmp_path, 1)
    (segment,) = tmp_path.iterdir()
    place = segment.stat().st_size + position
    journal.write(record(number=1))
    journal.write(record(number=2))
    journal.close()
    content = bytearray(segment.read_bytes())
    content[place] ^= 0xFF
    segment.write_bytes(content)

    assert len(found(tmp_path)) == 1
    assert "is torn after" in caplog.text


def test_segment_of_another_release_is_set_aside_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    with monkeypatch.context() as changed:
        changed.setattr(CallRecord, "to_bytes", lambda _: (b'{"origin":["r","a",null],"flavour":1}', b"", b"", b""))
        journal.write(record())
    journal.close()

    assert found(tmp_path) == []
    assert "cannot be read" in caplog.text
    assert [path.suffix for path in tmp_path.iterdir()] == [".unreadable"]


# ---------------------------------------------------------------------- several processes


def test_segment_that_is_stored_in_part_is_taken_up_where_it_was_left(tmp_path: Path) -> None:
    journal, calls = written(tmp_path, 4)
    journal.close()

    segments = Journal(tmp_path).old_segments()
    segment = next(segments)
    assert found(tmp_path) == []  # while somebody stores it
    for call in segment.calls[:2]:
        segment.settle(call.span_id)
    segments.close()

    assert ids(found(tmp_path)) == ids(calls[2:])


_WRITER = """
import sys
from pathlib import Path
from agentlightning.llm_proxy.journal import Journal
from tests.llm_proxy.accounts import record
from tests.stub_model.raw import until
journal = Journal(Path(sys.argv[1]), segment_bytes=4000)
for number in range(50):
    journal.write(record(number=number))
print("written", flush=True)
sys.stdin.read()
"""


def test_killed_process_leaves_its_calls_to_the_next(tmp_path: Path) -> None:
    writer = warm_python.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    living = Journal(tmp_path)
    living.write(record(number=100))
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    assert found(tmp_path) == []  # both live

    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    until(lambda: found(tmp_path))

    assert ids(found(tmp_path)) == ids([record(number=number) for number in range(50)])
    living.close()
    assert len(found(tmp_path)) == 51


def test_file_that_is_removed_before_it_is_locked_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, is_first = journals._lock, [True]

    def slow_lock(file: int) -> bool:
        if is_first.pop() if is_first else False:
            for path in tmp_path.iterdir():  # another process takes the empty file for a dead one's
                path.unlink()
        return lock(file)

    monkeypatch.setattr(journals, "_lock", slow_lock)
    journal, _ = written(tmp_path, 1)
    journal.close()

    assert len(found(tmp_path)) == 1


# ---------------------------------------------------------------------- disks


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """As on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("limit", "marks"), [(10_000, "xxxxx.xxxx"), (100, ".........."), (10**6, "x" * 10)])
def test_full_disk_costs_the_calls_that_do_not_fit(tmp_path: Path, limit: int, marks: str) -> None:
    journal, kept = Journal(tmp_path), []
    with largest_file(limit):
        for number in range(10):
            call = record(number=number, response=b"x" * (100 if number != 5 else 10_000))
            try:
                journal.write(call)
            except OSError:
                continue
            kept.append(call)
        journal.close()

    assert kept == [call for call in kept if marks[int(call.trace_id, 16) - 1] == "x"]
    assert len(kept) == marks.count("x")
    assert ids(found(tmp_path)) == ids(kept)


def test_directory_that_cannot_be_made_or_that_others_may_write_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be kept in"):
        Journal(tmp_path / "file")

    folder = tmp_path / "journal"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="Other accounts may write to folder"):
        Journal(folder)
