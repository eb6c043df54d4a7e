"""What an optimisation came to: its candidates, challenges of the best prompt, the result, and the run in the store."""

import asyncio
import difflib
import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from agentlightning.algorithm.base import Algorithm, Tasks
from agentlightning.algorithm.comparison import Estimate, PairedComparison, Verdict, summary_of
from agentlightning.errors import ConfigurationError
from agentlightning.store.base import LightningStore
from agentlightning.types import PromptTemplate, RolloutStatus, Run, RunStatus
from agentlightning.utils.clipped_text import counted
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.log_failures import announce
from agentlightning.utils.private_files import replaced_file

logger = logging.getLogger(__name__)


Rewards = Callable[[Sequence[int]], Awaitable[Sequence[float]]]
"""Gives the rewards on the validation tasks with these numbers."""


def logger_of(algorithm: str) -> logging.Logger:
    """That of an algorithm's public path, where applications listen, for a module that several algorithms share."""
    return logging.getLogger(f"agentlightning.algorithm.{algorithm.lower()}")


@dataclass(frozen=True)
class Challenge:
    """How a candidate fared against the best prompt of its time."""

    round: int
    incumbent: str
    candidate: str
    verdict: Verdict
    gain: Estimate
    alpha: float
    """How likely a candidate without a gain would have been called better."""
    tasks_needed: int | None = None
    """Validation tasks with which a run would find this gain in four cases of five, if the true one is as large as it
    seems; None if there seems to be none."""

    def __str__(self) -> str:
        return f"{self.candidate} against {self.incumbent}: {self.verdict}, gain {self.gain}"


async def challenged(
    comparison: PairedComparison, tasks: Sequence[int], incumbent: Rewards, candidate: Rewards
) -> PairedComparison:
    """Feed a comparison with pairs, in the order of the tasks, until it is over or there are no tasks left."""
    begin = 0
    while comparison.pairs_left and begin < len(tasks):
        chunk = tasks[begin : begin + min(8, comparison.pairs_left)]
        begin += len(chunk)
        before, after = await incumbent(chunk), await candidate(chunk)
        for pair in zip(before, after, strict=True):
            if comparison.pairs_left:
                comparison.add(*pair)
    return comparison


@dataclass(frozen=True)
class OptimisationResult:
    """The end of a run."""

    seed: Mapping[str, PromptTemplate]
    best: Mapping[str, PromptTemplate]
    best_version: str
    seed_score: float | None
    """Mean reward on the validation tasks that both were run on; None if there are none."""
    best_score: float | None
    gain: Estimate | None
    """From the seed to the best prompt, on those tasks; None if the seed is the best."""
    challenges: Sequence[Challenge] = ()
    spent: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=Counter)
    """Candidates that were rejected, answers that were empty, calls that failed."""
    stopped: str | None = None
    """Why the run ended before its last round; None if it did not."""
    seed_estimate: Estimate | None = None
    """`seed_score` with its interval and the number of rewards it is the mean of."""
    best_estimate: Estimate | None = None
    run_id: str | None = None
    tasks: str | None = None
    """The digest of the validation tasks."""

    @property
    def is_improved(self) -> bool:
        return dict(self.seed) != dict(self.best)

    @property
    def best_loser(self) -> Challenge | None:
        """Of the candidates that did not replace the best prompt, the one that came nearest; None if there is none."""
        losers = [one for one in self.challenges if one.verdict != "better" and one.incumbent == self.best_version]
        return max(losers, key=lambda one: one.gain.mean, default=None)

    def diff(self) -> str:
        """What changed from the seed to the best prompts; empty if nothing did."""
        lines: list[str] = []
        for name, before in self.seed.items():
            after = self.best[name].template
            lines += difflib.unified_diff(
                before.template.splitlines(), after.splitlines(), f"{name} (seed)", f"{name} (best)", lineterm=""
            )
        return "\n".join(lines)

    def headlines(self) -> list[str]:
        """The scores and what they rest on, in a few lines."""
        lines = []
        if self.is_improved:
            lines.append(f"The best prompt is {self.best_version}.")
        else:
            lines.append("The seed is still the best prompt: no candidate was found to be better.")
        if (loser := self.best_loser) is not None:
            needed = loser.tasks_needed
            decided = "it shows no gain" if needed is None else f"about {needed:,} validation tasks would decide it"
            gain = f"{_signed(loser.gain)} from {counted(loser.gain.n, 'pair')}"
            lines.append(f"The best that was not promoted is {loser.candidate}: gain {gain}; {decided}.")
        if self.seed_score is not None and self.best_score is not None and self.is_improved:
            best = self.best_estimate or f"{self.best_score:.3f}"
            lines.append(f"Validation score: {self.seed_estimate or f'{self.seed_score:.3f}'} -> {best}")
        elif self.seed_score is not None:
            lines.append(f"Validation score: {self.seed_estimate or f'{self.seed_score:.3f}'}")
        if self.gain is not None:
            lines.append(f"Gain {_signed(self.gain)}, from {counted(self.gain.n, 'pair')} of rollouts.")
        lines.extend(f"Round {one.round}: {one}" for one in self.challenges)
        if self.spent:
            rollouts, model_calls = int(self.spent["rollouts"]), int(self.spent["model_calls"])
            calls = f"{counted(rollouts, 'rollout')}, {counted(model_calls, 'model call')}"
            cost = f", {self.spent['cost']:.4g} in money" if self.spent["cost"] else ""
            lines.append(f"Spent: {calls}{cost}.")
        lines.extend(f"{what[0].upper()}{what[1:]}: {count}." for what, count in self.counts.items() if count)
        if self.stopped is not None:
            lines.append(f"Ended early: {self.stopped}.")
        return lines

    def __str__(self) -> str:
        return "\n".join([*self.headlines(), self.diff()]).rstrip()

    def to_json(self) -> JsonObject:
        """As it stands in the store and in the output file."""
        return {
            "best_version": self.best_version,
            "prompts": {name: prompt.model_dump() for name, prompt in self.best.items()},
            "seed": {name: prompt.model_dump() for name, prompt in self.seed.items()},
            "seed_score": self.seed_score,
            "best_score": self.best_score,
            "seed_estimate": summary_of(self.seed_estimate),
            "best_estimate": summary_of(self.best_estimate),
            "gain": None if self.gain is None else asdict(self.gain),
            "challenges": [asdict(one) for one in self.challenges],
            "spent": dict(self.spent),
            "counts": dict(self.counts),
            "stopped": self.stopped,
        }

    def report(self, algorithm: str, output: str | Path | None, *, resources_id: str) -> None:
        """Show it to the user, with the places where it lies, and write it to a file."""
        file = f" and in '{output}'" if self.write(output) else ""
        where = f"The best prompts are in the store under '{resources_id}'{file}."
        announce(logger_of(algorithm), f"{algorithm} is done.\n{self}\n{where}")

    def write(self, output: str | Path | None) -> bool:
        """Write it to a file, whole or not at all; None writes nothing. Whether it was written.

        What another run left there stays if it is of the same seed and tasks and no worse; else it is moved beside.
        """
        if output is None:
            return False
        path, result = Path(output), {**self.to_json(), "run_id": self.run_id, "tasks": self.tasks}
        former: JsonObject = {}
        with suppress(OSError, ValueError, TypeError):  # there is none, or it is something else
            former = dict(json.loads(path.read_bytes()))
        if path.exists() and former.get("run_id", "") != self.run_id:
            if self._is_no_better(former):
                score = former["best_score"]
                logger.warning("'%s' stays as an earlier run left it: this one found nothing above %s.", path, score)
                return False
            names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
            beside = next(name for name in names if not name.exists())
            with replaced_file(beside) as file:
                file.write(path.read_bytes())
            logger.warning("'%s' has the result of this run; the one of an earlier run is in '%s' now.", path, beside)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as file:
            file.write(json.dumps(result, ensure_ascii=False, indent=2).encode() + b"\n")
        return True

    def _is_no_better(self, former: JsonObject) -> bool:
        """Whether another run with the same seed alone found a better prompt, or reached this score on the same tasks.

        A file may lack the tasks.
        """
        score, seed = former.get("best_score"), {name: prompt.model_dump() for name, prompt in self.seed.items()}
        if former.get("seed") != seed or not isinstance(score, (int, float)):
            return False
        if not self.is_improved and former.get("prompts") != seed:
            return True
        is_same = former.get("tasks", self.tasks) == self.tasks
        return is_same and (not self.is_improved or self.best_score is None or self.best_score <= score)


class PromptOptimiser(Algorithm):
    """An algorithm whose result is prompts, and whose run goes on from a file."""

    result: OptimisationResult | None = None
    """How the last run ended."""
    state_file: str | Path | None = None

    def get_best_prompts(self) -> dict[str, PromptTemplate]:
        """The best prompts of the last run by name; ValueError if there was none."""
        if self.result is None:
            raise ConfigurationError(f"There are no best prompts yet; run {type(self).__name__} first.")
        return dict(self.result.best)

    def resume_hint(self) -> str:
        if self.state_file is not None:
            return f"Stopped; the same script goes on from '{self.state_file}'."
        return "Stopped; the same script begins anew; with state_file='…' it keeps what it finds."


def digest_of_tasks(tasks: Tasks) -> str:
    """Stands for tasks: results with the same can be compared."""
    rows = [repr(tasks[number]) for number in range(len(tasks))]
    return hashlib.blake2b("\n".join(rows).encode(errors="replace"), digest_size=16).hexdigest()


def _signed(gain: Estimate) -> str:
    return f"{gain.mean:+.3f}, interval [{gain.low:+.3f}, {gain.high:+.3f}]"


@dataclass
class RunRecord:
    """Writes to a run of its own, and its curves also to the trainer's. A store that keeps no runs is left alone."""

    store: LightningStore
    trainer_run_id: str | None
    _: KW_ONLY
    name: str
    """Of the run: that of the algorithm."""
    run_id: str | None = None

    @asynccontextmanager
    async def kept(
        self, config: JsonObject, run_id: str | None, summary: Callable[[], JsonObject]
    ) -> AsyncIterator[None]:
        """Begin the run, or go on with the one of this id; an error in the block ends it as failed or stopped."""
        metadata = {} if self.trainer_run_id is None else {"trainer_run_id": self.trainer_run_id}
        described = {"algorithm": self.name, **config}
        run = await self.store.start_run(self.name, config=described, metadata=metadata, run_id=run_id)
        self.run_id = run.run_id
        try:
            yield
        except BaseException as error:
            is_stopped = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
            found = {**summary(), "error": f"{type(error).__name__}: {error}"}
            await asyncio.shield(self.write("stopped" if is_stopped else "failed", found))
            raise

    def rollout_metadata(self) -> JsonObject:
        """What a rollout names as its run: that of the trainer, which has the verdict, or this one."""
        run_id = self.trainer_run_id or self.run_id
        return {} if run_id is None else {"run_id": run_id}

    async def draw(self, step: int, values: Mapping[str, float]) -> None:
        """Add to the curves."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for run_id in (self.run_id, self.trainer_run_id):
            if run_id is not None:
                await self.store.add_metrics(run_id, step, finite)

    async def write(self, status: RunStatus, summary: JsonObject) -> None:
        """Write down how things stand, and for which run of a trainer: one that goes on has another than at first."""
        if self.run_id is not None:
            of_trainer = {"trainer_run_id": self.trainer_run_id} if self.trainer_run_id is not None else {}
            await self.store.finish_run(self.run_id, status, summary={**summary, **of_trainer})


Fate = Literal["seed", "proposed", "rejected", "dropped", "kept", "refused", "promoted"]


@dataclass
class Candidate:
    """A set of prompts of which one was changed."""

    version: str
    resource_name: str
    """Of the prompt that was changed."""
    template: str
    """Its new text."""
    parent: str | None = None
    round: int = 0
    critique: str | None = None
    """What was said of the parent, and led to this."""
    scores: dict[int, float] = field(default_factory=dict)
    """Mean rewards on the validation batches, by round; comparable within a round alone."""
    fate: Fate = "proposed"
    """`rejected` without a rollout, `dropped` from the beam, `kept` in it, `refused` by the paired comparison with the
    best prompt, or `promoted` to be the best."""
    reason: str | None = None


class Lineage:
    """All candidates of a run, in the order in which they came up."""

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._by_version = {candidate.version: candidate for candidate in candidates}

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._by_version.values())

    def __len__(self) -> int:
        return len(self._by_version)

    def __contains__(self, version: str) -> bool:
        return version in self._by_version

    def __getitem__(self, version: str) -> Candidate:
        if version not in self._by_version:
            raise ConfigurationError(f"There is no candidate '{version}'; there are {', '.join(self._by_version)}.")
        return self._by_version[version]

    def add(self, candidate: Candidate) -> None:
        self._by_version[candidate.version] = candidate

    def settle(self, version: str, fate: Fate, reason: str | None = None) -> None:
        """Note what became of a candidate; one that was promoted or refused stays so, whatever the beam does."""
        candidate = self._by_version.get(version)
        if candidate is None or candidate.fate == "seed":
            return
        if candidate.fate in ("promoted", "refused") and fate in ("kept", "dropped"):
            return
        candidate.fate, candidate.reason = fate, reason if reason is not None else candidate.reason

    def ancestry(self, version: str) -> list[Candidate]:
        """The candidates from the seed to this one."""
        line: list[Candidate] = []
        current: str | None = version
        while current is not None:
            candidate = self[current]
            line.append(candidate)
            current = candidate.parent
        return line[::-1]

    def to_json(self) -> list[JsonObject]:
        """As it stands in the store, under `candidates` in the summary of the algorithm's run."""
        return [{**asdict(one), "scores": {str(n): score for n, score in one.scores.items()}} for one in self]

    @classmethod
    def of_run(cls, run: Run) -> "Lineage":
        """The lineage that a run left in the store."""
        if "candidates" not in run.summary:
            raise ConfigurationError(f"Run '{run.run_id}' has no candidates; take one with the name 'apo' or 'gepa'.")
        rows = [dict(row) for row in run.summary["candidates"]]
        return cls(
            Candidate(**{**row, "scores": {int(number): score for number, score in row["scores"].items()}})
            for row in rows
        )


# ---------------------------------------------------------------------- as APO has them


class RolloutResultForAPO(TypedDict):
    """What a rollout shows to the critic."""

    status: RolloutStatus
    final_reward: float | None
    spans: list[JsonObject]
    messages: list[Any]


@dataclass
class VersionedPromptTemplate:
    """A candidate: a prompt, and the other prompts of its set where there are several."""

    version: str
    prompt_template: PromptTemplate
    score: float | None = None
    """Mean reward on the last batch it was tried on."""
    resource_name: str | None = None
    """Of the prompt; None stands for the only one."""
    companions: dict[str, PromptTemplate] = field(default_factory=dict)
    """The other prompts, by name."""
    parent: str | None = None
    critique: str | None = None

    def prompts(self, resource_name: str) -> dict[str, PromptTemplate]:
        """All prompts of the set by name; `resource_name` is that of the only one."""
        return {**self.companions, self.resource_name or resource_name: self.prompt_template}

    def turned_to(self, resource_name: str) -> "VersionedPromptTemplate":
        """The same set, with another of its prompts in front."""
        if self.resource_name is None or self.resource_name == resource_name:
            return self
        prompts = self.prompts(resource_name)
        front = prompts.pop(resource_name)
        return VersionedPromptTemplate(
            self.version, front, self.score, resource_name=resource_name, companions=prompts, parent=self.parent
        )
