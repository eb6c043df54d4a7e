"""GRPO: a model learns from the rewards of groups of rollouts that tried the same task.

Each step sends every task of a batch to the agents several times, waits, and compares the rewards within each group:
what did better than the others of its group becomes likelier. The agents' calls go through the LLM proxy to an engine
with the current weights; what they sampled comes back as trajectories from the store.

A step counts when all policies have learned from it, and not before: a run that is stopped in the middle of one, or
killed, goes on from a checkpoint with the tasks of that step.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from agentlightning.adapter import TraceToTrajectory
from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.batches import (
    Batches,
    FinishedRollout,
    groups_that_differ,
    retried_config,
    rewards_of_tasks,
    score_of,
)
from agentlightning.algorithm.comparison import Estimate, FailedReward, measured_summary
from agentlightning.algorithm.fast import DEV_RESOURCES_ID
from agentlightning.algorithm.grpo.advantages import AdvantageFunction, AdvantageKind
from agentlightning.algorithm.grpo.checkpoints import digest_of
from agentlightning.algorithm.grpo.policy import (
    Policy,
    ServedPolicies,
    sources_by_name,
    training_sampling,
    undisturbed,
)
from agentlightning.algorithm.grpo.progress import (
    TrainingProgress,
    check_token_ids,
    close_runs,
    continue_curve,
    folders_of,
    reward_means,
    weighted_rewards,
    with_returns,
    with_trajectories,
)
from agentlightning.algorithm.grpo.samples import Batch, batch_of
from agentlightning.algorithm.grpo.settings import (
    LearnerSettings,
    LossFunction,
    LossName,
    SampleSettings,
    check_options,
)
from agentlightning.algorithm.grpo.step_rollouts import StepRollouts
from agentlightning.algorithm.grpo.tasks import Curriculum, TaskSampler
from agentlightning.algorithm.sentinel import Sentinel
from agentlightning.algorithm.utils import report_metrics
from agentlightning.engine.base import EngineChoice
from agentlightning.engine.checkpoint import check_replaceable
from agentlightning.engine.embedded import EMBEDDED, engine_choice
from agentlightning.engine.model import LoraOptions
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.types import Dataset, NamedResources
from agentlightning.types.agents import AgentMatcher
from agentlightning.utils.id import generate_id
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.spelling import suggests_arguments

logger = logging.getLogger(__name__)

StepListener = Callable[[int, Mapping[str, float]], object]
MOST_EMPTY_STEPS: Final = 20
"""After so many steps in a row without anything to learn from, a run ends: it is solved, or else given up."""


@suggests_arguments
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
        temperature: At which answers are sampled for training, whatever agents ask for; their seed, top_p and top_k
            are not heeded there either.
        validation_temperature: At which they are sampled for validation; 0 takes the likeliest token each time. If it
            is another one than that of training, before and after are measured as in training too.
        validate_every: Steps between validations; 0 validates before and after only.
        validation_tasks: How many tasks of the validation set are used; None takes all.
        validation_failed: What a rollout of validation that failed counts: "worst" is 0, or the smallest reward of the
            same validation if that is negative; "skip" leaves it out; a number is its reward. For training,
            `SampleSettings` has the same choice.
        learning: How the model learns; see `LearnerSettings`, which has presets: `LearnerSettings.dapo()`.
        sampling: Which rollouts count, and how; see `SampleSettings`. None is what belongs to the preset of `learning`.
        loss: As `LearnerSettings.loss`, in whose place it counts: a name, or a function of your own.
        advantage: As `SampleSettings.advantage`, in whose place it counts: a name, or a function of your own.
        tasks: Which tasks come next; None goes through the data set for ever, shuffled anew each time. See
            `TaskSampler`, and `DifficultySampler`, which lets tasks rest that teach nothing.
        on_step: Is called after each step with its number and its metrics; what it returns is awaited if it can be,
            and what it raises ends the training.
        dynamic_sampling: Send more tasks until a step has as many groups with different rewards as it asks for. None
            does so with the preset `dapo`.
        max_staleness: 0 waits for each step's rollouts; n lets rollouts start that many updates ahead of their use.
        agent_match: Train only the calls of these agents.
        engine: What samples: "embedded"; "vllm", which is started for the training; the address of a vLLM that runs
            already; `VllmOptions`; or an engine of your own, see `engine.base.EngineChoice`.
        lora: Train adapters instead of the weights of a Hugging Face model.
        output: Folder in which the trained model is left at the end, as `agl serve` takes it; for several policies, one
            below it for each. A run that is cut short, by an error or by Ctrl-C, leaves the model that did best in
            validation, if a checkpoint has it, or else that of the last whole step.
        checkpoints: Folder for checkpoints; None makes none. Those of an earlier run go to `earlier-1` in it.
        save_every: Steps between checkpoints; the best by validation is saved and kept besides.
        resume: Go on from the last checkpoint in the folder, if there is one.
        rollout_timeout: Seconds that one attempt may take.
        device: "auto", "cpu" or "cuda".
        max_sequences: Answers that an engine samples together at most.
        seed: Of the order of tasks and of learning.
        sentinel: Watches a second reward, lengths, entropy and diversity, and raises alarms; see `Sentinel`.
    """

    reads_adapter = False
    baseline: Estimate | None = None
    """The mean reward on the validation set before training."""
    result: Estimate | None = None
    """The same after it."""
    sampled_baseline: Estimate | None = None
    """As `baseline`, with answers sampled as for training."""
    sampled_result: Estimate | None = None
    """As `result`, with answers sampled as for training."""
    _left_model: Path | None = None

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
        validation_failed: FailedReward = "worst",
        learning: LearnerSettings | None = None,
        sampling: SampleSettings | None = None,
        loss: LossName | LossFunction | None = None,
        advantage: AdvantageKind | AdvantageFunction | None = None,
        tasks: TaskSampler | None = None,
        on_step: StepListener | None = None,
        dynamic_sampling: bool | None = None,
        max_staleness: int = 0,
        agent_match: str | AgentMatcher | None = None,
        engine: str | EngineChoice = EMBEDDED,
        lora: LoraOptions | None = None,
        output: str | Path | None = None,
        checkpoints: str | Path | None = None,
        save_every: int = 10,
        resume: bool = False,
        rollout_timeout: float = 600.0,
        device: str = "auto",
        max_sequences: int = 64,
        seed: int = 0,
        sentinel: Sentinel | None = None,
    ) -> None:
        self.model, self.device, self.lora, self.max_sequences = model, device, lora, max_sequences
        self.engine, choice = engine, engine_choice(engine)
        self.group_size, self.tasks_per_step, self.steps = group_size, tasks_per_step, steps
        self.target_reward, self.max_seconds = target_reward, max_seconds
        self.temperature, self.validation_temperature = temperature, validation_temperature
        self.validate_every, self.validation_tasks = validate_every, validation_tasks
        self.validation_failed: FailedReward = validation_failed
        learning = learning or LearnerSettings()
        learning = learning.planned(max(1, steps) * learning.epochs * learning.minibatches, seed, loss)
        self.learning = learning.for_engine(is_embedded=choice is None)
        sampling = sampling or SampleSettings.of(learning.preset)
        self.sampling = sampling.planned(temperature, max_staleness, advantage)
        self.loss, self.advantage, self.tasks = self.learning.loss, self.sampling.advantage, tasks
        self.dynamic_sampling = learning.preset == "dapo" if dynamic_sampling is None else dynamic_sampling
        self.max_staleness, self.agent_match, self.on_step = max_staleness, agent_match, on_step
        self.output = None if output is None else Path(output)
        self.checkpoints = None if checkpoints is None else Path(checkpoints)
        self.save_every, self.rollout_timeout = save_every, rollout_timeout
        self._resume, self.seed, self.sentinel = resume, seed, sentinel
        check_options(self, choice, resume=resume)
        options: dict[str, Any] = {"engine": choice, "device": device, "max_sequences": max_sequences, "lora": lora}
        self.policies = [Policy(name, path, self.learning, **options) for name, path in sources_by_name(model).items()]
        for folder in folders_of(self.output, self.policies):
            check_replaceable(folder)
        self._begin()

    def _begin(self) -> None:
        """Nothing of an earlier run is left."""
        self.baseline = self.result = self.sampled_baseline = self.sampled_result = self._left_model = None
        self._validated: dict[str, list[float | None]] = {}
        """The rewards by task of the latest validation, by the mode of its resources."""
        if self.sentinel is not None:
            self.sentinel.begin()
        self.examples: list[list[FinishedRollout]] = []
        """The first rollouts of each validation, in the order of its tasks."""
        self.progress = TrainingProgress(self.checkpoints)
        owner = generate_id(12) if self.checkpoints is None else digest_of(self.checkpoints)
        self._resources = {mode: f"grpo-{owner}-{mode}" for mode in ("train", "val")}
        """Ids of what rollouts run with; those of a run that goes on are the same."""
        self._batches: Batches | None = None
        self._rollouts: StepRollouts | None = None
        self._served = ServedPolicies(self.policies, {})
        self._adapter_of_calls = TraceToTrajectory(agent_match=self.agent_match)

    # ------------------------------------------------------------------ the run

    async def before_runners(self) -> None:
        """Withdraw what a run with the same checkpoints left in the queue when it was killed, and close that run."""
        if self.checkpoints is not None:
            left = await Batches(self.get_store()).withdraw_left(self._resources.values())
            run_ids = {(rollout.metadata or {}).get("run_id") for rollout in left}
            await close_runs(self.get_store(), run_ids, successor=self.get_run_id())

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Train; Ctrl-C leaves a checkpoint behind, if there is a folder for it."""
        if train_dataset is None:
            raise ConfigurationError("GRPO needs tasks to train on; give the Trainer a train_dataset.")
        self._begin()
        curriculum = Curriculum(train_dataset, self.seed, self.tasks)
        self._batches = Batches(self.get_store(), retried_config(self.rollout_timeout), run_id=self.get_run_id())
        self._rollouts = StepRollouts(
            self._batches, curriculum, copies=self.group_size, resources_id=self._resources["train"], check=self._check
        )
        self.progress.run_id = self.get_run_id()
        async with AsyncExitStack() as stack:
            overrides = {
                self._resources["train"]: training_sampling(self.temperature),
                self._resources["val"]: {"temperature": self.validation_temperature},
            }
            self._served = served = ServedPolicies(self.policies, overrides)
            await served.serve(stack, self.get_llm_proxy(), self.get_store(), is_training=True)
            for resources_id, sampling in overrides.items():
                models = served.resources(self.get_initial_resources(), sampling["temperature"])
                await self.get_store().update_resources(resources_id, models)
            is_restored = self._resume and await asyncio.to_thread(self.progress.restore, self.policies, curriculum)
            resumed, own = self.progress.resumed_run_id, self.get_run_id()
            if resumed is not None and own is not None:
                await close_runs(self.get_store(), {resumed}, successor=own)
                await continue_curve(self.get_store(), resumed, self.progress.step, successor=own)
            await served.publish_first(is_restored=is_restored)
            await self._prepare()
            if val_dataset is not None and self.progress.baseline is None:
                # As every validation measures it, and as training samples if that differs.
                self.progress.baseline = await self.validate(val_dataset)
                self.progress.baseline_rewards = self._validated["val"]
                if self.validation_temperature != self.temperature:
                    self.progress.sampled_baseline = await self.validate(val_dataset, as_training=True)
                    self.progress.sampled_baseline_rewards = self._validated["train"]
            self.baseline, self.sampled_baseline = self.progress.baseline, self.progress.sampled_baseline
            try:
                await self._make_steps(self._rollouts, val_dataset)
                await self._save()
                await self._export()
            except BaseException:
                await undisturbed(self._keep_best())
                raise

    async def _prepare(self) -> None:
        """What a kind of GRPO needs when its models are loaded, and before the first rollout."""

    @asynccontextmanager
    async def dev_resources(self) -> AsyncIterator[NamedResources]:
        """The models as they are before training, sampled as for training; their engines run meanwhile."""
        async with AsyncExitStack() as stack:
            served = ServedPolicies(self.policies, {DEV_RESOURCES_ID: training_sampling(self.temperature)})
            await served.serve(stack, self.get_llm_proxy(), self.get_store(), is_training=False)
            yield served.resources(self.get_initial_resources(), self.temperature)

    async def _make_steps(self, rollouts: StepRollouts, val_dataset: Dataset[Any] | None) -> None:
        """All steps, and the validation after the last."""
        progress, began = self.progress, time.monotonic()
        while not self._is_over(time.monotonic() - began):
            await self._send_ahead(rollouts)
            await self._step(rollouts)
            if val_dataset is not None and self.validate_every and progress.step % self.validate_every == 0:
                await self._validate_now(val_dataset)
            if progress.is_due(self.save_every):
                await self._save()
        await rollouts.withdraw()
        if val_dataset is not None and progress.validated_step != progress.step:
            await self._validate_now(val_dataset)
        if val_dataset is not None and progress.sampled_baseline is not None:
            self.sampled_result = await self.validate(val_dataset, as_training=True)

    def _is_over(self, seconds: float) -> bool:
        if self.max_seconds is not None and seconds > self.max_seconds:
            logger.info("GRPO stops after %.0f s, the limit of max_seconds.", seconds)
            return True
        if self.progress.empty_steps >= MOST_EMPTY_STEPS and self.progress.is_solved():
            logger.info(
                "Nothing is left to learn: in the last %d steps every reward was %g, the highest that was seen.",
                self.progress.empty_steps,
                self.progress.seen_rewards[-1],
            )
            return True
        if self.sentinel is not None and self.sentinel.stop and self.sentinel.alarms:
            logger.warning("GRPO stops at the alarm '%s'.", self.sentinel.alarms[0].name)
            return True
        return self.progress.step >= self.steps or self.progress.is_target_reached(self.target_reward)

    async def _keep_best(self) -> None:
        """A run that is cut short leaves a checkpoint and its best model; whatever fails here, its own error counts."""
        for keep in (self._save, self._withdraw, self._export_best):
            with log_failures(logger, "Something of the run that was cut short could not be kept."):
                await keep()

    async def _export_best(self) -> None:
        if self.output is None:
            return
        is_trained = any(policy.version > 0 for policy in self.policies)
        if is_trained and await asyncio.to_thread(self.progress.restore_best, self.policies):
            await self._export()
            return
        logger.warning("No model is written to '%s', because %s.", self.output, self.progress.why_no_model())

    async def _export(self) -> None:
        """Leave every policy's model in `output`, whole or not at all; an earlier one stays if nothing was learned."""
        for policy, folder in zip(self.policies, folders_of(self.output, self.policies), strict=False):
            if policy.version == 0 and folder.is_dir() and any(folder.iterdir()):
                logger.warning("The earlier model stays in '%s', because this run has learned nothing.", folder)
                continue
            await undisturbed(asyncio.to_thread(policy.export, folder))
            self._left_model = self.output
            logger.info("The model '%s' after %d updates is in '%s'.", policy.name, policy.version, folder)

    def resume_hint(self) -> str:
        return self.progress.resume_hint(self._left_model if len(self.policies) == 1 else None)

    async def _save(self) -> None:
        if self._rollouts is not None:
            await undisturbed(asyncio.to_thread(self.progress.save, self.policies, self._rollouts.curriculum.state()))

    async def _withdraw(self) -> None:
        if self._rollouts is not None:
            await self._rollouts.withdraw()

    async def _send_ahead(self, rollouts: StepRollouts) -> None:
        """As many steps as may be under way at once, and no more than are left."""
        ahead = min(self.max_staleness, self.steps - self.progress.step - 1)
        while (sent := rollouts.under_way // self.tasks_per_step) <= ahead:
            await rollouts.send(self.tasks_per_step, self.progress.step + sent)

    async def _step(self, rollouts: StepRollouts) -> None:
        """Wait for a step's rollouts and learn from them; what there is nothing to learn from is told, and no error."""
        assert self._batches is not None
        began = time.perf_counter()
        finished = await self._judged(await rollouts.take(self.tasks_per_step))
        more = await self._more(finished, rollouts)
        replaced, finished = len({one.group for one in more}), [*finished, *more]
        metrics: dict[str, float] = {"seconds/rollouts": time.perf_counter() - began}
        metrics |= reward_means(finished, self.sampling.reward_weights or ())
        batches = [await self._batch(finished, policy, replaced) for policy in self.policies]
        await undisturbed(self._learn(rollouts, finished, batches, metrics))
        taught = list(zip(self.policies, batches, strict=True))
        for policy, batch in taught:
            await self._batches.record_uses(finished, batch.uses, policy.name)
        if self.sentinel is not None:
            metrics |= self.sentinel.figures(finished)
            for alarm in self.sentinel.look(metrics):
                logger.warning("Step %d: %s", self.progress.step, alarm)
        await report_metrics(self, self.progress.step, metrics)
        if self.on_step is not None and inspect.isawaitable(awaitable := self.on_step(self.progress.step, metrics)):
            await awaitable
        if self.progress.empty_steps >= MOST_EMPTY_STEPS and not self.progress.is_solved():
            why = "; ".join(f"{one.name}: {batch.report.words()}" for one, batch in taught)
            raise TrainingError(
                f"{MOST_EMPTY_STEPS} steps in a row gave nothing to learn from, the last one because: {why}"
            )

    async def _learn(
        self,
        rollouts: StepRollouts,
        finished: Sequence[FinishedRollout],
        batches: Sequence[Batch],
        metrics: dict[str, float],
    ) -> None:
        """All policies learn, and then the step counts; where one fails, no state of this moment is good."""
        figures = [batch.report.metrics() for batch in batches]
        taught = list(zip(self.policies, batches, figures, strict=True))
        self.progress.is_whole = False
        async with self._served.learning():
            for policy, batch, own in taught:
                if batch.samples:
                    own.update(await policy.update(batch))
        for policy, batch, _ in taught:
            if not batch.samples:
                # One step without a difference is nothing to act on; three in a row are, or any of several models.
                is_notable = len(self.policies) > 1 or self.progress.empty_steps + 1 >= 3
                level = logging.WARNING if is_notable else logging.INFO
                words = batch.report.words()
                logger.log(level, "Step %d taught %s nothing: %s", self.progress.step, policy.name, words)
        rollouts.learned(finished)
        learned = any(batch.samples for batch in batches)
        self.progress.note(finished, metrics, learned=learned, failed=self.sampling.failed)
        self.progress.is_whole = True
        for policy, batch, own in taught:
            if batch.samples:
                own.update(await self._served.publish(policy))
            prefix = "" if len(self.policies) == 1 else f"{policy.name}/"
            metrics |= {prefix + name: value for name, value in own.items()}

    async def _judged(self, finished: list[FinishedRollout]) -> list[FinishedRollout]:
        """Rollouts with the reward that is learned."""
        if self.sampling.credit == "turn":
            return await with_returns(finished, self._adapter_of_calls, self.sampling.discount)
        weights = self.sampling.reward_weights
        return finished if weights is None else weighted_rewards(finished, weights)

    async def _more(self, finished: Sequence[FinishedRollout], rollouts: StepRollouts) -> list[FinishedRollout]:
        """With dynamic sampling: further tasks, while too few groups have rewards that differ."""
        more: list[FinishedRollout] = []
        for _ in range(3 if self.dynamic_sampling else 0):
            missing = self.tasks_per_step - groups_that_differ([*finished, *more], self.sampling.failed)
            if missing <= 0:
                break
            await rollouts.send(missing, self.progress.step)
            more += await self._judged(await rollouts.take(missing))
        return more

    def _check(self) -> None:
        for policy in self.policies:
            policy.check()

    async def _batch(self, finished: Sequence[FinishedRollout], policy: Policy, replaced_groups: int) -> Batch:
        model = policy.name if len(self.policies) > 1 else None
        counts_failed = self.sampling.failed != "skip"
        outcomes = await with_trajectories(finished, self._adapter_of_calls, model=model, with_failed=counts_failed)
        if policy.version == 0:  # later steps have had token ids already
            check_token_ids(finished, outcomes)
        return batch_of(
            outcomes,
            self.sampling,
            current_version=policy.version,
            model=policy.model,
            replaced_groups=replaced_groups,
            seen_rewards=self.progress.seen_rewards,
        )

    async def validate(self, dataset: Dataset[Any], *, as_training: bool = False) -> Estimate:
        """The mean reward on a data set, with an interval; TrainingError if all rollouts failed.

        Args:
            as_training: Sample answers as for training, not as for validation.
        """
        assert self._batches is not None
        assert self._rollouts is not None
        size = min(len(dataset), self.validation_tasks or len(dataset))
        tasks = [dataset[number] for number in range(size)]
        mode, prefix = ("train", "validation/sampled_") if as_training else ("val", "validation/")
        after = {"step": self.progress.step - 1}  # steps count from 0, so those before the first have -1
        sent = await self._batches.send(tasks, mode="val", resources_id=self._resources[mode], metadata=after)
        finished = await self._judged(await self._rollouts.gather(sent))
        if not as_training:
            self.examples.append(finished[:8])
        self.progress.note_rewards([one.own_reward for one in finished if one.own_reward is not None])
        score = score_of(finished, self.validation_failed)
        self._validated[mode] = rewards_of_tasks(finished, self.validation_failed)
        await report_metrics(self, self.progress.step, score.metrics(prefix))
        return score.reward

    def run_summary(self) -> dict[str, Any]:
        progress, validated = self.progress, self._validated
        alpha = 0.05 if self.sampled_result is None else 0.025  # of each, so that both are true in 95 of 100 trainings
        own = (self.baseline, self.result, progress.baseline_rewards, validated.get("val"))
        others = (self.sampled_baseline, self.sampled_result, progress.sampled_baseline_rewards, validated.get("train"))
        sampled = {f"{name}_sampled": one for name, one in measured_summary(*others, alpha).items()}
        summary = {**measured_summary(*own, alpha), **sampled}
        if self.sampling.credit == "turn":
            summary["reward_kind"] = f"return of the turns of a rollout, discount {self.sampling.discount:g}"
        if self.sentinel is not None and self.sentinel.alarms:
            summary["alarms"] = [asdict(alarm) for alarm in self.sentinel.alarms]
        return summary

    async def _validate_now(self, dataset: Dataset[Any]) -> None:
        self.result = await self.validate(dataset)
        self.progress.note_validation(self.result)
        logger.info("Step %d: validation reward %s", self.progress.step, self.result)
