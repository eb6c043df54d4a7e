"""Rollouts, attempts and workers: the work that flows, and the small interfaces around it.

A *rollout* is one task given to an agent; an *attempt* is one try at it. Models hold data only: which state may follow
which is decided in `agentlightning.store.lifecycle`.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, SupportsIndex, TypeAlias, TypeVar

from pydantic import BaseModel, Field, model_validator

from agentlightning.types.paging import FilterField, FilterOptions, PaginatedResult, SortOptions
from agentlightning.types.tracer import Span, SpanCoreFields

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = [
    "Triplet",
    "RolloutLegacy",
    "Task",
    "TaskInput",
    "TaskIfAny",
    "RolloutRawResultLegacy",
    "RolloutRawResult",
    "RolloutMode",
    "GenericResponse",
    "ParallelWorkerBase",
    "Dataset",
    "AttemptStatus",
    "RolloutStatus",
    "RolloutConfig",
    "Rollout",
    "Attempt",
    "AttemptedRollout",
    "EnqueueRolloutRequest",
    "RenewedWorker",
    "Worker",
    "WorkerStatus",
    "Hook",
    "PaginatedResult",
    "FilterOptions",
    "FilterField",
    "SortOptions",
]

T_co = TypeVar("T_co", covariant=True)

TaskInput: TypeAlias = Any
"""What a task is made of; the store keeps it as it is."""

RolloutMode = Literal["train", "val", "test"]
RolloutStatus = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
WorkerStatus = Literal["idle", "busy", "unknown"]


class Triplet(BaseModel):
    """One model call as training data: what was asked, what came back, and its reward."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class RolloutConfig(BaseModel):
    """How patient the store is with a rollout, and when it tries again."""

    timeout_seconds: float | None = None
    """Wall-clock limit of one attempt; None waits for ever."""
    unresponsive_seconds: float | None = None
    """Longest silence of an attempt (no span, no heartbeat); None allows any."""
    max_attempts: int = Field(default=1, ge=1)
    """Attempts in all, the first one counted."""
    retry_condition: list[AttemptStatus] = Field(default_factory=list)
    """Attempt outcomes that lead to another attempt."""
    requeue_lost: bool = Field(default=True, exclude_if=bool)
    """Whether an attempt whose worker died does not count as tried, three times at most; else as `unresponsive`."""


class Attempt(BaseModel):
    """One try at a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1 for the first attempt of the rollout."""
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None
    lease_until: float | None = Field(default=None, exclude_if=functools.partial(operator.is_, None))
    """When the attempt is lost unless its worker has named it in a heartbeat; None for a worker without heartbeats."""


class Rollout(BaseModel):
    """One task for an agent, and where it stands."""

    rollout_id: str
    input: TaskInput
    start_time: float
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None
    output: Any = Field(default=None, exclude_if=functools.partial(operator.is_, None))
    """What the agent returned, as JSON, if it is neither a reward nor spans. None is not written to JSON: the releases
    that came before do not know the field."""
    reward: float | None = Field(default=None, exclude_if=functools.partial(operator.is_, None))
    """The last reward of the latest attempt, if it is a finite number; the store reads it off the spans."""


class AttemptedRollout(Rollout):
    """A rollout together with its latest attempt."""

    attempt: Attempt

    def __init__(self, /, **fields: Any) -> None:
        """Take the fields of a rollout, or the `rollout` itself, and an `attempt`."""
        if isinstance(rollout := fields.get("rollout"), Rollout):
            own = {name: getattr(rollout, name) for name in Rollout.model_fields}
            fields = own | {name: value for name, value in fields.items() if name != "rollout"}
        super().__init__(**fields)

    # Without it pydantic calls `__init__` for all that it validates, which takes twice as long.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined] # as pydantic marks its own

    @model_validator(mode="after")
    def _attempt_belongs_to_rollout(self) -> "AttemptedRollout":
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(f"Attempt of rollout '{self.attempt.rollout_id}' given for rollout '{self.rollout_id}'.")
        return self

    @property
    def rollout(self) -> Rollout:
        """The rollout alone."""
        return Rollout.model_construct(**{name: getattr(self, name) for name in Rollout.model_fields})


class EnqueueRolloutRequest(BaseModel):
    """One rollout of `enqueue_many_rollouts`."""

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: str | None = None
    """An id of the caller's; enqueuing it twice is enqueuing it once."""


class Worker(BaseModel):
    """A process or thread that runs agents, as the store last heard of it."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None
    claims: dict[str, tuple[int, list[tuple[str, str]]]] = Field(default={}, exclude=True, repr=False)
    """The store's own note of the last claim of each slot: its counter, and ids of rollout and attempt."""


class RenewedWorker(Worker):
    """A worker as its heartbeat leaves it."""

    lost_attempts: list[tuple[str, str]] = []
    """Ids of rollout and attempt of those that the heartbeat named and that are the worker's no more."""


TASK_ROW: Final = "agentlightning.task"
"""Metadata key of a rollout whose input was given as a `Task`: the task's other fields."""


class Task(BaseModel):
    """A task of the legacy protocol, and a row of a data set whose agent wants more than its input."""

    rollout_id: str
    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    create_time: float | None = None
    last_claim_time: float | None = None
    num_claims: int | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    def as_rollout_fields(
        self, mode: RolloutMode | None, resources_id: str | None, metadata: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The fields of a rollout for this task; what is given counts before what the task says."""
        row = self.model_dump(exclude={"input"}, exclude_unset=True)
        return {
            "input": self.input,
            "mode": mode or self.mode,
            "resources_id": resources_id or self.resources_id,
            "metadata": {**(metadata or {}), TASK_ROW: row},
        }

    @classmethod
    def of_rollout(cls, rollout: Rollout) -> "Task":
        """A rollout as a task: all is the rollout's, but for the metadata of the task that it was made of."""
        fields: Mapping[str, Any] = rollout.__dict__
        if isinstance(rollout.input, Task):  # a store of another making keeps any object
            fields = {**fields, **rollout.input.as_rollout_fields(rollout.mode, rollout.resources_id, rollout.metadata)}
        metadata = fields["metadata"] or {}
        row = metadata.get(TASK_ROW)
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        return cls(
            rollout_id=rollout.rollout_id,
            input=fields["input"],
            mode=fields["mode"],
            resources_id=fields["resources_id"],
            create_time=rollout.start_time,
            last_claim_time=attempt.start_time if attempt else None,
            num_claims=attempt.sequence_id if attempt else 0,
            metadata=row.get("metadata", {}) if isinstance(row, Mapping) else metadata,
        )


class TaskIfAny(BaseModel):
    """Answer to a poll of the legacy protocol."""

    is_available: bool
    task: Task | None = None


class RolloutLegacy(BaseModel):
    """A finished rollout of the legacy protocol."""

    rollout_id: str
    task: Task | None = None
    final_reward: float | None = None
    triplets: list[Triplet] | None = None
    trace: list[dict[str, Any]] | None = None
    """OpenTelemetry spans as `ReadableSpan.to_json` writes them."""
    logs: list[str] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class GenericResponse(BaseModel):
    """Acknowledgement of the legacy protocol."""

    status: str = "success"
    message: str | None = None
    data: dict[str, Any] | None = None


RolloutRawResult: TypeAlias = (
    float | Mapping[str, float] | list["ReadableSpan"] | list[Span] | list[SpanCoreFields] | Any | None
)
"""What an agent returns: its reward, several rewards by name, spans, nothing, or any other value, which is kept as the
rollout's output."""
RolloutRawResultLegacy: TypeAlias = (
    float | list[Triplet] | list[dict[str, Any]] | list["ReadableSpan"] | RolloutLegacy | None
)


class ParallelWorkerBase:
    """Life cycle of a part that works in several workers.

    The order is `init` in the main process, `init_worker` in each worker, `run`, `teardown_worker`, `teardown`.
    """

    def __init__(self) -> None:
        self.worker_id: int | None = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Prepare what all workers share."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Prepare one worker."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`."""


class Dataset(Protocol[T_co]):
    """Tasks by number; a plain list will do."""

    def __getitem__(self, index: SupportsIndex, /) -> T_co: ...

    def __len__(self) -> int: ...


class Hook(ParallelWorkerBase):
    """Callbacks around a rollout; override what you need."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: AttemptedRollout) -> None:
        """Tracing has begun; the agent has not run yet."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: AttemptedRollout) -> None:
        """The agent has run; tracing is about to end."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: AttemptedRollout) -> None:
        """The rollout was claimed; nothing has run yet."""

    async def on_rollout_end(
        self, *, agent: Any, runner: Any, rollout: AttemptedRollout, spans: "Sequence[ReadableSpan | Span]"
    ) -> None:
        """The rollout is over, with these spans; its status is about to be written."""
