"""Outcomes: the rollouts of one run, and the error of a run in which all of them failed."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from agentlightning.errors import TrainingError
from agentlightning.runner.failures import FailureNote
from agentlightning.store.base import LightningStore
from agentlightning.trainer.progress import STATUS_ORDER
from agentlightning.types import AttemptedRollout, Rollout, RolloutStatus

__all__ = ["failure_of", "failure_of_all", "most_frequent", "rollouts_since"]

PAGE_ROLLOUTS: Final = 500
"""How many rollouts are read at a time."""
LONGEST_LINE: Final = 500
"""Characters of a failure's message before its traceback."""
_NOT_FAILED: Final = [status for status in STATUS_ORDER if status not in ("failed", "cancelled")]


async def rollouts_since(
    store: LightningStore, moment: float, status_in: Sequence[RolloutStatus] | None = None
) -> list[AttemptedRollout | Rollout]:
    """The rollouts that were sent at this moment of the store's clock or later, in the order of their creation."""
    newest_first: list[AttemptedRollout | Rollout] = []
    while True:
        page = await store.query_rollouts(
            status_in=status_in,
            sort_by="start_time",
            sort_order="desc",
            limit=PAGE_ROLLOUTS,
            offset=len(newest_first),
        )
        found = [rollout for rollout in page if rollout.start_time >= moment]
        newest_first += found
        if len(found) < PAGE_ROLLOUTS:
            return newest_first[::-1]


def failure_of(rollout: AttemptedRollout | Rollout) -> FailureNote:
    """Why a rollout failed, as far as its last attempt says."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    noted = None if attempt is None else FailureNote.read(attempt.metadata)
    return noted or FailureNote("the attempt", f"'{rollout.status if attempt is None else attempt.status}'", "")


def most_frequent(failures: Sequence[FailureNote]) -> tuple[FailureNote, int, int]:
    """The first failure of the most frequent kind, how many there are of it, and how many other kinds there are."""
    counts = Counter(failure.kind for failure in failures)
    kind, count = counts.most_common(1)[0]
    return next(failure for failure in failures if failure.kind == kind), count, len(counts) - 1


async def failure_of_all(store: LightningStore, moment: float) -> TrainingError | None:
    """What to raise if every rollout since this moment failed; None if one did not, or there is none."""
    newest = await store.query_rollouts(status_in=_NOT_FAILED, sort_by="start_time", sort_order="desc", limit=1)
    if newest and newest[0].start_time >= moment:
        return None
    failed = await rollouts_since(store, moment, ["failed"])
    if not failed:
        return None
    failure, count, others = most_frequent([failure_of(rollout) for rollout in failed])
    text = f"{len(failed)} of {len(failed)} rollouts failed"
    line = str(failure).partition("\n")[0][:LONGEST_LINE]
    text += f" with {line}" if not others else f", {count} of them with {line}, the rest with {others} other errors"
    has_frames = '  File "' in failure.traceback  # without any it would say the same again
    return TrainingError(f"{text}\n\n{failure.traceback}".strip() if has_frames else text)
