"""What the store does with runs and their metrics."""

from collections.abc import Mapping, Sequence
from typing import get_args

from agentlightning.errors import InvalidValue, NotFound
from agentlightning.store.copies import detached, replaced
from agentlightning.store.lifecycle import RUN_REPORTS, run_as_seen
from agentlightning.store.selection import Condition, Selection, choose, page_of
from agentlightning.store.transaction import Transaction
from agentlightning.store.values import check_json
from agentlightning.types import MetricPoint, PaginatedResult, Run, RunStatus
from agentlightning.utils.id import run_id as new_run_id
from agentlightning.utils.secret_names import masked

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
