"""ServerDataStore: tasks, results and resources of the v0.1 protocol, kept in a `LightningStore`.

Everything is in the store: a task is a rollout, a claim an attempt, a result the spans and metadata of an attempt, and
that it was retrieved, which happens once, is a note beside it. Remembered here are only the tasks that were handed out
here, because `get_processing_tasks` is a plain method. How long a claim may take is written into each rollout as its
time limit, so that the store itself puts a task back whose client has vanished.
"""

import asyncio
import json
import logging
import uuid
from typing import Final

from pydantic_core import to_jsonable_python

from agentlightning.errors import InvalidValue, SpansEvicted, StoreUnavailable
from agentlightning.legacy.results import RESULT, rollout_from_spans, spans_of
from agentlightning.runner.failures import FailureNote
from agentlightning.runner.results import output_of
from agentlightning.store.base import UNSET, LightningStore, is_finished, is_queuing, is_running
from agentlightning.store.forwarding import innermost
from agentlightning.store.http.credentials import secrets_in
from agentlightning.store.local import LocalStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import (
    AttemptedRollout,
    NamedResources,
    ProxyLLM,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutLegacy,
    RolloutMode,
    Task,
    TaskInput,
)
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.loop_thread import CrossLoopLock

__all__ = ["ServerDataStore", "check_sendable"]

logger = logging.getLogger(__name__)

REPORTED: Final = "agentlightning.legacy.rollout"
"""Metadata key of an attempt under which a reported result is kept whole, until it is retrieved."""
RETRIEVED: Final = "agentlightning.legacy.retrieved"
"""Metadata key that says a result was retrieved."""
LEGACY_PREFIX: Final = "rollout-"
"""How ids of tasks begin that were queued through this protocol."""
OF_ATTEMPT: Final = "@attempt@"
"""Between the id of resources and those of the rollout and the attempt to which they are bound."""
LOOK_SECONDS: Final = 0.1
"""How often it is looked whether a rollout is there that nobody has queued yet."""


class ServerDataStore:
    """What a legacy server knows, over a store that others may use at the same time."""

    def __init__(self, store: LightningStore | None = None, *, task_timeout_seconds: float | None = None) -> None:
        """Sit on a store, or on a memory store of its own.

        Args:
            store: Where everything is kept.
            task_timeout_seconds: After this time a claimed task goes back to the queue; None waits for ever.
        """
        self.store = store if store is not None else InMemoryLightningStore()
        self._config = RolloutConfig()
        if task_timeout_seconds is not None:
            # The old protocol never gives a task up.
            self._config = RolloutConfig(
                timeout_seconds=task_timeout_seconds, max_attempts=1_000_000, retry_condition=["timeout"]
            )
        self._processing_tasks: dict[str, Task] = {}
        self._retrieving = CrossLoopLock()  # one at a time: a result is given to one caller

    # ------------------------------------------------------------------ tasks

    async def add_task(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: JsonObject | None = None,
    ) -> str:
        """Queue a task; the id of its rollout. InvalidValue if it could not be sent to a client."""
        check_sendable("A task", {"input": sample, "resources_id": resources_id, "metadata": metadata})
        rollout_id = f"{LEGACY_PREFIX}{uuid.uuid4()}"
        task = Task(rollout_id=rollout_id, input=sample, mode=mode, resources_id=resources_id, metadata=metadata or {})
        await self._queue(task)
        logger.debug("Task %s queued.", rollout_id)
        return rollout_id

    async def get_next_task(self, worker_id: str | None = None) -> Task | None:
        """Claim the next task; None if there is none. Tasks whose time has run out are back in the queue by then.

        One that no answer can carry, which others may have put into the store, is failed and the next one taken.
        """
        while (claim := await self.store.dequeue_rollout(worker_id)) is not None:
            task = Task.of_rollout(claim)
            try:
                check_sendable(f"Task '{task.rollout_id}'", task.model_dump())
            except InvalidValue as error:
                logger.warning("%s It has failed.", error)
                reason = FailureNote.of(error).as_metadata()
                await self.store.update_attempt(task.rollout_id, "latest", status="failed", metadata={"error": reason})
                continue
            self._processing_tasks[task.rollout_id] = task
            logger.debug("Task %s handed out to %s.", task.rollout_id, worker_id)
            return task
        return None

    def get_processing_tasks(self) -> dict[str, Task]:
        """Tasks that were handed out here and have not come back, by rollout id."""
        return dict(self._processing_tasks)

    async def requeue_task(self, task: Task) -> None:
        """Put a claimed task back at the tail of the queue."""
        self._processing_tasks.pop(task.rollout_id, None)
        rollout = await self._queue(task)
        if not is_queuing(rollout):
            await self.store.update_rollout(task.rollout_id, status="requeuing")

    async def _queue(self, task: Task) -> Rollout:
        """Add a task at the tail of the queue; one whose id is known already stays as it is."""
        known = await self.store.get_rollout_by_id(task.rollout_id)
        rollout = known or await self.store.enqueue_rollout(
            *(task.input, task.mode, task.resources_id, self._config, task.metadata), rollout_id=task.rollout_id
        )
        if task.resources_id is None and rollout.resources_id is not None and is_queuing(rollout):
            # The store binds to the resources of now; a task without an id takes those that are latest when it is run.
            rollout = await self.store.update_rollout(rollout.rollout_id, resources_id=None)
        return rollout

    async def forget_stale_tasks(self) -> None:
        """Drop tasks from the processing ones that the store has taken back, as it does when their time runs out."""
        if self._processing_tasks:
            known = await self.store.query_rollouts(rollout_id_in=list(self._processing_tasks))
            claimed = [one for one in known if isinstance(one, AttemptedRollout) and is_running(one)]
            claims = {one.rollout_id: one.attempt.sequence_id for one in claimed}
            for rollout_id, task in self.get_processing_tasks().items():
                if claims.get(rollout_id) != task.num_claims:
                    self._processing_tasks.pop(rollout_id, None)

    # ------------------------------------------------------------------ results

    async def store_rollout(self, rollout: RolloutLegacy) -> None:
        """Keep a reported result and mark its rollout as succeeded; a later report of the same rollout replaces it.

        A rollout the store does not know is created, so that a client outlives the server that gave it the task.
        """
        check_sendable("A result", rollout.model_dump())
        rollout_id = rollout.rollout_id
        attempt = await self.store.get_latest_attempt(rollout_id)
        if attempt is None:
            task = rollout.task or Task(rollout_id=rollout_id, input=None)
            await self._queue(task.model_copy(update={"rollout_id": rollout_id}))
            attempt = (await self.store.start_attempt(rollout_id)).attempt
        metadata = {**(attempt.metadata or {}), REPORTED: rollout.model_dump(mode="json")}
        metadata.pop(RETRIEVED, None)
        if spans := spans_of(rollout, attempt):
            await self.store.add_many_spans(spans)
        output = output_of(rollout.metadata[RESULT]) if RESULT in rollout.metadata else UNSET
        # Only the latest attempt decides: the rollout is done even if another client has claimed it meanwhile.
        await self.store.finish_attempt(rollout_id, "latest", "succeeded", metadata=metadata, output=output)
        logger.debug("Result of rollout %s stored: reward %s.", rollout_id, rollout.final_reward)
        self._processing_tasks.pop(rollout_id, None)

    async def retrieve_rollout(self, rollout_id: str) -> RolloutLegacy | None:
        """Take the result of a finished rollout; None if it is not finished, not known, or was taken before."""
        async with self._retrieving:
            rollout = await self.store.get_rollout_by_id(rollout_id)
            if rollout is None or not is_finished(rollout) or RETRIEVED in _marks(rollout):
                return None
            result = await self._result_of(rollout)
            # What was kept for this is let go of.
            marks = {key: value for key, value in _marks(rollout).items() if key != REPORTED} | {RETRIEVED: True}
            if isinstance(rollout, AttemptedRollout):
                await self.store.update_attempt(rollout_id, rollout.attempt.attempt_id, metadata=marks)
            else:
                await self.store.update_rollout(rollout_id, metadata=marks)
        self._processing_tasks.pop(rollout_id, None)
        return result

    async def retrieve_completed_rollouts(self) -> list[RolloutLegacy]:
        """Take all results that are there, the first one finished first.

        These are those of all rollouts in the store that were queued or reported through this protocol.
        """
        finished = await self.store.query_rollouts(status_in=["succeeded", "failed", "cancelled"], sort_by="end_time")
        ours = [one for one in finished if one.rollout_id.startswith(LEGACY_PREFIX) or REPORTED in _marks(one)]
        results = [await self.retrieve_rollout(one.rollout_id) for one in ours if RETRIEVED not in _marks(one)]
        return [result for result in results if result is not None]

    async def wait_until_finished(self, rollout_id: str, timeout: float | None = None) -> bool:
        """Wait for a rollout, known already or not, to finish; False if that takes longer than `timeout` seconds."""

        async def until_finished() -> bool:
            while await self.store.get_rollout_by_id(rollout_id) is None:  # noqa: ASYNC110 # rarer than other changes
                await asyncio.sleep(LOOK_SECONDS)
            return bool(await self.store.wait_for_rollouts([rollout_id]))

        try:
            return await asyncio.wait_for(until_finished(), timeout)
        except asyncio.TimeoutError:
            return False

    async def _result_of(self, rollout: Rollout) -> RolloutLegacy:
        """The result as it was reported, or as its spans tell it."""
        reported = _marks(rollout).get(REPORTED)
        if reported is not None:
            return RolloutLegacy.model_validate(reported)
        try:
            return rollout_from_spans(rollout, await self.store.query_spans(rollout.rollout_id, "latest"))
        except SpansEvicted as error:
            logger.warning("The result of rollout %s has no trace: %s", rollout.rollout_id, error)
            return rollout_from_spans(rollout, []).model_copy(update={"trace": None})

    async def check_health(self) -> None:
        """StoreUnavailable if the store cannot be written to, as far as it can tell."""
        store = innermost(self.store)
        if isinstance(store, LocalStore):
            try:
                # A store that takes longer to write a little counts as broken.
                await asyncio.wait_for(store.check_writable(), 5.0)
            except Exception as error:
                raise StoreUnavailable(f"The store cannot be written to: {type(error).__name__}: {error}") from error

    # ------------------------------------------------------------------ resources

    async def update_resources(self, update: ResourcesUpdate) -> ResourcesUpdate:
        """Publish resources under the id of the update; they become the latest. Returns them as the store has them."""
        check_sendable("A bundle of resources", update.model_dump())
        published = await self.store.update_resources(update.resources_id, update.resources)
        logger.debug("Resources %s published.", published.resources_id)
        return published

    async def publish_resources(self, resources: NamedResources) -> ResourcesUpdate:
        """Publish resources under a new id `res-<uuid4>`."""
        update = ResourcesUpdate(resources_id=f"res-{uuid.uuid4()}", resources=resources)
        return await self.update_resources(update)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """The resources of that id; None if there are none."""
        return await self.store.get_resources_by_id(resources_id)

    async def with_resources_of_attempt(self, task: Task) -> Task:
        """A claimed task whose resources are bound to its attempt, if they hold the secret of a locked LLM proxy.

        The old protocol fetches resources by their id alone, so the id that the task names says the attempt too.
        """
        update = await (
            self.get_latest_resources() if task.resources_id is None else self.get_resources_by_id(task.resources_id)
        )
        attempt = await self.store.get_latest_attempt(task.rollout_id)
        if attempt is None or update is None or not secrets_in(update):
            return task
        resources_id = OF_ATTEMPT.join((update.resources_id, task.rollout_id, attempt.attempt_id))
        return task.model_copy(update={"resources_id": resources_id})

    async def resources_of_attempt(self, resources_id: str) -> ResourcesUpdate | None:
        """Resources under an id of `with_resources_of_attempt`, with the attempt's own keys; None if it is none."""
        own_id, _, attempt_ids = resources_id.partition(OF_ATTEMPT)
        rollout_id, _, attempt_id = attempt_ids.partition(OF_ATTEMPT)
        update, rollout = await self.get_resources_by_id(own_id), await self.store.get_rollout_by_id(rollout_id)
        if update is None or not isinstance(rollout, AttemptedRollout) or rollout.attempt.attempt_id != attempt_id:
            return None
        bound = {
            name: one.with_attempted_rollout(rollout) if isinstance(one, ProxyLLM) else one
            for name, one in update.resources.items()
        }
        return update.model_copy(update={"resources_id": resources_id, "resources": bound})

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """What was published last; None if nothing was."""
        return await self.store.get_latest_resources()


def check_sendable(what: str, value: object) -> None:
    """Refuse what no answer can carry, before a store that keeps everything has taken it."""
    try:
        json.dumps(to_jsonable_python(value), ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # an unknown type, a lone surrogate, nested too deeply
        raise InvalidValue(
            f"{what} cannot be sent to clients as JSON: {error}; give text in UTF-8, numbers, lists or mappings."
        ) from error


def _marks(rollout: Rollout) -> JsonObject:
    """Where results and their retrieval are noted: the latest attempt, or the rollout if it never had one."""
    holder = rollout.attempt if isinstance(rollout, AttemptedRollout) else rollout
    return holder.metadata or {}
