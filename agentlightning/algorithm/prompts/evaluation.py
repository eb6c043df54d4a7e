"""Evaluations of prompts: paid for, sent with tasks, waited for; what an earlier process finished is not done again.

An evaluation of a run with a state file has a name, its step. The journal holds the outcome of each step, and the ids
of its rollouts follow from the name, so a run that goes on finds the rollouts that were under way in the store.

The journal is a file of what a run has done, from which a run that was killed goes on. Every step that costs something
or is drawn by chance has a name, and its outcome is written as one line of JSON when it is known. A second run with the
same file finds the outcomes under the same names and does only what is missing. Rollouts have ids that follow from the
names, so that a store that outlasted the run gives back those that were under way.

A line is written at once and synced; one that was cut off by a crash is dropped when the file is opened.
"""

import hashlib
import itertools
import json
import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from typing_extensions import Self

from agentlightning.adapter import TraceAdapter, TracerTraceToTriplet, TraceToMessages
from agentlightning.algorithm.batches import Batches, first_traceback
from agentlightning.algorithm.prompts.budget import Hold, Ledger, OptimisationBudget
from agentlightning.algorithm.prompts.results import Lineage, RunRecord, logger_of
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.store.base import LightningStore
from agentlightning.types import Rollout, RolloutConfig, RolloutMode
from agentlightning.utils.json_values import JsonMapping, JsonObject
from agentlightning.utils.private_files import append_to

logger = logging.getLogger(__name__)


_T = TypeVar("_T")

FORMAT: Final = 1
ID_DIGITS: Final = 20


class RunJournal:
    """Outcomes by the names of their steps; without a path nothing is kept.

    Args:
        identity: What makes the run what it is; a file of another run is refused.
        algorithm: Whose run it is.
    """

    def __init__(
        self, path: str | Path | None = None, identity: JsonMapping | None = None, *, algorithm: str = "APO"
    ) -> None:
        self._path = path = None if path is None else Path(path)
        self._steps: JsonObject = {}
        self._key = ""
        self._algorithm = algorithm
        if path is None:
            return
        described = json.loads(json.dumps(dict(identity or {}), default=str))
        lines = _lines_of(path, algorithm)
        if not lines:
            self._key = uuid.uuid4().hex
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"format": FORMAT, "algorithm": algorithm, "key": self._key, "identity": described})
            return
        head, *steps = lines
        if not isinstance(head, dict) or (head.get("format"), head.get("algorithm")) != (FORMAT, algorithm):
            raise _not_a_state(path, algorithm)
        if head["identity"] != described:
            others = sorted(name for name in described if head["identity"].get(name) != described[name])
            raise ConfigurationError(
                f"'{path}' holds the state of another run, with other {', '.join(others)}; remove it to begin anew, or "
                "name another state_file."
            )
        self._key = head["key"]
        self._steps = dict(steps)

    def __contains__(self, step: str) -> bool:
        return step in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, step: str) -> Any:
        """The outcome of a step; None if it is not known."""
        return self._steps.get(step)

    def put(self, step: str, outcome: object) -> None:
        """Keep the outcome of a step."""
        if self._path is not None:
            self._write([step, outcome])
            self._steps[step] = outcome

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self._steps.items())

    def remember(self, step: str, draw: Callable[[], _T]) -> _T:
        """What was drawn at a step: as it was the first time, or drawn now."""
        if step in self._steps:
            kept: _T = self._steps[step]
            return kept
        drawn = draw()
        self.put(step, drawn)
        return drawn

    @property
    def run_id(self) -> str | None:
        """An id for the run in the store, the same each time; None where nothing is kept."""
        return f"run-{self._algorithm.lower()}-{self._key[:ID_DIGITS]}" if self._path is not None else None

    def rollout_ids(self, step: str | None, count: int) -> list[str] | None:
        """Ids for the rollouts of a step, the same each time; None where nothing is kept."""
        if self._path is None or step is None:
            return None
        names = (f"{self._key} {step} {number}" for number in range(count))
        return [f"ro-{hashlib.sha256(name.encode()).hexdigest()[:ID_DIGITS]}" for name in names]

    def _write(self, line: object) -> None:
        assert self._path is not None
        with append_to(self._path) as file:
            file.write(json.dumps(line, ensure_ascii=False, default=str).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _not_a_state(path: Path, algorithm: str) -> ConfigurationError:
    return ConfigurationError(f"'{path}' is not the state of a run of {algorithm}; name another state_file.")


def _lines_of(path: Path, algorithm: str) -> list[Any]:
    """The whole lines of a file; what stands behind the last line end is cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise _not_a_state(path, algorithm) from error


# ---------------------------------------------------------------------- evaluations


SILENCE_SECONDS: Final = 60.0
"""After which an attempt counts as dead; runners send a heartbeat every ten seconds."""


@dataclass
class RunState:
    """What a run has done, spent and counted."""

    journal: RunJournal
    ledger: Ledger
    counts: Counter[str] = field(default_factory=Counter)
    """Candidates that were rejected, calls that failed, and what else went wrong."""
    lineage: Lineage = field(default_factory=Lineage)
    round: int = 0
    """The one under way, as the curves count; 0 is that of the seed."""

    @classmethod
    def of(cls, journal: RunJournal, budget: OptimisationBudget) -> Self:
        """The state that an earlier process left in the journal, or an empty one."""
        ledger = Ledger(budget, changed=lambda spent: journal.put("spent", spent))
        sent = sum(count for step, count in journal.items() if step.endswith(" sent"))
        ledger.restore(sent, journal.get("spent"))
        return cls(journal, ledger)


@dataclass
class Evaluator:
    """Runs tasks for one run of an algorithm, within its budget."""

    store: LightningStore
    state: RunState
    timeout_seconds: float
    _: KW_ONLY
    record: RunRecord | None = None
    """Of the run to which rollouts belong."""
    most_failed_batches: int | None = None
    """Batches in a row without a success after which the run is given up; None for any number."""
    has_succeeded: bool = False
    """Whether any rollout has; a run in which none does is given up."""
    _failed_batches: int = 0
    _rewards: Counter[bool] = field(default_factory=Counter)
    """How many lay within their range, and how many did not."""

    def __post_init__(self) -> None:
        self._batches = Batches(self.store)  # one for all, which numbers the groups

    def is_sent(self, step: str | None) -> bool:
        return f"{step} sent" in self.state.journal

    async def reserve(self, step: str | None, count: int, *, can_wait: bool = True) -> Hold:
        """Count rollouts before they are sent; BudgetSpent if they are too many.

        Args:
            step: The name of the evaluation, which counts once however often it is resumed; None cannot be resumed.
            can_wait: Whether to wait for money that others hold back.
        """
        journal, is_new = self.state.journal, not self.is_sent(step)
        ids = None if is_new else journal.rollout_ids(step, count)
        found = 0 if ids is None else len(await self.store.query_rollouts(rollout_id_in=ids))
        hold = await self.state.ledger.take_rollouts(count, is_new=is_new, found=found, can_wait=can_wait)
        if is_new and step is not None:
            journal.put(f"{step} sent", count)
        return hold

    async def run(
        self, step: str | None, tasks: Sequence[Any], *, mode: RolloutMode, resources_id: str
    ) -> tuple[list[str], list[Rollout]]:
        """Send tasks and wait; the ids of all rollouts, and the rollouts that are over. Late ones are cancelled."""
        ids, config = await self._usable_ids(self.state.journal.rollout_ids(step, len(tasks))), None
        if ids is not None:  # a runner that dies with this process leaves its rollout to another
            config = RolloutConfig(
                unresponsive_seconds=SILENCE_SECONDS, max_attempts=3, retry_condition=["unresponsive"]
            )
        metadata = {"step": self.state.round - 1, **({} if self.record is None else self.record.rollout_metadata())}
        sent = await self._batches.send(
            tasks, mode=mode, resources_id=resources_id, rollout_ids=ids, metadata=metadata, config=config
        )
        finished = await self._batches.wait(sent, self.timeout_seconds)
        if late := len(sent.group_of) - len(finished):
            self.state.counts["rollouts that were late"] += late
            logger.warning("%d rollouts are not over after %.0f s and are cancelled.", late, self.timeout_seconds)
        return list(sent.group_of), finished

    async def _usable_ids(self, ids: Sequence[str] | None) -> list[str] | None:
        """Ids under which rollouts can be sent; those that failed or were cancelled run again under another id."""
        if ids is None:
            return None
        known = {one.rollout_id: one for one in await self.store.query_rollouts(rollout_id_in=ids)}
        usable = []
        for rollout_id in ids:
            name, found = rollout_id, known.get(rollout_id)
            for again in itertools.count(1):
                if found is None or found.status not in ("failed", "cancelled"):
                    break
                name = f"{rollout_id}-again-{again}"
                found = await self.store.get_rollout_by_id(name)
            if name != rollout_id and found is None:
                hold = await self.state.ledger.take_rollouts(1, can_wait=False)
                self.state.ledger.end_rollouts(hold, [], unfinished=1)  # what the first one may have cost
                self.state.journal.put(f"{name} sent", 1)
            usable.append(name)
        return usable

    def bounded(self, reward: float, reward_range: tuple[float, float]) -> float:
        """A reward within its range: of one that lies outside, as an agent may write it, the nearer bound."""
        low, high = reward_range
        is_within = low <= reward <= high
        self._rewards[is_within] += 1
        if not is_within:
            self.state.counts["rewards outside of their range"] += 1
            if self._rewards[False] == 1:
                logger.warning("A reward of %g lies outside %g to %g, and counts as the nearer one.", reward, low, high)
        return min(max(reward, low), high)

    async def check(self, finished: Sequence[Rollout]) -> None:
        """TrainingError if nothing works: then more rollouts would only cost.

        ConfigurationError if most rewards lie outside of their range, so that it is wrong.
        """
        if self._rewards[False] > self._rewards[True]:
            raise ConfigurationError(
                f"{self._rewards[False]} of {self._rewards.total()} rewards lie outside of the range for which the "
                "comparison holds; set reward_range."
            )
        is_success = any(rollout.status == "succeeded" for rollout in finished)
        self._failed_batches = 0 if is_success else self._failed_batches + 1
        self.has_succeeded = self.has_succeeded or is_success
        too_many = self.most_failed_batches is not None and self._failed_batches >= self.most_failed_batches
        if is_success or (self.has_succeeded and not too_many):
            return
        if not finished:
            raise TrainingError(
                f"No rollout was finished after {self.timeout_seconds:.0f} s; are there runners, and can they work?"
            )
        error = await first_traceback(self.store, finished)
        raise TrainingError(f"All {len(finished)} rollouts failed, so there is nothing to learn from; {error}")


def messages_adapter(adapter: TraceAdapter[Any] | None, algorithm: str) -> TraceToMessages:
    """The given adapter if it gives conversations, else a new TraceToMessages.

    A log line names any other adapter that is not used; a TracerTraceToTriplet is the Trainer's default.
    """
    if isinstance(adapter, TraceToMessages):
        return adapter
    if adapter is not None and type(adapter) is not TracerTraceToTriplet:
        unused = type(adapter).__name__
        logger_of(algorithm).info(
            "%s reads conversations, so it uses a TraceToMessages and not the %s it was given.", algorithm, unused
        )
    return TraceToMessages()
