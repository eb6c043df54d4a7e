"""What will be trained and what will not, in words and as a table of text."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentlightning.adapter.sequences import BreakReason, DropReason, Trajectory

__all__ = ["TraceReport"]

_BREAKS = {
    BreakReason.NEW_AGENT: "another agent's first call",
    BreakReason.NEW_CONVERSATION: "a new conversation",
    BreakReason.RESAMPLED: "another answer to the same prompt",
    BreakReason.BRANCHED: "a second way on from one point",
    BreakReason.RETOKENISED: "the model's words came back as other tokens",
    BreakReason.TOOL_OUTPUT_INSERTED: "a tool's output was put into the history",
    BreakReason.CONTEXT_TRUNCATED: "the history was cut",
    BreakReason.CONTEXT_EDITED: "the history was rewritten",
}
_DROPS = {
    DropReason.OTHER_AGENT: "made by an agent that is not trained",
    DropReason.IN_REWARD: "made to judge, not to act",
    DropReason.EXCLUDED: "excluded from the redirect",
    DropReason.DUPLICATE: "the same response, recorded twice",
    DropReason.NESTED: "the same call, seen by a second tracer",
    DropReason.UNUSED: "answered too late: the agent had given up, or asked again",
    DropReason.NO_PROMPT_IDS: "no token ids of the prompt",
    DropReason.NO_RESPONSE_IDS: "no token ids of a response",
    DropReason.UNREADABLE_IDS: "token ids that are no list of integers",
    DropReason.FAILED: "failed without a response",
}
_COLUMNS = ("attempt", "sequence", "agent", "calls", "given", "trained", "reward", "begins because")


@dataclass(frozen=True)
class TraceReport:
    """A summary of trajectories; `str()` says it in words, `table()` has a line for each sequence."""

    trajectories: tuple[Trajectory, ...]

    @classmethod
    def of(cls, *trajectories: Trajectory) -> "TraceReport":
        return cls(trajectories)

    def __str__(self) -> str:
        sequences = [sequence for trajectory in self.trajectories for sequence in trajectory.sequences]
        n_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        n_sampled = sum(trajectory.n_sampled_tokens for trajectory in self.trajectories)
        n_dropped = sum(len(trajectory.dropped) for trajectory in self.trajectories)
        n_calls = sum(trajectory.n_calls for trajectory in self.trajectories)
        there_are = f"{_count(len(self.trajectories), 'attempt')} with {_count(n_calls, 'model call')}"
        lines = [
            f"{there_are}: {n_calls - n_dropped} in {_count(len(sequences), 'sequence')}, {n_dropped} dropped.",
            f"{_count(n_sampled, 'token')} will be trained, {n_tokens - n_sampled} are context.",
            *self._about_rewards(),
            *self._about_logprobs(n_sampled),
            *self._about_endings(),
        ]
        breaks = Counter(b.reason for trajectory in self.trajectories for b in trajectory.breaks)
        lines += _listed("New sequences were begun:", [(n, _BREAKS[reason]) for reason, n in breaks.most_common()])
        drops = Counter(d.reason for trajectory in self.trajectories for d in trajectory.dropped)
        lines += _listed("Calls were dropped:", [(n, _DROPS[reason]) for reason, n in drops.most_common()])
        return "\n".join(lines)

    def _about_rewards(self) -> Iterable[str]:
        without = sum(trajectory.final_reward is None for trajectory in self.trajectories)
        if without:
            yield f"{_count(without, 'attempt')} got no reward."

    def _about_logprobs(self, n_sampled: int) -> Iterable[str]:
        known = sum(
            value is not None
            for trajectory in self.trajectories
            for sequence in trajectory.sequences
            for value in sequence.logprobs
        )
        if known < n_sampled:
            yield f"{n_sampled - known} of the trained tokens have no log-probability."

    def _about_endings(self) -> Iterable[str]:
        """How many answers were cut off; of those whose end was not recorded nobody knows."""
        calls = [call for one in self.trajectories for sequence in one.sequences for call in sequence.calls]
        truncated = sum(call.is_truncated for call in calls)
        if truncated:
            yield f"{truncated} of {_count(len(calls), 'answer')} {'was' if truncated == 1 else 'were'} cut off."

    def table(self) -> str:
        """One line for each sequence and each dropped call, in columns."""
        rows: list[Sequence[str]] = [_COLUMNS]
        for trajectory in self.trajectories:
            reasons = {b.sequence: f"{_BREAKS[b.reason]} (token {b.position})" for b in trajectory.breaks}
            for number, sequence in enumerate(trajectory.sequences):
                trained = sum(sequence.loss_mask)
                rewards = [call.reward for call in sequence.calls if call.reward is not None]
                reward = f"{rewards[-1]:g}" if rewards else "-"
                counts = (str(len(sequence.calls)), str(len(sequence.token_ids) - trained), str(trained), reward)
                begins = reasons.get(number, "first call")
                rows.append((trajectory.attempt_id, str(number), sequence.agent_name, *counts, begins))
            for call in trajectory.dropped:
                why = f"dropped: {_DROPS[call.reason]}"
                rows.append((trajectory.attempt_id, "-", call.agent_name or "-", "1", "-", "0", "-", why))
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(title: str, items: Sequence[tuple[int, str]]) -> list[str]:
    return [title, *(f"  {number} x {words}" for number, words in items)] if items else []
