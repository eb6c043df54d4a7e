"""The notice board: a bounded log that wakes who waits for it."""

import asyncio
import threading
from contextlib import ExitStack

import pytest

from agentlightning.store.notices import Listener, NoticeBoard, NoticeFields
from agentlightning.types import Notice, NoticeKind

PATIENCE_SECONDS = 30.0
"""How long a test waits for what must happen at once before it fails."""


def notice(
    cursor: int, kind: NoticeKind = "rollout", rollout_id: str | None = None, status: str | None = None
) -> Notice:
    return Notice(kind, cursor, rollout_id, status=status)


def queued(cursor: int, status: str = "queuing") -> NoticeFields:
    return notice(cursor, status=status)


def board_with(*cursors: int, capacity: int = 100) -> NoticeBoard:
    board = NoticeBoard(capacity)
    board.publish([notice(cursor) for cursor in cursors])
    return board


async def woken(listener: Listener) -> None:
    """Return once the listener is woken; fail if it never is."""
    await asyncio.wait_for(listener.wait(None), PATIENCE_SECONDS)


# ---------------------------------------------------------------------- the log


@pytest.mark.parametrize(("cursor", "expected"), [(0, [1, 2, 3]), (1, [2, 3]), (2, [3]), (3, []), (9, [])])
def test_reader_is_given_what_lies_behind_its_cursor(cursor: int, expected: list[int]) -> None:
    behind = board_with(1, 2, 3).after(cursor)

    assert behind is not None
    assert [told.cursor for told in behind] == expected


def test_reader_is_given_notices_with_names() -> None:
    board = NoticeBoard()
    board.publish([("span", 1, "ro-1", "at-1", None, "work", 7)])

    assert board.after(0) == [Notice("span", 1, "ro-1", "at-1", name="work", number=7)]


@pytest.mark.parametrize(
    ("cursor", "is_gap"), [(0, True), (1, True), (2, False), (3, False)], ids=["start", "lost", "oldest-kept", "kept"]
)
def test_reader_that_fell_behind_the_log_finds_a_gap(cursor: int, is_gap: bool) -> None:
    board = board_with(1, 2, 3, 4, capacity=2)

    assert (board.after(cursor) is None) is is_gap


def test_reader_from_before_the_board_finds_a_gap() -> None:
    board = NoticeBoard()

    board.start_at(5)

    assert (board.cursor, board.after(4), board.after(5)) == (5, None, ())


def test_board_goes_on_behind_its_start() -> None:
    board = NoticeBoard()
    board.start_at(5)

    board.publish([notice(6)])

    assert (board.after(5), board.after(4)) == ([notice(6)], None)


@pytest.mark.parametrize(
    ("published", "expected"),
    [([1, 2], [1, 2]), ([2, 3], [1, 2, 3]), ([1, 2, 3, 4], [1, 2, 3, 4]), ([2], [1, 2])],
    ids=["all-known", "overlap", "the-whole-log", "the-newest"],
)
def test_known_notices_are_not_kept_again(published: list[int], expected: list[int]) -> None:
    board = board_with(1, 2)

    board.publish([notice(cursor) for cursor in published])

    assert board.cursor == expected[-1]
    assert board.after(0) == [notice(cursor) for cursor in expected]


# ---------------------------------------------------------------------- listeners


async def test_listener_is_woken_by_a_notice_it_wants() -> None:
    board = NoticeBoard()

    with board.listening(lambda told: told.rollout_id == "mine") as listener:
        board.publish([notice(1, rollout_id="other"), notice(2, rollout_id="mine")])

        await woken(listener)


async def test_listener_sleeps_through_other_notices() -> None:
    board = NoticeBoard()

    with board.listening(lambda told: told.kind == "span") as listener:
        board.publish([notice(1), notice(2, "run")])

        assert not listener.is_woken


async def test_listener_sleeps_through_notices_already_known() -> None:
    board = board_with(1)

    with board.listening(lambda told: True) as listener:
        board.publish([notice(1)])

        assert not listener.is_woken


async def test_every_listener_is_woken() -> None:
    board = NoticeBoard()

    with board.listening(lambda told: True) as first, board.listening(lambda told: True) as second:
        board.publish([notice(1)])

        await asyncio.gather(woken(first), woken(second))


async def test_listener_is_woken_from_another_thread() -> None:
    board = NoticeBoard()

    with board.listening(lambda told: told.cursor == 1) as listener:
        waiting = asyncio.create_task(woken(listener))
        threading.Thread(target=board.publish, args=([notice(1)],)).start()

        await waiting


async def test_listener_can_be_woken_again() -> None:
    board = NoticeBoard()

    with board.listening(lambda told: True) as listener:
        for cursor in (1, 2):
            board.publish([notice(cursor)])
            await woken(listener)

        assert not listener.is_woken


async def test_notices_before_the_wait_are_not_missed() -> None:
    board = NoticeBoard()

    with board.listening(lambda told: True) as listener:
        board.publish([notice(1)])
        board.publish([notice(2)])
        await woken(listener)

        assert not listener.is_woken


async def test_wait_ends_with_its_timeout() -> None:
    with NoticeBoard().listening(lambda told: True) as listener:
        await listener.wait(0.0)

        assert not listener.is_woken


async def test_listener_that_left_is_not_woken() -> None:
    board = NoticeBoard()
    with board.listening(lambda told: True) as listener:
        assert board.has_waiters

    board.publish([notice(1)])

    assert (listener.is_woken, board.has_waiters) == (False, False)


def test_listener_of_a_closed_loop_is_woken_in_vain() -> None:
    async def listen() -> Listener:
        return Listener(lambda told: True)

    listener = asyncio.run(listen())

    listener.wake()

    assert listener.is_woken


# ---------------------------------------------------------------------- the line for work


@pytest.mark.parametrize(
    ("notices", "expected"),
    [
        pytest.param([queued(1)], [True, False, False], id="one"),
        pytest.param([queued(1), queued(2, "requeuing")], [True, True, False], id="two"),
        pytest.param([queued(n) for n in range(1, 6)], [True, True, True], id="more-than-wait"),
        pytest.param([queued(1, "running"), queued(2, "failed")], [False, False, False], id="not-queued"),
        pytest.param([notice(1, "run", status="queuing")], [False, False, False], id="not-a-rollout"),
    ],
)
async def test_one_waiter_in_line_is_called_for_each_queued_rollout(
    notices: list[NoticeFields], expected: list[bool]
) -> None:
    board = NoticeBoard()

    with board.queueing() as first, board.queueing() as second, board.queueing() as third:
        board.publish(notices)

        assert [waiter.is_woken for waiter in (first, second, third)] == expected


async def test_next_rollout_calls_the_next_waiter() -> None:
    board = NoticeBoard()

    with board.queueing() as first, board.queueing() as second:
        board.publish([queued(1)])
        board.publish([queued(2)])

        await asyncio.gather(woken(first), woken(second))


async def test_waiter_that_took_its_call_stays_first_in_line() -> None:
    board = NoticeBoard()

    with board.queueing() as first, board.queueing() as second:
        board.publish([queued(1)])
        await woken(first)
        board.publish([queued(2)])

        assert (first.is_woken, second.is_woken) == (True, False)


async def test_called_waiter_that_leaves_passes_its_call_on() -> None:
    board = NoticeBoard()
    leaving = ExitStack()
    leaving.enter_context(board.queueing())

    with board.queueing() as second, board.queueing() as third:
        board.publish([queued(1)])
        leaving.close()

        assert (second.is_woken, third.is_woken) == (True, False)


async def test_call_passed_on_skips_those_already_called() -> None:
    board = NoticeBoard()
    leaving = ExitStack()
    leaving.enter_context(board.queueing())

    with board.queueing() as second, board.queueing() as third:
        board.publish([queued(1), queued(2)])
        leaving.close()

        assert (second.is_woken, third.is_woken) == (True, True)


@pytest.mark.parametrize("is_called", [True, False], ids=["call-taken", "never-called"])
async def test_waiter_without_an_unused_call_leaves_quietly(is_called: bool) -> None:
    board = NoticeBoard()
    leaving = ExitStack()
    first = leaving.enter_context(board.queueing())

    with board.queueing() as second:
        if is_called:
            board.publish([queued(1)])
            await woken(first)
        leaving.close()

        assert not second.is_woken


async def test_everyone_can_be_woken_to_look_again() -> None:
    board = NoticeBoard()

    with board.listening(lambda told: False) as listener, board.queueing() as first, board.queueing() as second:
        board.wake_everyone()

        await asyncio.gather(woken(listener), woken(first), woken(second))
