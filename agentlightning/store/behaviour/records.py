"""What the store knows of workers, resources and runs.

A worker's row shows its signs of life, and whether it has work. A rollout that names no resources gets the version
that was published last. A run has a configuration, metrics by step, and an end.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import get_args

from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import InvalidValue, NotFound, RequestConflict
from agentlightning.store.copies import detached, replaced
from agentlightning.store.lifecycle import RUN_REPORTS, run_as_seen, worker_as_seen
from agentlightning.store.selection import Condition, Selection, choose, page_of
from agentlightning.store.transaction import Setting, Transaction
from agentlightning.store.values import check_json
from agentlightning.types import (
    Attempt,
    MetricPoint,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Run,
    RunStatus,
    Worker,
    WorkerStatus,
)
from agentlightning.utils.id import resources_id as new_resources_id
from agentlightning.utils.id import run_id as new_run_id
from agentlightning.utils.secret_names import masked

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------- workers

WORKER_FIELDS = frozenset(Worker.model_fields) - {"heartbeat_stats", "claims"}
"""Fields a query may filter and sort by."""


def put_worker(tx: Transaction, before: Worker | None, worker: Worker) -> None:
    """Write a worker, and tell of a change of its status."""
    tx.put(worker)
    if before is None or before.status != worker.status:
        tx.note("worker", status=worker.status, name=worker.worker_id)


def show_worker_busy(tx: Transaction, now: float, worker_id: str, attempt: Attempt, **changes: object) -> None:
    """The worker has taken up an attempt."""
    ids = {"current_rollout_id": attempt.rollout_id, "current_attempt_id": attempt.attempt_id}
    show_worker(tx, worker_id, status="busy", last_busy_time=now, **ids, **changes)


def show_worker_idle(
    tx: Transaction, now: float, worker_id: str, *, status: WorkerStatus = "idle", **changes: object
) -> None:
    """The worker has nothing to do, because it finished or because it asked for work in vain."""
    ids = {"current_rollout_id": None, "current_attempt_id": None}
    show_worker(tx, worker_id, status=status, last_idle_time=now, **ids, **changes)


def show_worker(tx: Transaction, worker_id: str, **changes: object) -> None:
    """Write what has changed about a worker, new or not."""
    before = tx.get(Worker, worker_id)
    put_worker(tx, before, replaced(before or Worker(worker_id=worker_id), **changes))


def release_worker(tx: Transaction, now: float, attempt: Attempt) -> None:
    """The attempt is over: its worker is idle, unless it has taken up another one meanwhile.

    Of a worker whose attempt the store gave up, nobody knows what it does.
    """
    if attempt.worker_id is None:
        return
    worker = tx.get(Worker, attempt.worker_id)
    if worker is None or worker.current_attempt_id in (None, attempt.attempt_id):
        is_known = attempt.status not in ("timeout", "unresponsive")
        show_worker_idle(tx, now, attempt.worker_id, status="idle" if is_known else "unknown")


def get_worker_by_id(tx: Transaction, now: float, worker_id: str) -> Worker | None:
    worker = tx.get(Worker, worker_id)
    return None if worker is None else worker_as_seen(worker, now, tx.limits.lease_seconds)


def query_workers(tx: Transaction, now: float, **asked: object) -> PaginatedResult[Worker]:
    workers = [worker_as_seen(each, now, tx.limits.lease_seconds) for each in tx.select(Worker, Selection()).items]
    return choose(workers, Selection.of(asked, WORKER_FIELDS))


# ---------------------------------------------------------------------- resources

LATEST_RESOURCES = "latest_resources_id"
"""The setting that names the resources published last."""
RESOURCES_FIELDS = frozenset(ResourcesUpdate.model_fields) - {"resources"}
"""Fields a query may filter and sort by."""

_RESOURCES: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)


def latest_resources_id(tx: Transaction) -> str | None:
    latest = tx.get(Setting, LATEST_RESOURCES)
    return None if latest is None else latest.value


def add_resources(
    tx: Transaction, now: float, resources: NamedResources, *, resources_id: str | None = None
) -> ResourcesUpdate:
    existing = None if resources_id is None else tx.get(ResourcesUpdate, resources_id)
    return existing or _publish(tx, now, resources_id or new_resources_id(), resources, None)


def update_resources(
    tx: Transaction,
    now: float,
    resources_id: str,
    resources: NamedResources,
    *,
    merge: bool = False,
    version: int | None = None,
) -> ResourcesUpdate:
    previous = tx.get(ResourcesUpdate, resources_id)
    if merge and previous is not None:
        resources = {**previous.resources, **resources}
    latest = previous.version if previous is not None else 0
    if version is not None and version != latest + 1:
        if previous is not None and version == latest and previous.resources == _own_copy(resources):
            return previous
        raise RequestConflict(
            f"Resources '{resources_id}' are at version {latest}, so version {version} cannot be published; "
            "read what they are now, and give the number that follows."
        )
    return _publish(tx, now, resources_id, resources, previous)


def _publish(
    tx: Transaction, now: float, resources_id: str, resources: NamedResources, previous: ResourcesUpdate | None
) -> ResourcesUpdate:
    update = ResourcesUpdate(
        resources_id=resources_id,
        resources=_own_copy(resources),
        create_time=previous.create_time if previous else now,
        update_time=now,
        version=previous.version + 1 if previous else 1,
    )
    tx.put(update)
    tx.put(Setting(LATEST_RESOURCES, resources_id))
    tx.note("resources", name=resources_id, number=update.version)
    logger.debug("Resources %s, version %d, are published: %s.", resources_id, update.version, list(update.resources))
    return update


def _own_copy(resources: NamedResources) -> NamedResources:
    try:
        checked = _RESOURCES.validate_python(resources)
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InvalidValue(
            f"These are not resources (names mapped to LLM, ProxyLLM or PromptTemplate): {reason}."
        ) from error
    return {name: resource.model_copy(deep=True) for name, resource in checked.items()}


def get_resources_by_id(tx: Transaction, now: float, resources_id: str) -> ResourcesUpdate | None:
    return tx.get(ResourcesUpdate, resources_id)


def get_latest_resources(tx: Transaction, now: float) -> ResourcesUpdate | None:
    latest = latest_resources_id(tx)
    return None if latest is None else tx.get(ResourcesUpdate, latest)


def query_resources(tx: Transaction, now: float, **asked: object) -> PaginatedResult[ResourcesUpdate]:
    return tx.select(ResourcesUpdate, Selection.of(asked, RESOURCES_FIELDS))


# ---------------------------------------------------------------------- runs

RUN_FIELDS = frozenset(Run.model_fields) - {"config", "metadata", "summary"}
"""Fields a query may filter and sort by."""


def start_run(
    tx: Transaction,
    now: float,
    name: str = "run",
    *,
    config: dict[str, object] | None = None,
    metadata: dict[str, object] | None = None,
    run_id: str | None = None,
) -> Run:
    if run_id is not None:
        existing = tx.get(Run, run_id)
        if existing is not None:
            return _reported(tx, now, existing)
    run = Run(
        run_id=run_id or new_run_id(),
        name=name,
        start_time=now,
        config=masked(detached(config or {})),
        metadata=masked(detached(metadata or {})),
    )
    return _put(tx, run)


def _reported(tx: Transaction, now: float, run: Run) -> Run:
    """A run that is started again as it is; if it promised to report, this is a report."""
    reports = run.metadata.get(RUN_REPORTS)
    if run.status == "running" and isinstance(reports, dict):
        run = replaced(run, metadata={**run.metadata, RUN_REPORTS: {**reports, "last_time": now}})
        tx.put(run)
    return run


def _put(tx: Transaction, run: Run) -> Run:
    tx.put(run)
    tx.note("run", status=run.status, name=run.run_id)
    return run


def _known_run(tx: Transaction, run_id: str) -> Run:
    run = tx.get(Run, run_id)
    if run is None:
        raise NotFound(f"Run {run_id} not found.")
    return run


def finish_run(
    tx: Transaction,
    now: float,
    run_id: str,
    status: RunStatus = "succeeded",
    *,
    summary: dict[str, object] | None = None,
) -> Run:
    run = _known_run(tx, run_id)
    if status not in get_args(RunStatus):
        raise InvalidValue(f"'{status}' is not a run status; use one of {list(get_args(RunStatus))}.")
    kept = run.summary if summary is None else masked(detached(summary))
    if (status, kept) == (run.status, run.summary):
        return run
    return _put(tx, replaced(run, status=status, end_time=None if status == "running" else now, summary=kept))


def get_run_by_id(tx: Transaction, now: float, run_id: str) -> Run | None:
    run = tx.get(Run, run_id)
    return None if run is None else run_as_seen(run, now)


def query_runs(
    tx: Transaction, now: float, *, status_in: Sequence[RunStatus] | None = None, **asked: object
) -> PaginatedResult[Run]:
    wanted = Selection.of({"status_in": status_in, **asked}, RUN_FIELDS)
    # A lost run is kept as running, so both are read whenever one of them is wanted, and told apart afterwards.
    is_ambiguous = status_in is not None and not {"running", "lost"}.isdisjoint(status_in)
    if not is_ambiguous and wanted.sort_by not in ("status", "end_time"):
        page = tx.select(Run, wanted)
        return wanted.page([run_as_seen(run, now) for run in page.items], page.total)
    others = tuple([condition for condition in wanted.conditions if condition.field != "status"])
    return choose([run_as_seen(run, now) for run in tx.select(Run, Selection(others)).items], wanted)


def add_metrics(
    tx: Transaction, now: float, run_id: str, step: int, values: Mapping[str, float], *, time: float | None = None
) -> MetricPoint:
    _known_run(tx, run_id)
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidValue(f"Metric '{name}' is of type {type(value).__name__}; give a number.")
        check_json(float(value), f"Metric '{name}' at step {step}")
    if time is not None:
        check_json(float(time), f"The time of metrics at step {step}")
    point = MetricPoint(run_id=run_id, step=step, time=now if time is None else time, values=dict(values))
    at_step = Selection((Condition("step", "exact", step),))
    if time is None or point not in tx.select(MetricPoint, at_step, of=run_id).items:
        tx.put(point)
        tx.note("metrics", name=run_id, number=step)
    return point


def metrics_of(tx: Transaction, run_id: str) -> Sequence[MetricPoint]:
    """All points of a run, by step and then by insertion."""
    return tx.select(MetricPoint, Selection(sort_by="step"), of=run_id).items


def query_metrics(
    tx: Transaction,
    now: float,
    run_id: str,
    *,
    names: Sequence[str] | None = None,
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[MetricPoint]:
    points = metrics_of(tx, run_id)
    if names is not None:
        wanted = frozenset(names)
        kept = (replaced(p, values={n: v for n, v in p.values.items() if n in wanted}) for p in points)
        points = [point for point in kept if point.values]
    return page_of(points, Selection.of({"limit": limit, "offset": offset}, ()))
