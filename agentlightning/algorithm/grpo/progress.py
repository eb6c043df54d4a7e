"""How far a run has come: its step, its curve, its best result, and what is left on disk.

And what finished rollouts give to learn from: trajectories of the calls of one model, or why there are none.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

from agentlightning.adapter import TraceToTrajectory
from agentlightning.adapter.call_attributes import requests_other_model, response_id_of
from agentlightning.adapter.trajectory import DropReason
from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.comparison import (
    Estimate,
    FailedReward,
    effect_of_failed,
    estimate,
    is_finite,
    reward_of_failed,
)
from agentlightning.algorithm.grpo.advantages import are_same
from agentlightning.algorithm.grpo.checkpoints import Checkpoint, Checkpoints
from agentlightning.algorithm.grpo.samples import first_return
from agentlightning.algorithm.grpo.tasks import Curriculum
from agentlightning.errors import TrainingError
from agentlightning.semconv import CALL_SPAN, PROXY, RAW_SPAN
from agentlightning.store.base import LightningStore
from agentlightning.types import Span
from agentlightning.types.rewards import named_rewards_of

if TYPE_CHECKING:
    from agentlightning.algorithm.grpo.policy import Policy

logger = logging.getLogger(__name__)


_WITHOUT_IDS: Final = (
    *(DropReason.NO_PROMPT_IDS, DropReason.NO_RESPONSE_IDS),
    *(DropReason.UNREADABLE_IDS, DropReason.EXCLUDED),
)


async def with_trajectories(
    finished: Sequence[FinishedRollout],
    adapter: TraceToTrajectory,
    *,
    model: str | None = None,
    with_failed: bool = False,
) -> list[FinishedRollout]:
    """The rollouts with what they give to learn from.

    Args:
        model: Of a trace with calls of several models, the one to look at.
        with_failed: Read the traces of rollouts that failed too.
    """
    adapter = replace(adapter, model=model)
    read: list[FinishedRollout] = []
    for number, one in enumerate(finished):
        if number % 8 == 0:
            await asyncio.sleep(0)  # others use this loop too
        if one.spans and (one.has_succeeded or with_failed):
            try:
                one = replace(one, trajectory=adapter.adapt(one.spans))  # the same, read
            except Exception as error:  # what an agent wrote is its own affair, and never ends the run of all
                logger.exception("The spans of rollout '%s' cannot be read.", one.rollout_id)
                one = replace(one, unreadable=f"{type(error).__name__}: {error}")
        read.append(one)
    return read


async def with_returns(
    finished: Sequence[FinishedRollout], adapter: TraceToTrajectory, discount: float
) -> list[FinishedRollout]:
    """The rollouts with the return of their first turn, which is what they count where turns are judged."""
    return [replace(one, turn_return=first_return(one, discount)) for one in await with_trajectories(finished, adapter)]


def weighted_rewards(finished: Sequence[FinishedRollout], weights: Mapping[str, float]) -> list[FinishedRollout]:
    """The rollouts with the sum of their named rewards, times the weights, as reward; none for one without any of them.

    TrainingError where a reward that has a weight is in none of the rollouts.
    """
    named = [named_rewards_of(one.spans) for one in finished]
    known = {name for rewards in named for name in rewards}
    missing = [name for name in weights if name not in known]
    if known and missing:
        raise TrainingError(
            f"No rollout emitted a reward with the name '{missing[0]}', which reward_weights has; they emitted "
            f"{', '.join(map(repr, sorted(known)))}."
        )
    return [
        replace(one, reward=_total([weights[name] * rewards[name] for name in own]) if own else None)
        for one, rewards in zip(finished, named, strict=True)
        for own in [weights.keys() & rewards.keys()]
    ]


def _total(values: Sequence[float]) -> float:
    """The sum, which is NaN where one of the values is not finite."""
    return fsum(values) if all(map(is_finite, values)) else math.nan


def reward_means(finished: Sequence[FinishedRollout], names: Iterable[str]) -> dict[str, float]:
    """The mean of each named reward, over the rollouts that emitted it as a finite number."""
    named = [named_rewards_of(one.spans) for one in finished]
    values = {name: [rewards[name] for rewards in named if is_finite(rewards.get(name, math.nan))] for name in names}
    return {f"reward/{name}": fmean(found) for name, found in values.items() if found}


def check_token_ids(finished: Sequence[FinishedRollout], outcomes: Sequence[FinishedRollout]) -> None:
    """Raise TrainingError if model calls were recorded and none of them brought token ids; its message says whose."""
    trajectories = [outcome.trajectory for outcome in outcomes if outcome.trajectory is not None]
    dropped = {
        (one.rollout_id, call.span_id) for one in trajectories for call in one.dropped if call.reason in _WITHOUT_IDS
    }
    if not dropped or any(one.sequences for one in trajectories):
        return
    spans = [span for one in finished for span in one.spans]
    proxied = {response_id_of(span.attributes): span for span in spans if span.name == CALL_SPAN}
    calls = [span for span in spans if (span.rollout_id, span.span_id) in dropped]
    sources = Counter(_source_of(proxied.get(response_id_of(call.attributes) or "", call)) for call in calls)
    listed = "; ".join(f"{count} {source}" for source, count in sources.most_common(3))
    raise TrainingError(
        f"None of the {len(dropped)} model calls brought the token ids that training needs ({listed}); serve the model "
        "with a backend that returns them, such as 'hosted_vllm/...' or 'agl/...' in the proxy's model list, call it "
        "with chat completions, and keep it out of redirect_exclude."
    )


def _source_of(span: Span) -> str:
    """The kind of a call and who answered it, as the proxy recorded it or else as the agent's tracer did."""
    attributes = span.attributes
    if span.name == CALL_SPAN:
        dialect, backend = (attributes.get(f"{PROXY}.{name}") for name in ("dialect", "backend"))
        return f"in the {dialect} dialect by backend '{backend}'"
    return f"'{span.name}' by '{attributes.get('server.address', 'an unknown server')}'"


def spans_of_model(spans: Iterable[Span], model: str) -> list[Span]:
    """A trace without the calls of other models, for adapters that have no `model`."""
    kept: list[Span] = []
    left_out: set[str] = set()
    for span in sorted(spans, key=lambda span: span.name == RAW_SPAN):  # those after the calls they belong to
        if requests_other_model(span.attributes, model) or (span.name == RAW_SPAN and span.parent_id in left_out):
            left_out.add(span.span_id)
        else:
            kept.append(span)
    return kept


# ---------------------------------------------------------------------- progress


RECENT_STEPS: Final = 5
"""Over so many steps the mean reward is taken that a target is compared with."""
MOST_FAILED: Final = 0.1
"""The largest share of failed rollouts that says nothing about the model."""
_KEPT: Final = ("step", "rewards", "rollouts", "best", "best_step", "baseline_rewards", "sampled_baseline_rewards")
_ESTIMATES: Final = ("baseline", "sampled_baseline")
"""What a checkpoint keeps as it is."""


async def close_runs(store: LightningStore, run_ids: Set[str | None], *, successor: str | None) -> None:
    """Runs that nobody ended are over: another one takes their place."""
    for run_id in run_ids - {None, successor}:
        run = await store.get_run_by_id(str(run_id))
        if run is not None and run.end_time is None:
            error = f"The process of this run ended without notice; run '{successor}' takes its place."
            await store.finish_run(run.run_id, "failed", summary={**run.summary, "error": error})


async def continue_curve(store: LightningStore, run_id: str, step: int, *, successor: str) -> None:
    """Give a run the figures of the one that it goes on with, up to the step that it goes on after."""
    if await store.get_run_by_id(run_id) is not None:  # the checkpoint may be of another store
        for point in await store.query_metrics(run_id):
            if point.step <= step:
                await store.add_metrics(successor, point.step, point.values, time=point.time)


class TrainingProgress:
    """The state of one run besides its weights."""

    def __init__(self, folder: Path | None = None) -> None:
        self.step = 0
        self.empty_steps = 0
        """Steps in a row that taught nothing."""
        self.rewards: list[float] = []
        """The mean reward of each step."""
        self.seen_rewards: list[float] = []
        """The lowest and the highest reward of a rollout so far, of training or validation."""
        self.baseline: Estimate | None = None
        self.baseline_rewards: list[float | None] | None = None
        """By task; older checkpoints have none."""
        self.sampled_baseline: Estimate | None = None
        """As the baseline, with answers sampled as for training; None where that is the same, or was not measured."""
        self.sampled_baseline_rewards: list[float | None] | None = None
        self.best: float | None = None
        self.rollouts = 0
        self.is_whole = True
        """False while weights are being changed, and for good where that failed: such a state is not saved."""
        self.validated_step: int | None = None
        self.run_id: str | None = None
        """Of this run in the store."""
        self.resumed_run_id: str | None = None
        """Of the run that this one goes on with."""
        self._folder = folder
        self._is_best = False
        self.best_step: int | None = None
        self._saved_step = 0
        self._empty_rollouts = 0
        """In the steps in a row that taught nothing."""
        self._empty_rewards: list[float] = []
        """In the same steps."""

    def note(
        self,
        finished: Sequence[FinishedRollout],
        metrics: dict[str, float],
        *,
        learned: bool,
        failed: FailedReward = "skip",
    ) -> None:
        """A step is over; its figures are added to the metrics. `failed` is what failed rollouts count in the mean."""
        rewards = [one.own_reward for one in finished if one.own_reward is not None]
        failures = Counter(one.failure for one in finished if one.own_reward is None)
        counted = reward_of_failed(failed, rewards)
        if counted is not None:
            rewards += [counted] * failures.total()
        self.step += 1
        self.rollouts += len(finished)
        self.note_rewards(rewards)
        if learned:
            self.empty_steps, self._empty_rollouts, self._empty_rewards = 0, 0, []
        else:
            self.empty_steps += 1
            self._empty_rollouts += len(finished)
            self._empty_rewards += rewards
        metrics["rollouts/finished"] = len(finished)
        metrics["rollouts/failed"] = failures.total()
        words = f"{failures.total()} of {len(finished)} rollouts gave no reward and {effect_of_failed(counted)}"
        if failures.total() > MOST_FAILED * len(finished):
            logger.warning("Step %d: %s; most often: %s", self.step, words, failures.most_common(1)[0][0])
        if rewards:
            self.rewards.append(sum(rewards) / len(rewards))
            metrics["reward/mean"] = self.rewards[-1]
            metrics["reward/max"] = max(rewards)
            metrics["reward/min"] = min(rewards)
            bounds = estimate(rewards)  # as if the rollouts of a group were independent
            if is_finite(bounds.low) and is_finite(bounds.high):
                metrics["interval/low"], metrics["interval/high"] = bounds.low, bounds.high
            more = f" ({words})" if failures else ""
            logger.info("Step %d: mean reward %.3f of %d rollouts%s", self.step, self.rewards[-1], len(rewards), more)

    def note_rewards(self, rewards: Sequence[float]) -> None:
        """Rewards of rollouts of training or validation."""
        known = [*self.seen_rewards, *rewards]
        self.seen_rewards = [min(known), max(known)] if known else []

    def note_validation(self, found: Estimate) -> None:
        self.validated_step = self.step
        if self.best is None or found.mean > self.best:
            self.best, self.best_step, self._is_best = found.mean, self.step, True

    def is_solved(self) -> bool:
        """Whether every reward of the last steps, none of which taught anything, is the highest that was ever seen.

        Rewards that were never lower say nothing: they may be those of a reward that is always the same. Nor do steps
        in which many rollouts failed.
        """
        if not self._empty_rewards:
            return False
        if self._empty_rollouts - len(self._empty_rewards) > MOST_FAILED * self._empty_rollouts:
            return False
        lowest, highest = self.seen_rewards
        return are_same(min(self._empty_rewards), highest) and not are_same(lowest, highest)

    def is_target_reached(self, target: float | None) -> bool:
        recent = self.rewards[-RECENT_STEPS:]
        return target is not None and len(recent) == RECENT_STEPS and sum(recent) / RECENT_STEPS >= target

    # ------------------------------------------------------------------ checkpoints

    def is_due(self, save_every: int) -> bool:
        """Whether this step is one that a checkpoint is made of: the best so far is, or it would be lost."""
        return self._is_best or self.step % save_every == 0

    def save(self, policies: Sequence["Policy"], place: Mapping[str, object]) -> None:
        """Write a checkpoint of every policy, if there is a folder for them and none of this very state yet.

        `place` is that of the first task in the curriculum that was not learned from.
        """
        if self._folder is None or not self.is_whole or (self.step == self._saved_step and not self._is_best):
            return
        progress = {
            **{name: getattr(self, name) for name in _KEPT},
            **{name: getattr(self, name) and vars(getattr(self, name)) for name in _ESTIMATES},
            "curriculum": dict(place),
            "run_id": self.run_id,
            "seen_rewards": self.seen_rewards,
        }
        for policy in policies:
            if not self._saved_step:  # this run begins anew
                self._checkpoints(policy).set_aside()
            self._checkpoints(policy).save(
                self.step,
                model_state=policy.model.state(),
                learner_state=policy.learner_state(),
                progress={**progress, "version": policy.version, "model": policy.source},
                is_best=self._is_best,
            )
        self._is_best, self._saved_step = False, self.step

    def restore(self, policies: Sequence["Policy"], curriculum: Curriculum) -> bool:
        """Go on from the newest checkpoint that all policies have; False if there is none, and nothing has changed."""
        steps = [] if self._folder is None else self._checkpoints(policies[0]).steps()
        found = self._restore(policies, steps)
        if found is None:
            logger.warning("There is no checkpoint to go on from in '%s'; the run begins anew.", self._folder)
            return False
        saved = found.progress
        for name in _KEPT:
            setattr(self, name, saved.get(name))
        self.resumed_run_id = saved.get("run_id")
        # Older checkpoints have the two rewards by their names, and those before them the means alone.
        older = [saved[name] for name in ("lowest", "highest") if saved.get(name) is not None]
        self.note_rewards(saved.get("seen_rewards") or older or self.rewards)
        self.baseline, self.sampled_baseline = (
            None if saved.get(name) is None else Estimate(**saved[name]) for name in _ESTIMATES
        )
        self._saved_step = self.step
        curriculum.load_state(saved["curriculum"])
        found.restore_random_sources()
        logger.info("The run goes on after step %d, from '%s'.", self.step, self._folder)
        return True

    def resume_hint(self, model: Path | None) -> str:
        """How to go on after a stop; `model` is the folder in which a trained model was left."""
        if self._saved_step:
            way = f"GRPO(resume=True, checkpoints={str(self._folder)!r})"
            return f"Stopped at step {self._saved_step}; the same script with {way} goes on from there."
        rest = "the same script begins anew" + (
            "" if self._folder else "; with GRPO(checkpoints='…') it keeps what it learns"
        )
        if model is not None:
            rest = f"the trained model is left, and the same script with GRPO({str(model)!r}) goes on with it"
        return f"Stopped at step {self.step}, without a checkpoint; {rest}."

    def why_no_model(self) -> str:
        """Why a run that was cut short leaves no model."""
        broken = f"the update of step {self.step + 1} broke off, and no checkpoint has an earlier model"
        return "there is no whole step that trained one" if self.is_whole else broken

    def restore_best(self, policies: Sequence["Policy"]) -> bool:
        """Give the policies the weights that a run which is cut short should leave; False if there are none.

        These are the ones that did best in validation, where a checkpoint has them, and otherwise those of the last
        whole step, which are in a checkpoint too if an update broke off in the middle.
        """
        found = self._restore(policies, [self.best_step])
        if found is None and not self.is_whole:
            found = self._restore(policies, [self._saved_step])
        return self.is_whole or found is not None

    def _restore(self, policies: Sequence["Policy"], steps: Sequence[int | None]) -> Checkpoint | None:
        """Restore all policies after the first of the steps of which each has a whole checkpoint; that of the first."""
        for step in steps if self._folder is not None else ():
            found = [self._checkpoints(policy).at(step) if step else None for policy in policies]
            whole = [checkpoint for checkpoint in found if checkpoint is not None]
            if len(whole) < len(found):
                continue
            for policy, one in zip(policies, whole, strict=True):
                policy.restore(one.model_state(), one.learner_state(), int(one.progress["version"]))
            return whole[0]
        return None

    def _checkpoints(self, policy: "Policy") -> Checkpoints:
        assert self._folder is not None
        return Checkpoints(self._folder / policy.name)


def folders_of(output: Path | None, policies: Sequence["Policy"]) -> list[Path]:
    """The folder of each policy's model; none where no model is to be left."""
    if output is None:
        return []
    return [output if len(policies) == 1 else output / policy.name for policy in policies]
