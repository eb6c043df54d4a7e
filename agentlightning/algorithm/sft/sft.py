"""SFT: a model is fine-tuned on the rollouts that went well, whoever made them.

They are either in the store already, or agents make them now: every task is tried several times with the model as it
is, and the best tries are kept (rejection sampling). What the model chose in them becomes likelier; what it was given
is context. The proxy and an engine run only where agents need the model: to sample, to validate, or to be served.

A model is fitted in epochs, with the loss on what is held out, an early end, and checkpoints. The order of an epoch
follows from the seed and its number, and the learner's state is in every checkpoint, so a run that is resumed makes the
steps it would have made. An epoch that was interrupted is made again from its beginning.
"""

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch import Tensor

from agentlightning.adapter import TraceToTrajectory
from agentlightning.algorithm.base import Algorithm, Tasks
from agentlightning.algorithm.batches import Batches, retried_config, rewards_of_tasks, score_of
from agentlightning.algorithm.comparison import Estimate, measured_summary
from agentlightning.algorithm.fast import DEV_RESOURCES_ID
from agentlightning.algorithm.grpo.checkpoints import Checkpoint, Checkpoints, adapters_of
from agentlightning.algorithm.grpo.learner import Learner
from agentlightning.algorithm.grpo.packing import Row
from agentlightning.algorithm.grpo.policy import ADAPTERS, Policy, ServedPolicies, sources_by_name, training_sampling
from agentlightning.algorithm.grpo.progress import check_token_ids, with_trajectories
from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.sft.examples import (
    Acceptance,
    Examples,
    FittingSettings,
    RecordedRollouts,
    Split,
    examples_of,
    find,
    split,
    task_key,
)
from agentlightning.algorithm.utils import report_metrics
from agentlightning.engine.checkpoint import check_replaceable
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.types import NamedResources
from agentlightning.types.agents import AgentMatcher
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.log_failures import announce
from agentlightning.utils.spelling import suggests_arguments

if TYPE_CHECKING:
    from agentlightning.engine.model import CausalModel, LoraOptions

logger = logging.getLogger(__name__)


def sft_loss(learner: Learner, samples: Sequence[Sample]) -> float:
    """The mean cross-entropy of the tokens that were chosen in the samples, in nats; no weight is changed."""
    found = [logprobs for _, logprobs in learner.evaluated([Row.of(sample, learner.model) for sample in samples])]
    return -float(torch.cat(found).mean(dtype=torch.float64))


@dataclass
class Fitting:
    """One model on its way. Where something is held out, `finish` leaves the weights of the best epoch."""

    learner: Learner
    """With the objective "likelihood", one minibatch and one epoch."""
    examples: Split
    settings: FittingSettings
    _: KW_ONLY
    checkpoints: Checkpoints | None = None
    """Where each epoch is saved; None saves nothing."""
    progress: JsonObject = field(default_factory=dict)
    """Kept in each checkpoint for the caller."""
    epoch: int = 0
    """Epochs made."""
    best_loss: float | None = None
    """The lowest held-out loss so far, that before the first epoch included."""
    _stale_epochs: int = 0
    _best: dict[str, Tensor] | None = None
    """The trained weights of the best epoch: adapters as such, for merged into 16 bits they would be lost."""

    def __post_init__(self) -> None:
        steps = self.settings.epochs * -(-len(self.examples.train) // self.settings.batch_size)
        self.learner.settings = self.learner.settings.planned(steps, self.settings.seed or 0)

    @property
    def is_over(self) -> bool:
        patience = self.settings.patience
        return self.epoch >= self.settings.epochs or (patience is not None and self._stale_epochs >= patience)

    def resume(self, latest: Checkpoint, best: Checkpoint | None) -> None:
        """Go on after an epoch that was saved; the model has the weights with which the run began."""
        began = self._trained()
        self.learner.load_state(latest.learner_state())
        self._take(_trained_in(latest))
        saved = latest.progress
        self.epoch, self.best_loss, self._stale_epochs = saved["epoch"], saved["best_loss"], saved["stale_epochs"]
        if self.best_loss is not None:  # without a checkpoint that is best, no epoch was better than none
            self._best = began if best is None else _trained_in(best)

    def run_epoch(self, is_cancelled: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Go through the examples once; the metrics. Cancelled, it ends early and counts as not made."""
        order = list(self.examples.train)
        random.Random(f"{self.settings.seed or 0}/{self.epoch}").shuffle(order)
        loss = tokens = 0.0
        size = self.settings.batch_size
        for start in range(0, len(order), size):
            if is_cancelled():
                return {}
            figures = self.learner.update(order[start : start + size])
            loss += figures["learner/loss"] * figures["learner/tokens"]
            tokens += figures["learner/tokens"]
        self.epoch += 1
        metrics = {"sft/loss": loss / tokens, "sft/tokens": tokens, "sft/epoch": float(self.epoch)}
        metrics |= {"sft/grad_norm": figures["learner/grad_norm"]} | self.judge()
        logger.info("Epoch %d: %s", self.epoch, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        return metrics

    def finish(self) -> None:
        """Leave the best weights in the model."""
        if self._best is not None:
            self._take(self._best)

    def _trained(self) -> dict[str, Tensor]:
        """A copy of the trained weights, on the CPU."""
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self.learner.model.trainable().items()}

    def _take(self, trained: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.learner.model.trainable().items():
                weight.copy_(trained[name])

    def judge(self) -> dict[str, float]:
        """Take the held-out loss of the model as it is, and keep its weights if that is the lowest; the metrics."""
        is_best = False
        metrics: dict[str, float] = {}
        if self.examples.held_out:
            found = sft_loss(self.learner, self.examples.held_out)
            metrics["sft/held_out_loss"] = found
            is_best = self.best_loss is None or found < self.best_loss
            self._stale_epochs = 0 if is_best else self._stale_epochs + 1
        if is_best:
            self.best_loss = found
            self._best = self._trained()
        if self.checkpoints is not None and self.epoch:
            self._save(self.checkpoints, is_best=is_best)
        return metrics

    def _save(self, checkpoints: Checkpoints, *, is_best: bool) -> None:
        if self.epoch == 1:  # a run that goes on is beyond it
            checkpoints.set_aside()
        checkpoints.save(
            self.epoch,
            model_state=self.learner.model.state(),
            learner_state={**self.learner.state(), ADAPTERS: adapters_of(self.learner.model)},
            progress={
                **self.progress,
                "epoch": self.epoch,
                "best_loss": self.best_loss,
                "stale_epochs": self._stale_epochs,
            },
            is_best=is_best,
        )


def _trained_in(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return checkpoint.learner_state()[ADAPTERS] or checkpoint.model_state()


# ---------------------------------------------------------------------- SFT


_T = TypeVar("_T")

_TRAIN: Final = "sft-train"
"""The resources with which rollouts are made to learn from."""


@suggests_arguments
class SFT(Algorithm):
    """Fine-tunes a model on rollouts.

    Args:
        model: What to train: "tiny", the model that comes with the package, or the folder of a Hugging Face model.
        recorded: Which rollouts of the store to learn from; by default all that succeeded, but for those of validation
            and test. Their tokens must be those of this model.
        best_of: Have agents try each training task so many times now, and learn from that instead.
        acceptance: Which of the rollouts are good enough; by default all recorded ones, and the best one of each task
            that was sampled, less sequences with an answer that was cut off.
        fitting: Epochs, batches, early end; see `FittingSettings`.
        learning: How the model learns; see `LearnerSettings`. Its objective, epochs and minibatches are set by this
            algorithm.
        held_out: Share of the tasks whose rollouts are not learned from; after each epoch the loss on them is taken,
            and the weights with the lowest one are those that remain.
        agent_match: Learn only the calls of these agents.
        temperature: At which answers are sampled with `best_of`.
        validation_temperature: At which agents sample for validation; 0 takes the likeliest token each time.
        checkpoints: Folder for a checkpoint after each epoch; None makes none. Those of an earlier run go to
            `earlier-1` in it.
        output: Folder in which the trained model is left, also after a stop, as `agl serve` takes it; None leaves none.
        resume: Go on from the last checkpoint in the folder, if there is one, with the same rollouts.
        publish: Serve the trained model at the end, as the resource "main_llm", until `close`.
        rollout_timeout: Seconds that one attempt may take.
        device: "auto", "cpu" or "cuda".
        lora: Train adapters of a Hugging Face model instead of its weights.
        seed: Of what is held out, and of the order.
    """

    reads_adapter = False
    _validated: Sequence[list[float | None]] = ()
    """The rewards of each validation of this run, by task."""

    def __init__(
        self,
        model: str = "tiny",
        *,
        recorded: RecordedRollouts | None = None,
        best_of: int | None = None,
        acceptance: Acceptance | None = None,
        fitting: FittingSettings | None = None,
        learning: LearnerSettings | None = None,
        held_out: float = 0.1,
        agent_match: str | AgentMatcher | None = None,
        temperature: float = 1.0,
        validation_temperature: float = 0.0,
        checkpoints: str | Path | None = None,
        output: str | Path | None = None,
        resume: bool = False,
        publish: bool = False,
        rollout_timeout: float = 600.0,
        device: str = "auto",
        lora: "LoraOptions | None" = None,
        max_sequences: int = 64,
        seed: int = 0,
    ) -> None:
        if best_of is not None and (best_of < 1 or recorded is not None):
            raise ConfigurationError("best_of must be at least 1, and cannot be given together with recorded.")
        if not 0 <= held_out < 1:
            raise ConfigurationError(f"held_out is {held_out}; it is a share of the tasks, from 0 to below 1.")
        if resume and checkpoints is None:
            raise ConfigurationError("To resume, name the folder of the checkpoints.")
        self.output = None if output is None else Path(output)
        if self.output is not None:
            check_replaceable(self.output)
        self.recorded, self.best_of = recorded or RecordedRollouts(), best_of
        self.acceptance = acceptance or Acceptance(keep_per_task=None if best_of is None else 1)
        self.fitting = (fitting or FittingSettings()).planned(seed)
        self.learning = replace(learning or LearnerSettings(), objective="likelihood", epochs=1, minibatches=1)
        if self.learning.processes > 1:
            raise ConfigurationError(f"processes is {self.learning.processes}; SFT trains in 1, and GRPO in several.")
        self.held_out, self.temperature, self.validation_temperature = held_out, temperature, validation_temperature
        self._resume, self.publish, self.seed = resume, publish, seed
        self.examples: Examples | None = None
        """What was learned from, and what was not."""
        self.epochs_made = 0
        self.best_loss: float | None = None
        """The held-out loss of the weights that remain, in nats per token."""
        self.baseline: Estimate | None = None
        """The mean reward on the validation set before training."""
        self.result: Estimate | None = None
        """The same after it."""
        self.resources_id: str | None = None
        """Of the trained model, where it is published."""
        self._model, self._device, self._lora = model, device, lora
        # The run in the store keeps every argument, by its name or with an underscore in front.
        self._agent_match, self._rollout_timeout, self._max_sequences = agent_match, rollout_timeout, max_sequences
        (name,) = sources_by_name(model)
        self._policy = Policy(name, model, self.learning, device=device, max_sequences=max_sequences, lora=lora)
        self._served, self._serving = ServedPolicies([self._policy], {}), AsyncExitStack()  # which ends what that began
        self._checkpoints = None if checkpoints is None else Checkpoints(Path(checkpoints) / name)
        self._adapter_of_calls = TraceToTrajectory(agent_match=agent_match)
        self._learner: Learner | None = None

    @property
    def model(self) -> "CausalModel":
        """The model: after a run, the trained one."""
        if self._learner is None:
            raise TrainingError("SFT has no model before it is run.")
        return self._learner.model

    # ------------------------------------------------------------------ the run

    async def run(self, train_dataset: Tasks | None = None, val_dataset: Tasks | None = None) -> None:
        """Fine-tune; with a validation set, agents try it before and after."""
        if self.best_of is not None and (train_dataset is None or len(train_dataset) == 0):
            raise ConfigurationError("With best_of, SFT needs tasks to sample; give the Trainer a train_dataset.")
        self._validated, self.epochs_made = (), 0
        is_served = self.best_of is not None or self.publish or val_dataset is not None
        stays = False
        try:
            if is_served:
                await self._serve(_TRAIN, is_training=True)
            else:
                await asyncio.to_thread(self._policy.load)
                await asyncio.to_thread(self._policy.plan_memory)
            assert isinstance(self._policy.learner, Learner)
            self._learner = self._policy.learner
            if val_dataset is not None:
                self.baseline = await self._validate(val_dataset, step=0)
            await self._fit(train_dataset)
            if is_served:
                await self._served.publish(self._policy)
            if val_dataset is not None:
                self.result = await self._validate(val_dataset, step=self.epochs_made)
            if self.publish:
                self.resources_id = await self._resources("sft", None, is_lasting=True)
                stays = True
        finally:
            if not stays:
                await self.close()

    @asynccontextmanager
    async def dev_resources(self) -> AsyncIterator[NamedResources]:
        """The model as it is before training, sampled as for `best_of`; its engine runs meanwhile."""
        try:
            await self._serve(DEV_RESOURCES_ID, is_training=False)
            yield self._served.resources(self.get_initial_resources(), self.temperature)
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop serving the trained model; harmless if it is not served."""
        await self._serving.aclose()

    async def _serve(self, resources_id: str, *, is_training: bool) -> None:
        """Put the model behind a proxy; rollouts with these resources are sampled as for training."""
        self._served = ServedPolicies([self._policy], {resources_id: training_sampling(self.temperature)})
        await self._served.serve(self._serving, self.get_llm_proxy(), self.get_store(), is_training=is_training)

    async def _resources(self, name: str, temperature: float | None, *, is_lasting: bool = False) -> str:
        """Publish the model as a resource; its id."""
        resources = self._served.resources(self.get_initial_resources(), temperature, is_lasting=is_lasting)
        return (await self.get_store().update_resources(name, resources)).resources_id

    # ------------------------------------------------------------------ learning

    async def _fit(self, train_dataset: Tasks | None) -> None:
        assert self._learner is not None
        checkpoints = self._checkpoints
        latest = checkpoints.latest() if checkpoints is not None and self._resume else None
        self.examples = await self._collect(train_dataset, latest)
        if not self.examples.samples:
            recorded = "the store has no such rollouts; record some in it, or sample them now with SFT(best_of=8)."
            why = self.examples.words() if self.examples.rollouts else recorded
            raise TrainingError(f"There is nothing to learn from: {why}")
        logger.info("Fine-tuning on rollouts: %s", self.examples.words())
        fitting = Fitting(
            self._learner,
            split(self.examples.samples, self.held_out, self.seed),
            self.fitting,
            checkpoints=checkpoints,
            progress={"rollout_ids": self.examples.rollout_ids},
        )
        if latest is None or checkpoints is None:
            await report_metrics(self, 0, self.examples.metrics() | await _in_thread(fitting.judge))
        else:
            await _in_thread(lambda: fitting.resume(latest, checkpoints.best()))
        stopped = threading.Event()  # ends an epoch after the batch it is at
        try:
            while not fitting.is_over:
                metrics = await _in_thread(lambda: fitting.run_epoch(stopped.is_set), stopped)
                await report_metrics(self, fitting.epoch, metrics)
        except asyncio.CancelledError:
            if fitting.epoch:
                await self._keep(fitting)
            raise
        await self._keep(fitting)

    async def _keep(self, fitting: Fitting) -> None:
        """Leave the best weights in the model, and the model in `output`."""
        await _in_thread(fitting.finish)
        self.best_loss, self.epochs_made = fitting.best_loss, fitting.epoch
        self._policy.version += 1
        if (folder := self.output) is not None:
            await _in_thread(lambda: self._policy.export(folder))
            announce(logger, f"The model '{self._policy.name}' is in '{folder}'.")

    async def _collect(self, train_dataset: Tasks | None, latest: Checkpoint | None) -> Examples:
        """Rollouts to learn from: those of the checkpoint, those that agents make now, or those of the store."""
        batches = Batches(self.get_store(), retried_config(self._rollout_timeout), run_id=self.get_run_id())
        acceptance = self.acceptance
        if latest is not None:
            sent = await find(
                self.get_store(),
                RecordedRollouts(
                    rollout_ids=list(latest.progress["rollout_ids"]), modes=("train", "val", "test", None)
                ),
            )
            acceptance = Acceptance(skip_truncated=acceptance.skip_truncated)  # they were good enough then
        elif self.best_of is not None and train_dataset is not None:
            resources_id = await self._resources(_TRAIN, self.temperature)
            sent = await batches.send(train_dataset, copies=self.best_of, resources_id=resources_id)
        else:
            sent = await find(self.get_store(), self.recorded)
        finished = await batches.gather(sent) if sent.group_of else []
        by_task = [replace(one, group=task_key(one.rollout.input)) for one in finished]
        outcomes = await with_trajectories(by_task, self._adapter_of_calls, model=self.recorded.model)
        check_token_ids(by_task, outcomes)
        found = examples_of(outcomes, acceptance, max_length=self.model.max_length, vocab_size=self.model.vocab_size)
        if latest is None:  # else it is written down already
            await batches.record_uses(finished, found.uses(), self._policy.name)
        return found

    # ------------------------------------------------------------------ validation

    def run_summary(self) -> JsonObject:
        first, last = (self._validated[0], self._validated[-1]) if self._validated else (None, None)
        return measured_summary(self.baseline, self.result, first, last)

    def resume_hint(self) -> str:
        if self._checkpoints is None or not (saved := self._checkpoints.steps()):
            left = f"; the model after epoch {self.epochs_made} is in '{self.output}'" if self.output else ""
            return f"Stopped before an epoch was saved{left if self.epochs_made else ''}; the same script begins anew."
        way = f"SFT(resume=True, checkpoints={str(self._checkpoints.folder.parent)!r})"
        return f"Stopped; the same script with {way} goes on after epoch {saved[0]}, with the rollouts of its store."

    async def _validate(self, dataset: Tasks, *, step: int) -> Estimate:
        """The mean reward on a data set, with an interval; rollouts that failed count as the worst reward."""
        resources_id = await self._resources("sft-val", self.validation_temperature)
        batches = Batches(self.get_store(), retried_config(self._rollout_timeout), run_id=self.get_run_id())
        sent = await batches.send(dataset, mode="val", resources_id=resources_id, metadata={"step": step - 1})
        finished = await batches.gather(sent)
        score = score_of(finished)
        self._validated = [*self._validated, rewards_of_tasks(finished)]
        logger.info("Validation reward %s", score.reward)
        await report_metrics(self, step, score.metrics())
        return score.reward


async def _in_thread(work: Callable[[], _T], stopped: threading.Event | None = None) -> _T:
    """Work off the event loop. A thread cannot be cancelled, so its end is waited for: nothing computes afterwards."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if stopped is not None:
            stopped.set()
        await asyncio.wait([task])
        raise
