"""The store's contract: every operation once, with its meaning and its route.

An algorithm and its runners meet only here. Each method is atomic towards every concurrent caller (tasks, threads,
event loops, and processes where the back end allows them), and its effect is visible to whoever asks after it
returned. Ids that name nothing raise `NotFound` unless a method says otherwise. Values handed in are copied, values
handed out are copies.

How an operation behaves is written in `store/behaviour`; how it travels is derived from these declarations by
`store/operations.py`. A declaration has no body.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.errors import InvalidQuery
from agentlightning.store.claims import Claim, ResourcesVersion
from agentlightning.store.composed import ComposedOperations
from agentlightning.store.lifecycle import is_finished, is_queuing, is_running
from agentlightning.store.operations import UNSET, Unset, operation, operations_of
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    FilterLogic,
    MetricPoint,
    NamedResources,
    Notice,
    NoticeKind,
    PaginatedResult,
    RenewedWorker,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Run,
    RunStatus,
    SortOrder,
    Span,
    TaskInput,
    Worker,
    WorkerStatus,
)
from agentlightning.types.lifecycle import ComponentProperty
from agentlightning.types.records import LightningStoreCapabilities, LightningStoreStatistics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["UNSET", "LightningStore", "LightningStoreCapabilities", "LightningStoreStatistics", "Unset"]
__all__ += ["is_finished", "is_queuing", "is_running"]


class LightningStore(ComposedOperations):
    """The one place where state lives. A back end answers every operation; this class only declares them.

    What a subclass does not define is made of what it does (`store/composed.py`)."""

    @ComponentProperty
    def state(self) -> str:
        """`open`; `closed` after `close`; or `failed: ` and why, of a store that has found its data damaged."""
        damage = getattr(self, "_damage", None)
        if damage is not None:
            return f"failed: {damage}"
        return "closed" if getattr(self, "_is_closed", False) else "open"

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """What callers may rely on; everything is False unless a back end says otherwise."""
        return {"thread_safe": False, "async_safe": False, "zero_copy": False, "otlp_traces": False}

    def otlp_traces_endpoint(self) -> str:
        """URL that takes OTLP/HTTP traces, for stores whose `otlp_traces` capability is true."""
        raise NotImplementedError

    @operation("GET", "/statistics", who="runner")
    async def statistics(self) -> LightningStoreStatistics:
        """Counts and sizes of what the store holds."""

    async def perform(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run the operation of that name."""
        if name not in operations_of(LightningStore):
            raise InvalidQuery(f"There is no store operation '{name}'.")
        run: Callable[..., Awaitable[object]] = getattr(self, name)
        return await run(**arguments)

    async def close(self) -> None:
        """Release what the store holds; acknowledged work is kept where the back end is durable."""

    # ------------------------------------------------------------------ rollouts

    @operation("POST", "/rollouts", who="runner", ids="rollout_id attempt_id", status=201)
    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AttemptedRollout:
        """Create a rollout with its first attempt, both `preparing`; it never enters the queue.

        Without `resources_id` it is bound to the latest resources; an id that does not exist is kept as it is. A second
        call with the same two ids changes nothing and returns both as they are; with another input it is a
        `RequestConflict`."""

    @operation("POST", "/queues/rollouts/enqueue-one", who="admin", ids="rollout_id", status=201)
    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        rollout_id: str | None = None,
    ) -> Rollout:
        """Create a rollout at the tail of the queue, unless there is one of this `rollout_id`; returns it as it is.

        A `rollout_id` whose rollout has another input is a `RequestConflict`."""

    @operation("POST", "/queues/rollouts/enqueue", who="admin", many="rollouts", status=201)
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Enqueue all or none, in the given order; one whose `rollout_id` there is already is returned as it is."""

    @operation("POST", "/queues/rollouts/dequeue-one", who="runner", ids="claim_id")
    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        *,
        wait: float | None = None,
        claim_id: str | None = None,
        heartbeat_interval: float | None = None,
    ) -> AttemptedRollout | None:
        """Claim the head of the queue: the rollout becomes `preparing` with a new attempt; None if the queue is empty.

        Each entry is handed out once. `wait` blocks for up to that many seconds until there is work. A worker that says
        how many seconds lie between its heartbeats gets a lease: it loses the rollout if it does not name the attempt
        in its heartbeats (`update_worker`).

        A `claim_id` is `SLOT:COUNTER`: a worker makes one claim after the other in a slot, with a higher counter each
        time. The last claim of a slot, repeated, gives what of it is still open, and nothing if it gave nothing; an
        earlier one gives nothing. Without a `worker_id` no repeat is known."""

    @operation("POST", "/queues/rollouts/dequeue", who="runner", ids="claim_id")
    async def dequeue_many_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        wait: float | None = None,
        claim_id: str | None = None,
        heartbeat_interval: float | None = None,
    ) -> Sequence[AttemptedRollout]:
        """Claim up to `limit` rollouts from the head of the queue; with `wait`, block until there is at least one."""

    @operation("POST", "/queues/rollouts/claim", who="runner", ids="claim_id", hot=True)
    async def claim_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        wait: float | None = None,
        claim_id: str | None = None,
        heartbeat_interval: float | None = None,
        known_resources: Sequence[ResourcesVersion] = (),
    ) -> Sequence[Claim]:
        """As `dequeue_many_rollouts`, with each rollout's resources; a version that the caller knows is only named."""

    @operation("GET", "/rollouts/{rollout_id}", who="runner")
    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        """The rollout with its latest attempt, if any; None if there is none. Overdue attempts are marked first."""

    @operation("POST", "/rollouts/search", who="runner", mutates=False)
    async def query_rollouts(
        self,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        run_id_in: Sequence[str] | None = None,
        step_in: Sequence[int] | None = None,
        group_id_in: Sequence[str] | None = None,
        agent_in: Sequence[str] | None = None,
        resources_id_in: Sequence[str] | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        start_time_min: float | None = None,
        start_time_max: float | None = None,
        error_contains: str | None = None,
        input_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[AttemptedRollout | Rollout]:
        """Rollouts that match, in the order of their creation unless sorted otherwise.

        None does not filter, an empty sequence matches nothing; a rollout without a mode never matches `mode_in`.
        Run, step and group are those of its metadata, the error is its latest attempt's, `input` is searched as JSON.
        `status` and `rollout_ids` are the older names of `status_in` and `rollout_id_in`."""

    @operation("POST", "/rollouts/{rollout_id}", who="admin")
    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,
        mode: RolloutMode | None | Unset = UNSET,
        resources_id: str | None | Unset = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | None | Unset = UNSET,
        output: Any | Unset = UNSET,
    ) -> AttemptedRollout | Rollout:
        """Change the named fields; fields left `UNSET` keep their value.

        A final status sets `end_time`, a queue status puts the rollout at the tail of the queue once, any other takes
        it out of the queue. Only this method can cancel a rollout."""

    @operation("POST", "/waits/rollouts", who="runner", mutates=False)
    async def wait_for_rollouts(
        self, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[AttemptedRollout | Rollout]:
        """Wait until all are finished or `timeout` seconds have passed; returns the finished ones, in the given order.

        None waits for ever; ids that name nothing are ignored. Attempts that run out of time meanwhile are marked."""

    # ------------------------------------------------------------------ attempts

    @operation("POST", "/rollouts/{rollout_id}/attempts", who="runner", ids="attempt_id", status=201)
    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, attempt_id: str | None = None
    ) -> AttemptedRollout:
        """Begin another attempt, whatever `max_attempts` says, unless there is one of this id; returns it."""

    @operation("POST", "/rollouts/{rollout_id}/attempts/search", who="runner", mutates=False)
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Attempts of a rollout, the first one first; empty for an unknown rollout."""

    @operation("GET", "/rollouts/{rollout_id}/attempts/latest", who="runner")
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The attempt with the highest number; None if there is none."""

    @operation("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}", who="runner", hot=True)
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | None | Unset = UNSET,
    ) -> Attempt:
        """Change the named fields of an attempt (`attempt_id` may be "latest").

        A status given for the latest attempt decides the status of the rollout, which may send it back to the queue."""

    @operation("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}/finish", who="runner", hot=True)
    async def finish_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus,
        *,
        spans: Sequence[Span] = (),
        metadata: dict[str, Any] | None | Unset = UNSET,
        output: Any | Unset = UNSET,
    ) -> Attempt:
        """Add the last spans of an attempt and write its status, as one step; its `output` becomes the rollout's.

        Spans are numbered here in their order, unless they have a number that this store has given out."""

    @operation(
        "POST", "/rollouts/{rollout_id}/attempts/{attempt_id}/finish-and-claim", who="runner", ids="claim_id", hot=True
    )
    async def finish_and_claim(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus,
        *,
        spans: Sequence[Span] = (),
        metadata: dict[str, Any] | None | Unset = UNSET,
        output: Any | Unset = UNSET,
        worker_id: str | None = None,
        claim_id: str | None = None,
        heartbeat_interval: float | None = None,
        known_resources: Sequence[ResourcesVersion] = (),
    ) -> Claim | None:
        """`finish_attempt`, then `claim_rollouts` of one without waiting, as one step; None if the queue is empty.

        A repeat by its `claim_id` finishes nothing again."""

    # ------------------------------------------------------------------ spans

    @operation("POST", "/spans", who="attempt", body="span", echoes="span", watchdog=False, status=201)
    async def add_span(self, span: Span) -> Span | None:
        """Append a span to its attempt, which counts as a sign of life; None if the attempt has one of its id."""

    @operation("POST", "/spans/batch", who="attempt", echoes="spans", many="spans", watchdog=False, status=201)
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span | None]:
        """Append all or none, with the next number for sequence id 0; of one id only the first, others answer None."""

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: "ReadableSpan", sequence_id: int | None = None
    ) -> Span | None:
        """Convert a span of the OpenTelemetry SDK and append it, under the next sequence id unless one is given."""
        number = await self.get_next_span_sequence_id(rollout_id, attempt_id) if sequence_id is None else sequence_id
        ids: dict[str, Any] = {"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": number}
        return await self.add_span(Span.from_opentelemetry(readable_span, **ids))

    @operation("POST", "/spans/next", who="attempt", watchdog=False)
    async def get_next_span_sequence_id(
        self, rollout_id: str, attempt_id: str, *, request_id: str | None = None
    ) -> int:
        """The next number of a rollout, from 1, shared by its attempts; a repeat takes a new one."""

    @operation("POST", "/spans/next/batch", who="attempt", watchdog=False)
    async def get_many_span_sequence_ids(
        self, rollout_attempt_ids: Sequence[tuple[str, str]], *, request_id: str | None = None
    ) -> Sequence[int]:
        """One number for each (rollout id, attempt id), in the given order; ids are not checked."""

    @operation("POST", "/spans/search", who="runner", mutates=False)
    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        """Spans of a rollout, of one attempt, or of the newest attempt (`attempt_id="latest"`).

        Unknown ids give an empty answer; spans that were dropped to save memory raise `SpansEvicted`.
        """

    @operation("POST", "/spans/open", who="attempt", watchdog=False, status=201)
    async def add_open_spans(self, spans: Sequence[Span]) -> None:
        """Tell of spans that have begun: outlines, kept apart from all others until they end or their attempt does."""

    @operation("POST", "/spans/open/search", who="runner", mutates=False)
    async def query_open_spans(self, rollout_id: str) -> Sequence[Span]:
        """Spans of a rollout's latest attempt that have begun and not ended, without `end_time`, as they began."""

    # ------------------------------------------------------------------ resources

    @operation("POST", "/resources", who="admin", ids="resources_id", body="resources", loose="resources", status=201)
    async def add_resources(self, resources: NamedResources, *, resources_id: str | None = None) -> ResourcesUpdate:
        """Publish resources under a new id; they become the latest. If the id is not new, nothing changes."""

    @operation("POST", "/resources/{resources_id}", who="admin", body="resources", loose="resources")
    async def update_resources(
        self, resources_id: str, resources: NamedResources, *, merge: bool = False, version: int | None = None
    ) -> ResourcesUpdate:
        """Publish resources under a given id, new or not; they become the latest.

        They replace what the id held; with `merge`, names not given keep what they had. `version` is the number this
        publication gets: a repeat changes nothing, a number that is another's is a `RequestConflict`."""

    @operation("GET", "/resources/latest", who="runner")
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """What was published last; None if nothing was."""

    @operation("GET", "/resources/{resources_id}", who="runner")
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """The resources of that id; None if there are none."""

    @operation("GET", "/resources", who="runner")
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Published resources, in the order of their first publication unless sorted otherwise."""

    # ------------------------------------------------------------------ workers

    @operation("POST", "/workers/search", who="runner", mutates=False)
    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Workers the store has heard of, in the order of their first sign of life unless sorted otherwise."""

    @operation("GET", "/workers/{worker_id}", who="runner")
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """The worker of that id; None if the store has not heard of it."""

    @operation("POST", "/workers/{worker_id}", who="runner", hot=True)
    async def update_worker(
        self, worker_id: str, heartbeat_stats: dict[str, Any] | None | Unset = UNSET
    ) -> RenewedWorker:
        """Record a heartbeat of a worker, new or not; it renews the leases of the `running_attempts` that it names."""

    @operation("POST", "/workers/{worker_id}/lost", who="runner")
    async def mark_worker_lost(self, worker_id: str, reason: str, *, claimed_with: str | None = None) -> Sequence[str]:
        """End the open attempts of a worker that is known to be gone; returns the ids of their rollouts.

        With `claimed_with` only if it claimed in slots whose names begin so, or what those slots gave last: a server
        names slots by the caller's token, and ends for a runner's token what was claimed with that."""

    # ------------------------------------------------------------------ runs and metrics

    @operation("POST", "/runs", who="admin", ids="run_id", status=201)
    async def start_run(
        self,
        name: str = "run",
        *,
        config: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        run_id: str | None = None,
    ) -> Run:
        """Open a run, or return and report the one of this `run_id`; secrets in `config` become `***`."""

    @operation("POST", "/runs/{run_id}/finish", who="admin")
    async def finish_run(
        self, run_id: str, status: RunStatus = "succeeded", *, summary: dict[str, Any] | None = None
    ) -> Run:
        """Close a run with its outcome; secrets in `summary` are kept as `***`."""

    @operation("GET", "/runs/{run_id}", who="runner")
    async def get_run_by_id(self, run_id: str) -> Run | None:
        """The run of that id; None if there is none."""

    @operation("POST", "/runs/search", who="runner", mutates=False)
    async def query_runs(
        self,
        *,
        status_in: Sequence[RunStatus] | None = None,
        name: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Run]:
        """Runs that match, in the order of their start unless sorted otherwise."""

    @operation("POST", "/runs/{run_id}/metrics", who="admin", ids="time", loose="values", watchdog=False, status=201)
    async def add_metrics(
        self, run_id: str, step: int, values: Mapping[str, float], *, time: float | None = None
    ) -> MetricPoint:
        """Append figures to the curves of a run; the same ones of the same `time`, by default now, are kept once."""

    @operation("POST", "/runs/{run_id}/metrics/search", who="runner", mutates=False)
    async def query_metrics(
        self, run_id: str, *, names: Sequence[str] | None = None, limit: int = -1, offset: int = 0
    ) -> PaginatedResult[MetricPoint]:
        """Points of a run by step, then by time; with `names`, only the points and values of those names."""

    # ------------------------------------------------------------------ changes

    def subscribe(
        self, kinds: Iterable[NoticeKind] | None = None, *, after: int | None = None
    ) -> AsyncIterator[Notice]:
        """Changes as they are committed, for ever: `async for notice in store.subscribe(["rollout"])`.

        Only changes made after the call are told, or those behind the cursor `after`. Close the iterator to stop."""
        raise NotImplementedError
