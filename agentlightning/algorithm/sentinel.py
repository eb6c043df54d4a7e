"""The sentinel: a second reward that is only watched, and alarms for a training that finds a loophole in the first.

A model that learns to please its reward without doing its task shows in four curves: the trained reward rises while one
that it is not trained on falls; its answers grow longer and longer; its choices become random; or it gives the same
answer to every task. The curves are metrics of the run (`watched/mean`, `answers/tokens`, `answers/distinct` and
`learner/entropy`), so the dashboard draws them, and `alarms_of` finds the same in a run that is over.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Final

from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.errors import ConfigurationError
from agentlightning.semconv import CALL_SPAN, RESPONSE_IDS
from agentlightning.types.rewards import named_rewards_of
from agentlightning.utils.spelling import suggests_arguments

__all__ = ["Alarm", "Sentinel", "alarms_of"]

WATCHED, WATCHED_ERROR = "watched/mean", "watched/error"
TRAINED = "reward/mean"
LENGTH, DISTINCT, ENTROPY = "answers/tokens", "answers/distinct", "learner/entropy"
WINDOW: Final = 4
"""Steps at the end whose mean is compared with the mean of the first steps: as many, or half as many, since a model may
find a loophole in no time."""
LEAST_CHANGE: Final = 0.05
"""Of either reward, as a share of the largest that was seen."""
FEW_DISTINCT: Final = 0.1
"""Share of tasks with an answer of their own below which a model says the same to all."""


@dataclass(frozen=True)
class Alarm:
    """Something that a healthy training does not show, with the curves that show it."""

    name: str
    sentence: str
    curves: Mapping[str, Sequence[float]]

    def __str__(self) -> str:
        """The sentence, and under it the curves, of which long ones are thinned out."""
        lines = [self.sentence]
        for name, curve in self.curves.items():
            every = -(-len(curve) // 20) or 1
            shown = curve[::-every][::-1]  # the last one is always there
            lines.append(f"  {name}: {' '.join(f'{value:.2f}' for value in shown)}")
        return "\n".join(lines)


@suggests_arguments
@dataclass
class Sentinel:
    """Watches a training.

    Args:
        reward: The reward to watch: the name under which the agent emits it beside the primary one, or a function of a
            finished rollout, such as a judge. It is never trained on. None watches length, entropy and diversity only.
        stop: End the training at the first alarm, as if it were done, with its best model kept.
    """

    reward: str | Callable[[FinishedRollout], float | None] | None = None
    stop: bool = False
    alarms: list[Alarm] = field(default_factory=list, init=False)
    """Raised so far, each kind once."""
    _curves: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.reward is not None and not isinstance(self.reward, str) and not callable(self.reward):
            raise ConfigurationError(f"reward is {self.reward!r}; give the name of a reward, a function, or None.")

    def begin(self) -> None:
        """Forget what was watched in an earlier run."""
        self.alarms, self._curves = [], {}

    def figures(self, finished: Sequence[FinishedRollout]) -> dict[str, float]:
        """The metrics of a step."""
        answers = {one.rollout.rollout_id: _sampled(one) for one in finished}
        of_groups = {one.group: answers[one.rollout.rollout_id] for one in finished}
        figures: dict[str, float] = {}
        if any(answers.values()):
            figures[LENGTH] = fmean(map(len, answers.values()))
        if len(of_groups) > 1:
            figures[DISTINCT] = (len(set(of_groups.values())) - 1) / (len(of_groups) - 1)
        by_group: dict[str, list[float]] = {}
        for one in finished:
            if (value := self._watched(one)) is not None and math.isfinite(value):
                by_group.setdefault(one.group, []).append(value)
        watched = [value for values in by_group.values() for value in values]
        if watched:
            figures[WATCHED] = fmean(watched)
            # Rollouts of one task are alike, so groups are what chance has drawn.
            means = [fmean(values) for values in by_group.values()]
            figures[WATCHED_ERROR] = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
        return figures

    def look(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take the metrics of the next step; the alarms that were not raised before."""
        for name in (TRAINED, WATCHED, WATCHED_ERROR, LENGTH, DISTINCT, ENTROPY):
            if name in metrics:
                self._curves.setdefault(name, []).append(metrics[name])
        known = {alarm.name for alarm in self.alarms}
        new = [alarm for alarm in alarms_of(self._curves) if alarm.name not in known]
        self.alarms += new
        return new

    def _watched(self, finished: FinishedRollout) -> float | None:
        if callable(self.reward):
            return self.reward(finished)
        return None if self.reward is None else named_rewards_of(finished.spans).get(self.reward)


def _sampled(finished: FinishedRollout) -> tuple[int, ...]:
    """The tokens that the model chose in a rollout, in the order of its calls."""
    calls = [span for span in finished.spans if span.name == CALL_SPAN]
    ids = [span.attributes.get(RESPONSE_IDS) for span in calls]
    return tuple(one for call in ids if isinstance(call, (list, tuple)) for one in call)


def alarms_of(curves: Mapping[str, Sequence[float]]) -> list[Alarm]:
    """What a healthy training does not show, in the metrics of its steps."""
    found = [_hacked(curves), *(_ran_away(name, curves) for name in (LENGTH, ENTROPY, DISTINCT))]
    return [alarm for alarm in found if alarm is not None]


def _ends(curve: Sequence[float], first: int = WINDOW) -> tuple[float, float]:
    """The means of the first and of the last steps."""
    return fmean(curve[:first]), fmean(curve[-WINDOW:])


def _hacked(curves: Mapping[str, Sequence[float]]) -> Alarm | None:
    trained, watched, errors = (curves.get(name, ()) for name in (TRAINED, WATCHED, WATCHED_ERROR))
    for first in (WINDOW, WINDOW // 2):
        if min(len(trained), len(watched)) < first + WINDOW:
            continue
        (low, high), (before, after) = _ends(trained, first), _ends(watched, first)
        error = math.hypot(math.hypot(*errors[:first]) / first, math.hypot(*errors[-WINDOW:]) / WINDOW)
        # By four standard errors the reward must have fallen.
        is_sure = before - after > max(4.0 * error, LEAST_CHANGE * max(map(abs, watched)))
        if is_sure and high - low > LEAST_CHANGE * max(map(abs, trained)):
            return Alarm(
                "reward_hacking",
                f"The trained reward rose from {low:.2f} to {high:.2f} while the watched one fell from {before:.2f} to "
                f"{after:.2f}: the model pleases its reward without doing its task.",
                {TRAINED: tuple(trained), WATCHED: tuple(watched)},
            )
    return None


def _ran_away(name: str, curves: Mapping[str, Sequence[float]]) -> Alarm | None:
    curve = curves.get(name, ())
    if len(curve) < 2 * WINDOW:
        return None
    before, after = _ends(curve)
    shown = {name: tuple(curve), TRAINED: tuple(curves.get(TRAINED, ()))}
    if name == LENGTH and after > 3.0 * before:
        return Alarm("length", f"Answers grew from {before:.0f} to {after:.0f} tokens.", shown)
    if name == ENTROPY and after > before + 1.0:
        return Alarm("entropy", f"Entropy rose from {before:.2f} to {after:.2f} nats a token.", shown)
    if name == DISTINCT and after < FEW_DISTINCT and before > 2 * FEW_DISTINCT:
        return Alarm(
            "diversity", f"Only {after:.0%} of the tasks get an answer of their own; it was {before:.0%}.", shown
        )
    return None
