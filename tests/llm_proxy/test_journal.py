"""The journal of answered calls: torn writes, several segments, several processes, a disk that is full."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy import journal as journals
from agentlightning.llm_proxy.call_record import CallRecord, Origin
from agentlightning.llm_proxy.journal import Journal
from tests.llm_proxy.accounts import record, until


def found(directory: Path) -> list[CallRecord]:
    """What another process finds there; it leaves it."""
    return [call for segment in Journal(directory).old_segments() for call in segment.calls]


def ids(calls: list[CallRecord]) -> list[str]:
    return sorted(call.span_id for call in calls)


def test_calls_that_are_not_settled_are_found_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    calls = [record(number=number, sequence_id=number or None) for number in range(4)]
    for call in calls:
        journal.write(call)
    journal.settle(calls[1].span_id)
    journal.close()

    assert found(tmp_path / "journal") == [calls[0], *calls[2:]]


def test_segment_goes_when_its_calls_are_settled(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.write(record(number=number))
    for number in range(3):
        journal.settle(record(number=number).span_id)

    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]
    journal.close()

    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_that_it_made_goes_with_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write(record())
    journal.settle(record().span_id)
    journal.close()

    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_a_call_in_it_stays(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write(record())
    journal.close()

    assert ids(found(tmp_path / "journal")) == [record().span_id]


def test_a_directory_that_another_proxy_found_empty_is_made_again(tmp_path: Path) -> None:
    journal, other = Journal(tmp_path / "runs.db.proxy-journal"), Journal(tmp_path / "runs.db.proxy-journal")
    other.close()

    journal.write(record())
    journal.close()

    assert ids(found(journal.directory)) == [record().span_id]


def test_full_segments_go_one_by_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=2000)
    calls = [record(number=number) for number in range(40)]
    for call in calls:
        journal.write(call)
    files = len(list(tmp_path.iterdir()))
    for call in calls[:-1]:
        journal.settle(call.span_id)

    assert files > 5
    assert len(list(tmp_path.iterdir())) == 1
    journal.close()
    assert calls[-1].span_id in ids(found(tmp_path))


def test_calls_can_be_read_back_before_they_are_settled(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=2000)
    calls = [record(number=number) for number in range(20)]
    for call in calls:
        journal.write(call)

    assert [journal.read(call.span_id) for call in calls] == calls
    assert calls[0].span_id in journal
    journal.settle(calls[0].span_id)
    assert calls[0].span_id not in journal
    journal.close()


def test_settling_what_was_not_written_is_harmless(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    journal.settle("0" * 16)
    journal.close()

    assert list(tmp_path.iterdir()) == []


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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

    read = {call.span_id: call for call in found(directory)}

    for call in calls:
        same = read[call.span_id]
        same.usage = None if same.usage is None else (same.usage[0], same.usage[1])
        assert same == call


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

    for size in range(len(whole) + 1):
        (torn / "a.calls").write_bytes(whole[:size])

        assert found(torn) == [call for call, end in zip(calls, ends, strict=True) if end <= size]


@pytest.mark.parametrize("position", [0, 5, 30, 200])
def test_changed_byte_ends_the_segment_there(tmp_path: Path, position: int, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    journal.write(record(number=0))
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


def test_segment_of_another_release_is_set_aside_and_told(
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


def test_segment_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    living = Journal(tmp_path)
    living.write(record(number=1))

    assert found(tmp_path) == []

    living.close()
    assert ids(found(tmp_path)) == [record(number=1).span_id]


def test_segment_that_somebody_stores_is_given_to_nobody_else(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(record())
    journal.close()

    segments = Journal(tmp_path).old_segments()
    next(segments)

    assert found(tmp_path) == []
    segments.close()
    assert len(found(tmp_path)) == 1


def test_segment_that_is_stored_in_part_is_taken_up_where_it_was_left(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(4):
        journal.write(record(number=number))
    journal.close()

    segments = Journal(tmp_path).old_segments()
    segment = next(segments)
    for call in segment.calls[:2]:
        segment.settle(call.span_id)
    segments.close()

    assert ids(found(tmp_path)) == [record(number=number).span_id for number in (2, 3)]


_WRITER = """
import sys
from pathlib import Path
from agentlightning.llm_proxy.journal import Journal
from tests.llm_proxy.accounts import record
journal = Journal(Path(sys.argv[1]), segment_bytes=4000)
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    journal.write(record(number=number))
print("written", flush=True)
sys.stdin.read()
"""


def test_killed_processes_leave_their_calls_to_the_next(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(first), str(first + 50)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for first in (0, 100)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
    assert found(tmp_path) == []  # both live

    os.kill(writers[0].pid, signal.SIGKILL)
    writers[0].communicate()
    until(lambda: found(tmp_path))

    assert ids(found(tmp_path)) == ids([record(number=number) for number in range(50)])
    os.kill(writers[1].pid, signal.SIGKILL)
    writers[1].communicate()
    assert len(found(tmp_path)) == 100


def test_file_that_is_removed_before_it_is_locked_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, is_first = journals._lock, [True]

    def slow_lock(file: int) -> bool:
        if is_first.pop() if is_first else False:
            for path in tmp_path.iterdir():  # another process takes the empty file for a dead one's
                path.unlink()
        return lock(file)

    monkeypatch.setattr(journals, "_lock", slow_lock)
    journal = Journal(tmp_path)
    journal.write(record())
    journal.close()

    assert len(found(tmp_path)) == 1


# ---------------------------------------------------------------------- disks

_FULL_DISK = """
import resource, sys
from pathlib import Path
from agentlightning.llm_proxy.journal import Journal
from tests.llm_proxy.accounts import record
journal = Journal(Path(sys.argv[1]))
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
written = []
for number in range(10):
    try:
        journal.write(record(number=number, response=b"x" * (100 if number != 5 else 10_000)))
    except OSError:
        written.append(".")
    else:
        written.append("x")
print("".join(written))
journal.close()
"""


@pytest.mark.parametrize(("limit", "written"), [(10_000, "xxxxx.xxxx"), (100, ".........."), (10**6, "x" * 10)])
def test_full_disk_costs_the_calls_that_do_not_fit(tmp_path: Path, limit: int, written: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path), str(limit)], capture_output=True, text=True, check=True
    )

    assert told.stdout.strip() == written
    kept = [record(number=number).span_id for number, mark in enumerate(written) if mark == "x"]
    assert ids(found(tmp_path)) == sorted(kept)


def test_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ValueError, match="cannot be kept in"):
        Journal(tmp_path / "file")


def test_a_folder_that_others_may_write_to_is_no_place_for_a_journal(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    folder.chmod(0o777)

    with pytest.raises(ConfigurationError, match="Other accounts may write to folder"):
        Journal(folder)
