"""How far a run has come: its step, its curve, its best result, and the checkpoints it can go on from."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentlightning.algorithm.grpo.checkpoints import Checkpoint, Checkpoints
from agentlightning.algorithm.grpo.collecting import FinishedRollout
from agentlightning.algorithm.grpo.curriculum import Curriculum
from agentlightning.algorithm.intervals import Estimate

if TYPE_CHECKING:
    from agentlightning.algorithm.grpo.policy import Policy

__all__ = ["Progress"]

logger = logging.getLogger(__name__)

RECENT_STEPS: Final = 5
"""Over so many steps the mean reward is taken that a target is compared with."""


class Progress:
    """The state of one run besides its weights."""

    def __init__(self, folder: Path | None = None) -> None:
        self.step = 0
        self.empty_steps = 0
        """Steps in a row that taught nothing."""
        self.rewards: list[float] = []
        """The mean reward of each step, over the rollouts that have one."""
        self.baseline: Estimate | None = None
        self.best: float | None = None
        self.rollouts = 0
        self.is_whole = True
        """False while weights are being changed, and for good where that failed: such a state is not saved."""
        self.validated_step: int | None = None
        self._folder = folder
        self._is_best = False
        self._saved_step = 0

    def note(self, finished: Sequence[FinishedRollout], metrics: dict[str, float], *, learned: bool) -> None:
        """A step is over; its figures are added to the metrics."""
        rewards = [one.reward for one in finished if one.reward is not None and one.has_succeeded]
        self.step += 1
        self.empty_steps = 0 if learned else self.empty_steps + 1
        self.rollouts += len(finished)
        metrics["rollouts/finished"] = len(finished)
        metrics["rollouts/failed"] = sum(1 for one in finished if not one.has_succeeded)
        if rewards:
            self.rewards.append(sum(rewards) / len(rewards))
            metrics["reward/mean"] = self.rewards[-1]
            metrics["reward/max"] = max(rewards)
            metrics["reward/min"] = min(rewards)
            logger.info("Step %d: mean reward %.3f of %d rollouts", self.step, self.rewards[-1], len(rewards))

    def note_validation(self, found: Estimate) -> None:
        self.validated_step = self.step
        if self.best is None or found.mean > self.best:
            self.best, self._is_best = found.mean, True

    def is_target_reached(self, target: float | None) -> bool:
        recent = self.rewards[-RECENT_STEPS:]
        return target is not None and len(recent) == RECENT_STEPS and sum(recent) / RECENT_STEPS >= target

    # ------------------------------------------------------------------ checkpoints

    def is_due(self, save_every: int) -> bool:
        """Whether this step is one that a checkpoint is made of: the best so far is, or it would be lost."""
        return self._is_best or self.step % save_every == 0

    def save(self, policies: Sequence["Policy"], place: Mapping[str, int]) -> None:
        """Write a checkpoint of every policy, if there is a folder for them and none of this very state yet.

        Args:
            place: Of the first task in the curriculum that was not learned from.
        """
        if self._folder is None or not self.is_whole or (self.step == self._saved_step and not self._is_best):
            return
        progress = {
            "step": self.step,
            "rewards": self.rewards,
            "rollouts": self.rollouts,
            "best": self.best,
            "baseline": None if self.baseline is None else vars(self.baseline),
            "curriculum": dict(place),
        }
        for policy in policies:
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
        found = self._common(policies)
        if not found:
            logger.warning("There is no checkpoint to go on from in '%s'; the run begins anew.", self._folder)
            return False
        for policy, checkpoint in zip(policies, found, strict=True):
            policy.restore(checkpoint.model_state(), checkpoint.learner_state(), int(checkpoint.progress["version"]))
        self._take_over(found[0].progress, curriculum)
        found[0].restore_random_sources()
        logger.info("The run goes on after step %d, from '%s'.", self.step, self._folder)
        return True

    def _common(self, policies: Sequence["Policy"]) -> list[Checkpoint]:
        """A checkpoint of each policy, all of the same step; none if there is no such step."""
        if self._folder is None:
            return []
        stores = [self._checkpoints(policy) for policy in policies]
        for step in stores[0].steps():
            found = [store.at(step) for store in stores]
            whole = [checkpoint for checkpoint in found if checkpoint is not None]
            if len(whole) == len(stores):
                return whole
        return []

    def _take_over(self, told: Mapping[str, Any], curriculum: Curriculum) -> None:
        self.step, self.rewards, self.rollouts = int(told["step"]), list(told["rewards"]), int(told["rollouts"])
        self.best = told["best"]
        self.baseline = None if told["baseline"] is None else Estimate(**told["baseline"])
        self._saved_step = self.step
        curriculum.load_state(told["curriculum"])

    def _checkpoints(self, policy: "Policy") -> Checkpoints:
        assert self._folder is not None
        return Checkpoints(self._folder / policy.name)
