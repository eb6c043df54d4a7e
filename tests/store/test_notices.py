"""The notice board: a bounded log that wakes who waits for it."""

import asyncio

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


# ---------------------------------------------------------------------- the log


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
