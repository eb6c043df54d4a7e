"""Copies on the way out: what a store returns is the caller's own.

Back ends keep records by reference, so nothing they hand out may be the kept object. Spans are the exception of the
contract: they are copied once on the way in, and read as they are.
"""

from collections.abc import Callable
from typing import Any

from agentlightning.store.claims import Claim
from agentlightning.store.values import detached_value, own_resources, replaced
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    MetricPoint,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Run,
    Worker,
)

__all__ = ["detached"]


def _attempt(attempt: Attempt) -> Attempt:
    if attempt.metadata is None:
        return replaced(attempt)
    return replaced(attempt, metadata=detached_value(attempt.metadata))


def _config(config: RolloutConfig) -> RolloutConfig:
    return replaced(config, retry_condition=list(config.retry_condition))


def _rollout(rollout: Rollout) -> Rollout:
    return replaced(
        rollout,
        input=detached_value(rollout.input),
        config=_config(rollout.config),
        metadata=detached_value(rollout.metadata),
        output=detached_value(rollout.output),
    )


def _attempted(rollout: AttemptedRollout) -> AttemptedRollout:
    return replaced(
        rollout,
        input=detached_value(rollout.input),
        config=_config(rollout.config),
        metadata=detached_value(rollout.metadata),
        output=detached_value(rollout.output),
        attempt=_attempt(rollout.attempt),
    )


def _resources(update: ResourcesUpdate) -> ResourcesUpdate:
    return replaced(update, resources=own_resources(update.resources))


def _claim(claim: Claim) -> Claim:
    resources = None if claim.resources is None else _resources(claim.resources)
    return Claim(_attempted(claim.rollout), claim.version, resources)


def _worker(worker: Worker) -> Worker:
    return replaced(worker, heartbeat_stats=detached_value(worker.heartbeat_stats))


def _run(run: Run) -> Run:
    return replaced(
        run,
        config=detached_value(run.config),
        metadata=detached_value(run.metadata),
        summary=detached_value(run.summary),
    )


def _metrics(point: MetricPoint) -> MetricPoint:
    return replaced(point, values=dict(point.values))


def _page(page: PaginatedResult[Any]) -> PaginatedResult[Any]:
    return PaginatedResult.model_construct(
        items=[detached(item) for item in page.items], limit=page.limit, offset=page.offset, total=page.total
    )


def _list(items: list[Any]) -> list[Any]:
    return [detached(item) for item in items]


def _mapping(items: dict[Any, Any]) -> dict[Any, Any]:
    return {key: detached(item) for key, item in items.items()}


_COPIES: dict[type, Callable[[Any], Any]] = {
    Attempt: _attempt,
    Rollout: _rollout,
    AttemptedRollout: _attempted,
    ResourcesUpdate: _resources,
    Claim: _claim,
    Worker: _worker,
    Run: _run,
    MetricPoint: _metrics,
    PaginatedResult: _page,
    list: _list,
    dict: _mapping,
}


def detached(result: Any) -> Any:
    """A result that shares nothing mutable with the store; types without a rule are values already."""
    copy = _COPIES.get(type(result))
    return result if copy is None else copy(result)
