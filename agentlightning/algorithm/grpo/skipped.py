"""Why something is not learned from: the reasons, and what tells a sequence that the model cannot have sampled.

An agent may write any span, also one that looks like a model call; and a judge's model may have another vocabulary. A
sequence that the learner could not take is found here, before it is a sample.
"""

import logging
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

from agentlightning.adapter.call_attributes import version_number
from agentlightning.adapter.sequences import Trajectory
from agentlightning.utils.once import once

if TYPE_CHECKING:  # which needs torch
    from agentlightning.engine.model import CausalModel

logger = logging.getLogger(__name__)

LOWEST_LOGPROB: Final = -1e4
"""Below it nothing is sampled: vLLM writes -9999 for minus infinity."""
HIGHEST_LOGPROB: Final = 1.0
"""A little above 0, for rounding in few bits."""


class Skipped(str, Enum):
    """Why something was not learned from; of rollouts, of groups, or of single sequences."""

    FAILED = "failed"
    """A rollout that did not succeed."""
    NO_REWARD = "no_reward"
    """A rollout without a reward."""
    BAD_REWARD = "bad_reward"
    """A rollout whose reward is not a finite number."""
    GROUP_TOO_SMALL = "group_too_small"
    """Rollouts of a group of which too few have a reward."""
    NO_VARIANCE = "no_variance"
    """Rollouts of a group whose rewards are all the same."""
    EMPTY_TRACE = "empty_trace"
    """A rollout in whose trace there are no model calls."""
    NO_TOKENS = "no_tokens"
    """A rollout whose calls were recorded without tokens, or are not to be trained."""
    TRUNCATED = "truncated"
    """A sequence with an answer that was cut off or broken off, at its end or before."""
    TOO_LONG = "too_long"
    """A sequence of more tokens than allowed."""
    TOO_STALE = "too_stale"
    """A sequence sampled from weights that are too old."""
    BAD_SAMPLE = "bad_sample"
    """A sequence that the model cannot have sampled, such as one of another model's tokens, or a trace that cannot be
    read."""
    OTHER_CHOICE = "other_choice"
    """A choice beyond the first of a call with n > 1."""


OF_SEQUENCES: Final = frozenset(
    [Skipped.TRUNCATED, Skipped.TOO_LONG, Skipped.TOO_STALE, Skipped.BAD_SAMPLE, Skipped.OTHER_CHOICE]
)
"""Reasons by which sequences are counted, not rollouts."""


def flaws_of(trajectory: Trajectory, model: "CausalModel | None", current_version: int | None) -> dict[int, str]:
    """Why the model cannot have sampled sequences, by their number; each is named in the log."""
    flaws: dict[int, str] = {}
    for number, sequence in enumerate(trajectory.sequences):
        flaw = None if model is None else flaw_of(sequence.token_ids, sequence.logprobs, model)
        last = max(version_numbers(sequence.weights_versions), default=0)
        if flaw is None and current_version is not None and last > current_version:
            flaw = f"is of version {last} of the weights, and the latest is {current_version}"
        if flaw is not None:
            flaws[number] = flaw
            logger.warning("A sample of rollout '%s' is not learned from: it %s.", trajectory.rollout_id, flaw)
    return flaws


def flaw_of(token_ids: Sequence[int], logprobs: Iterable[float | None], model: "CausalModel") -> str | None:
    """Why the model cannot have sampled a sequence, as the rest of a sentence; None if it can."""
    if len(token_ids) > model.max_length:
        return f"has {len(token_ids)} tokens; model '{model.name}' takes {model.max_length} at most"
    if not 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < model.vocab_size:
        return f"has tokens outside the {model.vocab_size} that model '{model.name}' knows"
    if not all(LOWEST_LOGPROB <= logprob <= HIGHEST_LOGPROB for logprob in logprobs if logprob is not None):
        return f"has a log-probability that is not finite, below {LOWEST_LOGPROB:g} or above {HIGHEST_LOGPROB:g}"
    return None


def version_numbers(versions: Iterable[str | None]) -> list[int]:
    """The versions that are numbers."""
    return [number for version in set(versions) if (number := version_number(version)) is not None]


@once
def warn_of_choices() -> None:
    logger.warning("Of model calls with n > 1 only the first choice is learned from; the others count as other_choice.")
