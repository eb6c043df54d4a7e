"""Algorithms that train nothing: they show that an agent, its data and its rewards work, before an expensive run."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentlightning.algorithm.base import INITIAL_RESOURCES_ID, Algorithm, Tasks
from agentlightning.algorithm.utils import running_proxy
from agentlightning.errors import ConfigurationError
from agentlightning.store.base import LightningStore
from agentlightning.types import Attempt, Rollout, RolloutMode, Span, TaskInput

__all__ = ["DEV_RESOURCES_ID", "Baseline", "DryRun", "FastAlgorithm"]

logger = logging.getLogger(__name__)

DEV_RESOURCES_ID: Final = "dev"
"""Under which a `DryRun` publishes the resources that it was given."""
_QUEUED: Final = ("queuing", "requeuing")


class FastAlgorithm(Algorithm):
    """Marks an algorithm that `Trainer.dev` runs as it is: quick, and free of side effects on models.

    Any other algorithm may define `dev_resources()`, plain or async, which `Trainer.dev` calls instead of running it.
    It gives what agents run with before anything is learned: resources by name, None for the latest in the store, or
    an async context manager that yields one of these and cleans up. Store, proxy, trainer and initial resources are
    set before.
    """


@dataclass(eq=False, repr=False, kw_only=True)
class Baseline(FastAlgorithm):
    """Sends every task through the agent and logs what came back; the trainer's proxy runs meanwhile."""

    n_epochs: int = 1
    """How often each task is sent."""
    train_split: float = 0.5
    """Between 0 and 1; accepted and ignored."""
    polling_interval: float = 5.0
    """Seconds after which the store is asked again where it has no news of its own."""
    max_queue_length: int = 4
    """How many rollouts may wait for a runner before the next task is sent."""
    span_verbosity: Literal["keys", "key_values", "none"] = "keys"
    """What is logged of a span's attributes."""

    def __post_init__(self) -> None:
        if not 0 < self.train_split < 1:
            raise ConfigurationError(f"train_split must lie between 0 and 1; it is {self.train_split}.")
        if self.max_queue_length < 0:
            raise ConfigurationError(f"max_queue_length must not be below zero; it is {self.max_queue_length}.")

    async def run(self, train_dataset: Tasks | None = None, val_dataset: Tasks | None = None) -> None:
        datasets: tuple[tuple[RolloutMode, Tasks | None], ...] = (("train", train_dataset), ("val", val_dataset))
        samples = [(mode, tasks[i]) for mode, tasks in datasets if tasks is not None for i in range(len(tasks))]
        if not samples:
            logger.error(
                "Baseline has nothing to do: both data sets are empty. Give it a train_dataset or val_dataset."
            )
            return
        store = self.get_store()
        async with running_proxy(self), self._published(store) as resources_id:
            for epoch in range(self.n_epochs):
                await self._send(store, samples, resources_id)
                logger.info("Epoch %d of %d: %d rollouts are done.", epoch + 1, self.n_epochs, len(samples))

    @asynccontextmanager
    async def _published(self, store: LightningStore) -> AsyncIterator[str | None]:
        """The id of what rollouts run with; None takes the latest resources of the store."""
        resources = self.get_initial_resources()
        if resources is None:
            yield None
            return
        published = await store.get_resources_by_id(INITIAL_RESOURCES_ID)  # by the trainer, if there is one
        if published is None or published.resources != resources:
            published = await store.update_resources(INITIAL_RESOURCES_ID, resources)
        yield published.resources_id

    async def _send(
        self, store: LightningStore, samples: Sequence[tuple[RolloutMode, TaskInput]], resources_id: str | None
    ) -> None:
        """Send every task, and wait for all; where it is stopped, what nobody has begun with is withdrawn."""
        harvests: dict[str, asyncio.Task[None]] = {}
        run_id = self.get_run_id()
        own: dict[str, Any] = {} if run_id is None else {"run_id_in": [run_id]}
        metadata = None if run_id is None else {"run_id": run_id}
        try:
            for mode, sample in samples:
                while len(await store.query_rollouts(status=_QUEUED, **own)) > self.max_queue_length:  # noqa: ASYNC110 # any store
                    await asyncio.sleep(min(self.polling_interval, 0.1))
                rollout = await store.enqueue_rollout(
                    input=sample, mode=mode, resources_id=resources_id, metadata=metadata
                )
                name = f"harvest-{rollout.rollout_id}"
                harvests[rollout.rollout_id] = asyncio.create_task(self._harvest(store, rollout.rollout_id), name=name)
            await asyncio.gather(*harvests.values())
        except asyncio.CancelledError:
            for rollout in await store.query_rollouts(status=_QUEUED, rollout_ids=list(harvests)):
                await store.update_rollout(rollout.rollout_id, status="cancelled")
            raise
        finally:
            for harvest in harvests.values():
                harvest.cancel()
            await asyncio.gather(*harvests.values(), return_exceptions=True)

    async def _harvest(self, store: LightningStore, rollout_id: str) -> None:
        """Wait for one rollout and log what became of it."""
        finished: Sequence[Rollout] = []
        patience_seconds = max(self.polling_interval, 0.01)  # none at all would starve the event loop
        while not finished:
            finished = await store.wait_for_rollouts(rollout_ids=[rollout_id], timeout=patience_seconds)
        rollout = finished[0]
        for attempt in await store.query_attempts(rollout_id):
            text = "[Rollout %s | Attempt %s] ID: %s. Status: %s. Worker: %s"
            told = attempt.attempt_id, attempt.status, attempt.worker_id
            logger.info(text, rollout_id, attempt.sequence_id, *told)
            for span in await store.query_spans(rollout_id, attempt.attempt_id):
                self._log_span(rollout_id, attempt, span)
        logger.info("[Rollout %s] Finished with status %s", rollout_id, rollout.status)
        spans = list(await store.query_spans(rollout_id, "latest"))
        if spans and rollout.status == "succeeded":
            self._log_adapted(rollout_id, spans)

    def _log_span(self, rollout_id: str, attempt: Attempt, span: Span) -> None:
        shown = {"key_values": f" Attributes: {span.attributes}", "keys": f" Attribute keys: {list(span.attributes)}"}
        text = "[Rollout %s | Attempt %s | Span %s] #%s (%s) From %s to %s.%s"
        told = span.span_id, span.sequence_id, span.name, span.start_time, span.end_time
        logger.info(text, rollout_id, attempt.attempt_id, *told, shown.get(self.span_verbosity, ""))

    def _log_adapted(self, rollout_id: str, spans: list[Span]) -> None:
        if self._adapter is None:
            logger.warning("No adapter is set, so the spans of rollout %s are not adapted.", rollout_id)
            return
        try:
            adapted = self._adapter.adapt(spans)
        except ValueError as error:
            logger.warning("[Rollout %s] The adapter could not read its spans: %s", rollout_id, error)
        else:
            logger.info("[Rollout %s] Adapted data: %s", rollout_id, adapted)


class DryRun(Baseline):
    """Sends every task once, with the resources of an algorithm that is not run: what `Trainer.dev` does with it."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self._algorithm = algorithm

    @asynccontextmanager
    async def _published(self, store: LightningStore) -> AsyncIterator[str | None]:
        async with await self._offered() as resources:
            if resources is not None and not isinstance(resources, Mapping):
                raise TypeError(
                    f"{type(self._algorithm).__name__}.dev_resources() must give the resources by name, None, or an "
                    f"async context manager that yields them; it gave a {type(resources).__name__}."
                )
            update = None if resources is None else await store.update_resources(DEV_RESOURCES_ID, dict(resources))
            yield None if update is None else update.resources_id

    async def _offered(self) -> AbstractAsyncContextManager[Any]:
        """What the algorithm has agents run with, while the context lasts."""
        algorithm: Any = self._algorithm
        algorithm.set_store(self.get_store())
        algorithm.set_llm_proxy(self.get_llm_proxy())
        algorithm.set_trainer(self.get_trainer())
        if (initial := self.get_initial_resources()) is not None:
            algorithm.set_initial_resources(initial)
        offered = algorithm.dev_resources()
        if inspect.isawaitable(offered):
            offered = await offered
        return offered if isinstance(offered, AbstractAsyncContextManager) else nullcontext(offered)
