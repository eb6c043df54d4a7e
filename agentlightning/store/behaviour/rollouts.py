"""What the store does with rollouts and the queue."""

import logging
import math
from collections.abc import Sequence
from typing import Any, get_args

import orjson
from pydantic import ValidationError

from agentlightning.errors import InvalidQuery, InvalidValue, NotFound, RequestConflict
from agentlightning.store.behaviour.records import latest_resources_id, show_worker_busy
from agentlightning.store.copies import attempted, built, detached, replaced
from agentlightning.store.lifecycle import (
    FINAL_ROLLOUT_STATUSES,
    ROLLOUT_STATUSES,
    due_time,
    is_finished,
    is_queuing,
    is_running,
)
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.selection import ROLLOUT_FIELDS, Selection, run_id_of, searched_text
from agentlightning.store.transaction import Transaction
from agentlightning.store.values import as_json
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Task,
    TaskInput,
)
from agentlightning.utils.id import attempt_id as new_attempt_id
from agentlightning.utils.id import rollout_id as new_rollout_id

logger = logging.getLogger(__name__)


def known_rollout(tx: Transaction, rollout_id: str) -> Rollout:
    """The rollout of that id, which must exist."""
    rollout = tx.get(Rollout, rollout_id)
    if rollout is None:
        raise NotFound(f"Rollout {rollout_id} not found.")
    return rollout


def latest_attempt(tx: Transaction, rollout_id: str) -> Attempt | None:
    attempts = tx.get_attempts(rollout_id)
    return attempts[-1] if attempts else None


def with_latest_attempt(tx: Transaction, rollout: Rollout) -> AttemptedRollout | Rollout:
    attempt = latest_attempt(tx, rollout.rollout_id)
    return attempted(rollout, attempt) if attempt else rollout


def change_status(tx: Transaction, now: float, rollout: Rollout, status: RolloutStatus, **others: object) -> Rollout:
    """Move a rollout to a status, with other changes: its end time, its place in the queue, and the notice follow."""
    is_same = status == rollout.status
    if is_same and not others:
        return rollout
    if not is_same:
        others |= {"status": status, "end_time": now if status in FINAL_ROLLOUT_STATUSES else None}
    changed = replaced(rollout, **others)
    tx.put(changed)
    if is_same:
        return changed
    if is_queuing(changed):
        tx.push(rollout.rollout_id)
    tx.note("rollout", rollout.rollout_id, status=status, name=run_id_of(rollout))
    return changed


Working = tuple[Rollout, Attempt | None]
"""A rollout and its latest attempt."""


def reschedule(tx: Transaction, before: Working, after: Working) -> None:
    """Tell the watchdog when to look at a rollout, if that moment came closer or went away.

    A moment that moves back, as with every sign of life, is left alone: the watchdog finds out when it looks.
    """
    due = due_time(*after)
    if is_running(before[0]) if due is None else (earlier := due_time(*before)) is None or due < earlier:
        tx.schedule(after[0].rollout_id, due)


def begin_attempt(
    tx: Transaction,
    now: float,
    rollout: Rollout,
    worker_id: str | None,
    attempt_id: str | None = None,
    *,
    is_claimed: bool = False,
    lease_until: float | None = None,
) -> AttemptedRollout:
    """Give a rollout its next attempt; it becomes `preparing`. Who claims it shows what the worker does."""
    if attempt_id == "latest":
        raise InvalidValue("An attempt cannot be called 'latest', which names the newest one; give another id.")
    attempts = tx.get_attempts(rollout.rollout_id)
    before = rollout, attempts[-1] if attempts else None
    fields = {
        "rollout_id": rollout.rollout_id,
        "attempt_id": attempt_id or new_attempt_id(),
        "sequence_id": len(attempts) + 1,
        "start_time": now,
        "end_time": None,
        "status": "preparing",
        "worker_id": worker_id,
        "last_heartbeat_time": None,
        "metadata": None,
        "lease_until": lease_until,
    }
    attempt = built(Attempt, fields) if is_claimed else Attempt.model_validate(fields)
    rollout = change_status(tx, now, rollout, "preparing", reward=None)  # which was that of the attempt before
    tx.put(attempt)
    reschedule(tx, before, (rollout, attempt))
    if worker_id is not None and not is_claimed:
        show_worker_busy(tx, now, worker_id, attempt)
    return attempted(rollout, attempt)


def _new_rollout(
    tx: Transaction,
    now: float,
    status: RolloutStatus,
    rollout_id: str,
    input: TaskInput,
    mode: RolloutMode | None,
    resources_id: str | None,
    config: RolloutConfig | None,
    metadata: dict[str, object] | None,
) -> Rollout:
    if type(input) is Task:
        fields = input.as_rollout_fields(mode, resources_id, metadata)
        return _new_rollout(tx, now, status, rollout_id, config=config, **fields)
    if mode not in (*get_args(RolloutMode), None):
        raise InvalidValue(f"mode is {mode!r}; use 'train', 'val', 'test' or None.")
    rollout = Rollout(
        rollout_id=rollout_id,
        input=detached(input),
        start_time=now,
        mode=mode,
        resources_id=resources_id or latest_resources_id(tx),
        status=status,
        config=config.model_copy(deep=True) if config is not None else RolloutConfig(),
        metadata=dict(metadata) if metadata is not None else {},
    )
    tx.put(rollout)
    tx.note("rollout", rollout_id, status=status, name=run_id_of(rollout))
    return rollout


def _check_repeat(existing: Rollout, input: TaskInput) -> None:
    """Refuse an id that has another input; the rest may differ, since a program that resumes may be set up anew."""
    given = input.input if type(input) is Task else input
    try:
        is_other = orjson.loads(as_json(given, "input")) != orjson.loads(as_json(existing.input, "input"))
    except InvalidValue:  # an object that only memory keeps cannot be compared
        return
    if is_other:
        raise RequestConflict(
            f"There is a rollout '{existing.rollout_id}' with another input already; give each its own id."
        )


def start_rollout(
    tx: Transaction,
    now: float,
    input: TaskInput,
    mode: RolloutMode | None = None,
    resources_id: str | None = None,
    config: RolloutConfig | None = None,
    metadata: dict[str, object] | None = None,
    worker_id: str | None = None,
    *,
    rollout_id: str | None = None,
    attempt_id: str | None = None,
) -> AttemptedRollout:
    existing = None if rollout_id is None else tx.get(Rollout, rollout_id)
    if existing is not None:
        attempt = next((each for each in tx.get_attempts(existing.rollout_id) if each.attempt_id == attempt_id), None)
        if attempt is None:
            raise RequestConflict(f"There is a rollout '{rollout_id}' already; use start_attempt to run it once more.")
        _check_repeat(existing, input)
        return attempted(existing, attempt)
    new = _new_rollout(
        tx, now, "preparing", rollout_id or new_rollout_id(), input, mode, resources_id, config, metadata
    )
    return begin_attempt(tx, now, new, worker_id, attempt_id)


def enqueue_rollout(
    tx: Transaction,
    now: float,
    input: TaskInput,
    mode: RolloutMode | None = None,
    resources_id: str | None = None,
    config: RolloutConfig | None = None,
    metadata: dict[str, object] | None = None,
    *,
    rollout_id: str | None = None,
) -> Rollout:
    if rollout_id is None:
        rollout_id = new_rollout_id()
    else:
        existing = tx.get(Rollout, rollout_id)
        if existing is not None:
            _check_repeat(existing, input)
            return existing
    rollout = _new_rollout(tx, now, "queuing", rollout_id, input, mode, resources_id, config, metadata)
    tx.push(rollout_id)
    logger.debug("Rollout %s is enqueued (%s).", rollout_id, mode or "no mode")
    return rollout


def enqueue_many_rollouts(tx: Transaction, now: float, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
    enqueued = []
    for r in rollouts:
        enqueued.append(
            enqueue_rollout(tx, now, r.input, r.mode, r.resources_id, r.config, r.metadata, rollout_id=r.rollout_id)
        )
        now = math.nextafter(now, math.inf)  # each begins after the one before, so that sorting by time has no ties
    return enqueued


def get_rollout_by_id(tx: Transaction, now: float, rollout_id: str) -> AttemptedRollout | Rollout | None:
    rollout = tx.get(Rollout, rollout_id)
    return None if rollout is None else with_latest_attempt(tx, rollout)


def query_rollouts(
    tx: Transaction,
    now: float,
    status: Sequence[RolloutStatus] | None = None,
    rollout_ids: Sequence[str] | None = None,
    **asked: Any,
) -> PaginatedResult[AttemptedRollout | Rollout]:
    for name, old_name, old_value in (("status_in", "status", status), ("rollout_id_in", "rollout_ids", rollout_ids)):
        value = asked.get(name)
        if value is not None and old_value is not None and list(value) != list(old_value):
            raise InvalidQuery(f"'{name}' and its older name '{old_name}' are both given and differ; give one of them.")
        asked[name] = old_value if value is None else value
    # None is not among the modes: memory and SQL would compare a missing mode differently.
    for name, known in (("mode_in", get_args(RolloutMode)), ("status_in", ROLLOUT_STATUSES)):
        given = asked.get(name)
        for value in given if given is not None and not isinstance(given, str) else ():
            if value not in known:
                raise InvalidQuery(f"{name} holds {value!r}; give a list out of {list(known)}.")
    if asked.get("sort_by") == "input":
        raise InvalidQuery("Rollouts are not sorted by 'input'; it can only be searched, with input_contains.")
    if isinstance(asked.get("input_contains"), str):
        asked["input_contains"] = searched_text(asked["input_contains"])
    selection = Selection.of(asked, ROLLOUT_FIELDS)
    page = tx.select(Rollout, selection)
    return selection.page([with_latest_attempt(tx, rollout) for rollout in page.items], page.total)


Settled = dict[str, AttemptedRollout | Rollout | None]


def finished_rollouts(tx: Transaction, now: float, rollout_ids: Sequence[str]) -> Settled:
    """For each id that needs no more waiting: its finished rollout, or None where the id names nothing."""
    settled: Settled = {}
    for rollout_id in rollout_ids:
        rollout = tx.get(Rollout, rollout_id)
        if rollout is None:
            settled[rollout_id] = None
        elif is_finished(rollout):
            settled[rollout_id] = with_latest_attempt(tx, rollout)
    return settled


def update_rollout(
    tx: Transaction,
    now: float,
    rollout_id: str,
    input: TaskInput | Unset = UNSET,
    mode: RolloutMode | None | Unset = UNSET,
    resources_id: str | None | Unset = UNSET,
    status: RolloutStatus | Unset = UNSET,
    config: RolloutConfig | Unset = UNSET,
    metadata: dict[str, object] | None | Unset = UNSET,
    output: object = UNSET,
) -> AttemptedRollout | Rollout:
    rollout = known_rollout(tx, rollout_id)
    attempt = latest_attempt(tx, rollout_id)
    before = rollout, attempt
    given = {
        "input": detached(input),
        "mode": mode,
        "resources_id": resources_id,
        "config": config.model_copy(deep=True) if isinstance(config, RolloutConfig) else config,
        "metadata": detached(metadata),
        "output": detached(output),
    }
    changes = {name: value for name, value in given.items() if not isinstance(value, Unset)}
    if not isinstance(status, Unset) and status not in ROLLOUT_STATUSES:
        raise InvalidValue(f"'{status}' is not a rollout status; use one of {list(ROLLOUT_STATUSES)}.")
    if changes:
        rollout = _revalidated(rollout, changes)
        tx.put(rollout)
    if not isinstance(status, Unset):
        rollout = change_status(tx, now, rollout, status)
    reschedule(tx, before, (rollout, attempt))
    return with_latest_attempt(tx, rollout)


def _revalidated(rollout: Rollout, changes: dict[str, object]) -> Rollout:
    try:
        return Rollout.model_validate({**rollout.__dict__, **changes})
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InvalidValue(f"Rollout '{rollout.rollout_id}' cannot be changed so: {reason}.") from error
