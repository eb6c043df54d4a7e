"""Random operations against every back end and a simple model of what they should do, time included."""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from agentlightning.store import LightningStore, SqliteLightningStore
from agentlightning.types import RolloutConfig, Span
from tests.contract.conftest import BACKENDS, REMOTE
from tests.contract.remote import remote

ResultT = TypeVar("ResultT")

STATUSES = ["queuing", "requeuing", "preparing", "running", "failed", "succeeded", "cancelled"]
OUTCOMES = ["preparing", "running", "failed", "succeeded", "timeout", "unresponsive"]


@dataclass
class Try:
    """What the model knows of an attempt."""

    attempt_id: str
    start: float
    status: str = "preparing"
    heartbeat: float | None = None
    spans: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Job:
    """What the model knows of a rollout."""

    config: RolloutConfig
    status: str
    tries: list[Try] = field(default_factory=list)
    last_number: int = 0


class Model:
    """The specification in its plainest form: lists, and a look at every rollout before every operation."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.queue: list[str] = []

    def set_status(self, rollout_id: str, status: str) -> None:
        self.jobs[rollout_id].status = status
        if status in ("queuing", "requeuing"):
            if rollout_id not in self.queue:
                self.queue.append(rollout_id)
        elif rollout_id in self.queue:
            self.queue.remove(rollout_id)

    def set_outcome(self, rollout_id: str, attempt: Try, status: str) -> None:
        attempt.status = status
        job = self.jobs[rollout_id]
        if attempt is not job.tries[-1] or job.status == "cancelled":
            return
        if status in ("failed", "timeout", "unresponsive"):
            retry = status in job.config.retry_condition and len(job.tries) < job.config.max_attempts
            status = "requeuing" if retry else "failed"
        self.set_status(rollout_id, status)

    def watchdog(self, now: float) -> None:
        due: list[tuple[float, str]] = []
        for rollout_id, job in self.jobs.items():
            if job.status in ("preparing", "running") and job.tries and self.verdict(job, now):
                due.append((self.moment(job), rollout_id))
        for _, rollout_id in sorted(due, key=lambda pair: pair[0]):
            job = self.jobs[rollout_id]
            self.set_outcome(rollout_id, job.tries[-1], self.verdict(job, now))

    def moment(self, job: Job) -> float:
        latest, config = job.tries[-1], job.config
        if latest.status in ("failed", "succeeded") or (latest.status == "preparing" and latest.heartbeat):
            return 0.0
        moments = [latest.start + config.timeout_seconds] if config.timeout_seconds else []
        if config.unresponsive_seconds:
            moments.append((latest.heartbeat or latest.start) + config.unresponsive_seconds)
        return min(moments)

    def verdict(self, job: Job, now: float) -> str:
        latest, config = job.tries[-1], job.config
        if latest.status in ("failed", "succeeded"):
            return latest.status
        if config.timeout_seconds is not None and now - latest.start > config.timeout_seconds:
            return "timeout"
        silence = now - (latest.heartbeat or latest.start)
        if config.unresponsive_seconds is not None and silence > config.unresponsive_seconds:
            return "unresponsive"
        return "running" if latest.status == "preparing" and latest.heartbeat else ""

    def begin(self, rollout_id: str, attempt_id: str, now: float) -> None:
        self.set_status(rollout_id, "preparing")
        self.jobs[rollout_id].tries.append(Try(attempt_id, now))

    def add_span(self, rollout_id: str, attempt: Try, number: int, span_id: str, now: float) -> None:
        job = self.jobs[rollout_id]
        attempt.heartbeat = now
        attempt.spans.append((number, span_id))
        job.last_number = max(job.last_number, number)
        is_over = job.status in ("failed", "succeeded", "cancelled")
        if attempt.status == "preparing" or (attempt.status == "unresponsive" and not is_over):
            attempt.status = "running"
        if attempt is job.tries[-1] and attempt.status == "running" and not is_over:
            self.set_status(rollout_id, "running")


class StoreMachine(RuleBasedStateMachine):
    """Drives a store and the model side by side."""

    build: Callable[[Path, Callable[[], float]], LightningStore]
    rollouts = Bundle("rollouts")
    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="agl-model-")
        self.now = 1_700_000_000.0
        self.model = Model()
        self.loop = asyncio.new_event_loop()
        self.span_count = 0

    @initialize()
    def open_store(self) -> None:
        self.store = type(self).build(Path(self.folder.name) / "s.db", lambda: self.now)

    def teardown(self) -> None:
        self.do(self.store.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()

    def do(self, operation: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self.loop.run_until_complete(operation)

    # ------------------------------------------------------------------ operations

    @rule(
        target=rollouts,
        max_attempts=st.integers(1, 3),
        timeout=st.none() | st.integers(1, 20),
        silence=st.none() | st.integers(1, 20),
        retry=st.lists(st.sampled_from(["failed", "timeout", "unresponsive"]), unique=True),
    )
    def enqueue(self, max_attempts: int, timeout: Any, silence: Any, retry: Any) -> str:
        config = RolloutConfig(
            max_attempts=max_attempts, timeout_seconds=timeout, unresponsive_seconds=silence, retry_condition=retry
        )
        rollout = self.do(self.store.enqueue_rollout({"n": len(self.model.jobs)}, config=config))
        self.model.watchdog(self.now)
        self.model.jobs[rollout.rollout_id] = Job(config, "queuing")
        self.model.queue.append(rollout.rollout_id)
        return rollout.rollout_id

    @rule(target=attempts)
    def dequeue(self) -> Any:
        claimed = self.do(self.store.dequeue_rollout("w"))
        self.model.watchdog(self.now)
        if not self.model.queue:
            assert claimed is None
            return multiple()
        assert claimed is not None
        assert claimed.rollout_id == self.model.queue[0]
        self.model.begin(claimed.rollout_id, claimed.attempt.attempt_id, self.now)
        return claimed.rollout_id, claimed.attempt.sequence_id

    @rule(target=attempts, rollout_id=rollouts)
    def start_attempt(self, rollout_id: str) -> tuple[str, int]:
        started = self.do(self.store.start_attempt(rollout_id))
        self.model.watchdog(self.now)
        self.model.begin(rollout_id, started.attempt.attempt_id, self.now)
        return rollout_id, started.attempt.sequence_id

    @rule(attempt=attempts, status=st.sampled_from(OUTCOMES))
    def end_attempt(self, attempt: tuple[str, int], status: Any) -> None:
        rollout_id, number = attempt
        known = self.model.jobs[rollout_id].tries[number - 1]
        self.do(self.store.update_attempt(rollout_id, known.attempt_id, status=status))
        self.model.watchdog(self.now)
        self.model.set_outcome(rollout_id, known, status)

    @rule(attempt=attempts, ago=st.integers(0, 15))
    def beat(self, attempt: tuple[str, int], ago: int) -> None:
        rollout_id, number = attempt
        known = self.model.jobs[rollout_id].tries[number - 1]
        self.do(self.store.update_attempt(rollout_id, known.attempt_id, last_heartbeat_time=self.now - ago))
        self.model.watchdog(self.now)
        known.heartbeat = self.now - ago

    @rule(rollout_id=rollouts, status=st.sampled_from(STATUSES))
    def set_rollout_status(self, rollout_id: str, status: Any) -> None:
        self.do(self.store.update_rollout(rollout_id, status=status))
        self.model.watchdog(self.now)
        self.model.set_status(rollout_id, status)

    @rule(attempt=attempts, number=st.integers(0, 30), many=st.integers(1, 3), in_batch=st.booleans())
    def add_spans(self, attempt: tuple[str, int], number: int, many: int, in_batch: bool) -> None:
        rollout_id, index = attempt
        known = self.model.jobs[rollout_id].tries[index - 1]
        spans = [self.span(rollout_id, known.attempt_id, number + n) for n in range(many)]
        if in_batch:
            self.do(self.store.add_many_spans([*spans, spans[0]]))
        else:
            for span in spans:
                self.do(self.store.add_span(span))
        for span in spans:
            self.model.add_span(rollout_id, known, span.sequence_id, span.span_id, self.now)

    def span(self, rollout_id: str, attempt_id: str, number: int) -> Span:
        self.span_count += 1
        ids: Any = {"rollout_id": rollout_id, "attempt_id": attempt_id, "span_id": f"{self.span_count:016x}"}
        return Span.from_attributes(name="s", attributes={"n": number}, sequence_id=number, **ids)

    @rule(rollout_id=rollouts)
    def take_number(self, rollout_id: str) -> None:
        job = self.model.jobs[rollout_id]
        assert self.do(self.store.get_next_span_sequence_id(rollout_id, "x")) == job.last_number + 1
        job.last_number += 1

    @rule(seconds=st.sampled_from([0.5, 1, 5, 12, 30]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reopen(self) -> None:
        if isinstance(self.store, SqliteLightningStore) and self.store.path != ":memory:":
            self.do(self.store.close())
            self.open_store()

    # ------------------------------------------------------------------ what must hold

    @rule()
    def spans_are_the_same(self) -> None:
        self.model.watchdog(self.now)
        for rollout_id, job in self.model.jobs.items():
            stored = self.do(self.store.query_spans(rollout_id))
            expected = sorted(number_and_id for attempt in job.tries for number_and_id in attempt.spans)
            assert sorted((span.sequence_id, span.span_id) for span in stored) == expected
            assert [span.sequence_id for span in stored] == [number for number, _ in expected]

    @invariant()
    def states_are_the_same(self) -> None:
        if not hasattr(self, "store"):
            return
        stored = self.do(self.store.query_rollouts())
        self.model.watchdog(self.now)
        assert [(r.rollout_id, r.status) for r in stored] == [(i, job.status) for i, job in self.model.jobs.items()]
        for rollout in stored:
            is_over = rollout.status in ("failed", "succeeded", "cancelled")
            assert (rollout.end_time is not None) == is_over
            attempts = self.do(self.store.query_attempts(rollout.rollout_id))
            tries = self.model.jobs[rollout.rollout_id].tries
            assert [(a.attempt_id, a.status, a.last_heartbeat_time) for a in attempts] == [
                (t.attempt_id, t.status, t.heartbeat) for t in tries
            ]


EXAMPLES = {"memory": 12, "sqlite": 12, "postgres": 4, "client-memory": 4}
"""The latter two are slow, and share with the former what is above the seam, or behind the server."""


def build(backend: str, path: Path, clock: Callable[[], float]) -> LightningStore:
    behind, _ = REMOTE.get(backend, (backend, None))
    store = BACKENDS[behind](path, clock=clock)
    return store if behind == backend else remote(store)


@pytest.mark.parametrize("backend", EXAMPLES)
def test_store_behaves_as_the_model_whatever_is_done(backend: str) -> None:
    machine = type("Machine", (StoreMachine,), {"build": staticmethod(partial(build, backend))})
    case: Any = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(
        max_examples=EXAMPLES[backend],
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )

    case("runTest").runTest()
