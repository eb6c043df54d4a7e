"""GRPO: a model learns from the rewards of groups of rollouts that tried the same task.

Each step sends every task of a batch to the agents several times, waits, and compares the rewards within each group:
what did better than the others of its group becomes likelier. The agents' calls go through the LLM proxy to an engine
with the current weights; what they said comes back as trajectories from the store.
"""

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agentlightning.adapter import TraceToTrajectory
from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.grpo.collecting import Collector, FinishedRollout, Sent, outcomes_of
from agentlightning.algorithm.grpo.curriculum import Curriculum
from agentlightning.algorithm.grpo.policy import Policy
from agentlightning.algorithm.grpo.progress import Progress
from agentlightning.algorithm.grpo.samples import Batch, SampleSettings, batch_of
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.intervals import Estimate, estimate
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.types import Dataset, NamedResources, RolloutConfig
from agentlightning.types.agent_matcher import AgentMatcher

__all__ = ["GRPO"]

logger = logging.getLogger(__name__)

MAIN: Final = "main_llm"
RETRIED: Final = ("unresponsive", "timeout")
"""Outcomes of an attempt that say nothing of the agent: such a rollout is tried again."""
MOST_EMPTY_STEPS: Final = 20
"""After so many steps in a row without anything to learn from, a run is given up."""
MOST_EXAMPLES: Final = 8
MOST_REFILLS: Final = 3
"""How often dynamic sampling sends further tasks for one step."""


class GRPO(Algorithm):
    """Trains one model, or several that work together.

    Args:
        model: What to train: "tiny", the model that comes with the package, or the folder of a Hugging Face model. For
            several policies, folders by the names under which agents call them.
        group_size: Rollouts of each task; they are compared with each other.
        tasks_per_step: Tasks of a step.
        steps: How many steps to make, or fewer where `target_reward` or `max_seconds` end it.
        target_reward: Stop when the mean reward of the last steps has reached it.
        max_seconds: Stop after so long.
        temperature: At which answers are sampled for training.
        validation_temperature: At which they are sampled for validation; 0 takes the likeliest token each time.
        validate_every: Steps between validations; 0 validates before and after only.
        validation_tasks: How many tasks of the validation set are used; None takes all.
        learning: How the model learns; see `LearnerSettings`.
        sampling: Which rollouts count, and how; see `SampleSettings`.
        dynamic_sampling: Send more tasks until a step has as many groups with different rewards as it asks for.
        max_staleness: 0 waits for each step's rollouts; n lets rollouts start that many updates ahead of their use.
        agent_match: Train only the calls of these agents.
        output: Folder in which the trained model is left at the end, as `agl serve` takes it; for several policies, one
            below it for each.
        checkpoints: Folder for checkpoints; None makes none.
        save_every: Steps between checkpoints.
        resume: Go on from the last checkpoint in the folder, if there is one.
        rollout_timeout: Seconds that one attempt may take.
        device: "auto", "cpu" or "cuda".
        seed: Of the order of tasks and of learning.
    """

    def __init__(
        self,
        model: str | Mapping[str, str] = "tiny",
        *,
        group_size: int = 8,
        tasks_per_step: int = 16,
        steps: int = 100,
        target_reward: float | None = None,
        max_seconds: float | None = None,
        temperature: float = 1.0,
        validation_temperature: float = 0.0,
        validate_every: int = 0,
        validation_tasks: int | None = None,
        learning: LearnerSettings | None = None,
        sampling: SampleSettings | None = None,
        dynamic_sampling: bool = False,
        max_staleness: int = 0,
        agent_match: str | AgentMatcher | None = None,
        output: str | Path | None = None,
        checkpoints: str | Path | None = None,
        save_every: int = 10,
        resume: bool = False,
        rollout_timeout: float = 600.0,
        device: str = "auto",
        max_sequences: int = 64,
        seed: int = 0,
    ) -> None:
        if group_size < 2:
            raise ConfigurationError(
                f"A group is compared with itself, so group_size must be at least 2, not {group_size}."
            )
        if tasks_per_step < 1 or steps < 1 or max_staleness < 0:
            raise ConfigurationError("tasks_per_step and steps must be at least 1, and max_staleness at least 0.")
        if resume and checkpoints is None:
            raise ConfigurationError("To resume, name the folder of the checkpoints.")
        self.group_size = group_size
        self.tasks_per_step = tasks_per_step
        self.steps = steps
        self.target_reward = target_reward
        self.max_seconds = max_seconds
        self.temperature = temperature
        self.validation_temperature = validation_temperature
        self.validate_every = validate_every
        self.validation_tasks = validation_tasks
        self.learning = learning or LearnerSettings(seed=seed, threads=1 if model == "tiny" else None)
        self.sampling = dataclasses.replace(sampling or SampleSettings(), temperature=temperature)
        self.dynamic_sampling = dynamic_sampling
        self.max_staleness = max_staleness
        self.agent_match = agent_match
        self.output = None if output is None else Path(output)
        self.save_every = save_every
        self.resume = resume
        self.seed = seed
        self.baseline: Estimate | None = None
        """The mean reward on the validation set before training."""
        self.result: Estimate | None = None
        """The same after it."""
        self.examples: list[list[FinishedRollout]] = []
        """The first rollouts of each validation, in the order of its tasks."""
        self._config = RolloutConfig(timeout_seconds=rollout_timeout, max_attempts=2, retry_condition=list(RETRIED))
        named = {"tiny" if model == "tiny" else "policy": model} if isinstance(model, str) else dict(model)
        self.policies = [
            Policy(name, source, self.learning, device=device, max_sequences=max_sequences)
            for name, source in named.items()
        ]
        self.progress = Progress(Path(checkpoints) if checkpoints is not None else None)
        self._resources: dict[str, str] = {}
        self._collector: Collector | None = None
        self._adapter_of_calls = TraceToTrajectory(agent_match=agent_match)

    # ------------------------------------------------------------------ the run

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Train; Ctrl-C leaves a checkpoint behind, if there is a folder for it."""
        if train_dataset is None:
            raise ConfigurationError("GRPO needs tasks to train on; give the Trainer a train_dataset.")
        curriculum = Curriculum(train_dataset, self.seed)
        proxy, is_ours = self._proxy()
        try:
            await asyncio.gather(*(policy.start() for policy in self.policies))
            proxy.update_model_list([policy.model_config() for policy in self.policies])
            if not proxy.is_running():
                proxy.start()
            await self._publish_resources(proxy)
            self._collector = Collector(self.get_store(), self._config)
            await self.progress.restore(self.policies, curriculum, wanted=self.resume)
            if val_dataset is not None and self.baseline is None:
                self.baseline = self.progress.baseline or await self.validate(val_dataset)
                self.progress.baseline = self.baseline
            await self._train(curriculum, val_dataset)
        finally:
            await asyncio.gather(*(policy.stop() for policy in self.policies))
            if is_ours:
                await proxy.stop()

    def _proxy(self) -> tuple[LLMProxy, bool]:
        """The trainer's proxy, or one of our own for this run."""
        given = self.get_llm_proxy()
        if given is not None:
            return given, not given.is_running()
        return LLMProxy(store=self.get_store(), journal=False), True

    async def _publish_resources(self, proxy: LLMProxy) -> None:
        """The models as resources, twice: with the temperature for training, and with that for validation."""
        for mode, temperature in (("train", self.temperature), ("val", self.validation_temperature)):
            resources: NamedResources = dict(self.get_initial_resources() or {})
            for policy in self.policies:
                name = MAIN if len(self.policies) == 1 else policy.name
                resources[name] = proxy.as_resource(model=policy.name, sampling_parameters={"temperature": temperature})
            update = await self.get_store().update_resources(f"grpo-{mode}", resources)
            self._resources[mode] = update.resources_id

    async def _train(self, curriculum: Curriculum, val_dataset: Dataset[Any] | None) -> None:
        progress, began = self.progress, time.monotonic()
        ahead: deque[Sent] = deque()
        try:
            while progress.step < self.steps and not progress.is_target_reached(self.target_reward):
                if self.max_seconds is not None and time.monotonic() - began > self.max_seconds:
                    logger.info("GRPO stops after %.0f s, as it was asked to.", self.max_seconds)
                    break
                while len(ahead) <= self.max_staleness:
                    ahead.append(await self._send(curriculum, self.tasks_per_step))
                await self._step(ahead.popleft(), curriculum)
                if val_dataset is not None and self.validate_every and progress.step % self.validate_every == 0:
                    await self._validate_now(val_dataset)
                if progress.step % self.save_every == 0:
                    progress.save(self.policies, curriculum)
            if val_dataset is not None:
                self.result = await self._validate_now(val_dataset)
        except TrainingError:
            raise  # the last checkpoint is a good one; this state is not
        except BaseException:
            progress.save(self.policies, curriculum)
            raise
        progress.save(self.policies, curriculum)
        if self.output is not None:
            for policy in self.policies:
                policy.export(self.output if len(self.policies) == 1 else self.output / policy.name)

    async def _send(self, curriculum: Curriculum, tasks: int) -> Sent:
        assert self._collector is not None
        return await self._collector.send(
            curriculum.take(tasks),
            copies=self.group_size,
            resources_id=self._resources["train"],
            metadata={"step": self.progress.step},
        )

    async def _step(self, sent: Sent, curriculum: Curriculum) -> None:
        """Wait for a step's rollouts and learn from them; what there is nothing to learn from is told, and no error."""
        assert self._collector is not None
        began = time.perf_counter()
        finished = await self._collector.finished(sent)
        finished += await self._more(finished, curriculum)
        metrics: dict[str, float] = {"seconds/rollouts": time.perf_counter() - began}
        learned = False
        for policy in self.policies:
            batch = await self._batch(finished, policy)
            prefix = "" if len(self.policies) == 1 else f"{policy.name}/"
            figures = batch.report.metrics()
            if batch.samples:
                figures |= await policy.update(batch.samples)
                learned = True
            else:
                logger.warning("Step %d taught %s nothing: %s", self.progress.step, policy.name, batch.report.words())
            metrics |= {prefix + name: value for name, value in figures.items()}
        self.progress.note(finished, metrics, learned=learned)
        if self.progress.empty_steps >= MOST_EMPTY_STEPS:
            raise TrainingError(
                f"{MOST_EMPTY_STEPS} steps in a row gave nothing to learn from, the last one because: "
                f"{batch.report.words()}"
            )
        await self._report(metrics)

    async def _more(self, finished: Sequence[FinishedRollout], curriculum: Curriculum) -> list[FinishedRollout]:
        """With dynamic sampling: further tasks, while too few groups have rewards that differ."""
        more: list[FinishedRollout] = []
        assert self._collector is not None
        for _ in range(MOST_REFILLS if self.dynamic_sampling else 0):
            missing = self.tasks_per_step - _groups_that_differ([*finished, *more])
            if missing <= 0:
                break
            more += await self._collector.finished(await self._send(curriculum, missing))
        return more

    async def _batch(self, finished: Sequence[FinishedRollout], policy: Policy) -> Batch:
        model = policy.name if len(self.policies) > 1 else None
        outcomes = await outcomes_of(finished, self._adapter_of_calls, model=model)
        return batch_of(
            outcomes, self.sampling, current_version=policy.version, end_ids=policy.model.end_ids
        )

    # ------------------------------------------------------------------ validation

    async def validate(self, dataset: Dataset[Any]) -> Estimate:
        """The mean reward on a data set, with an interval; a rollout that failed counts as zero here."""
        assert self._collector is not None
        size = min(len(dataset), self.validation_tasks or len(dataset))
        tasks = [dataset[number] for number in range(size)]
        sent = await self._collector.send(tasks, mode="val", resources_id=self._resources["val"])
        finished = await self._collector.finished(sent)
        self.examples.append(finished[:MOST_EXAMPLES])
        return estimate([one.reward or 0.0 for one in finished])

    async def _validate_now(self, dataset: Dataset[Any]) -> Estimate:
        found = await self.validate(dataset)
        self.progress.note_validation(found)
        logger.info("Step %d: validation reward %s", self.progress.step, found)
        await self._report(
            {"validation/reward": found.mean, "validation/low": found.low, "validation/high": found.high}
        )
        return found

    async def _report(self, metrics: Mapping[str, float]) -> None:
        run_id = self.get_run_id()
        if run_id is not None:
            finite = {name: value for name, value in metrics.items() if value == value and abs(value) != float("inf")}
            await self.get_store().add_metrics(run_id, self.progress.step, finite)


def _groups_that_differ(finished: Sequence[FinishedRollout]) -> int:
    rewards: dict[str, set[float]] = {}
    for one in finished:
        if one.reward is not None and one.has_succeeded:
            rewards.setdefault(one.group, set()).add(one.reward)
    return sum(1 for found in rewards.values() if len(found) > 1)
