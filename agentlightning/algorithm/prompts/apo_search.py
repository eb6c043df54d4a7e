"""One run of APO: rounds of candidates, the best prompt defended against each of them, and the account of it all."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agentlightning.algorithm.base import Tasks
from agentlightning.algorithm.comparison import Gate, PairedComparison, estimate
from agentlightning.algorithm.prompts.budget import BudgetSpent
from agentlightning.algorithm.prompts.evaluation import Evaluator, RunJournal, RunState
from agentlightning.algorithm.prompts.results import (
    Candidate,
    Challenge,
    OptimisationResult,
    RolloutResultForAPO,
    RunRecord,
    VersionedPromptTemplate,
    challenged,
    digest_of_tasks,
)
from agentlightning.algorithm.prompts.templates import check_candidates_are_allowed, seed_prompts, why_unfit
from agentlightning.algorithm.utils import shuffled_batches
from agentlightning.errors import TrainingError
from agentlightning.types import Dataset
from agentlightning.utils.clipped_text import counted
from agentlightning.utils.json_values import JsonObject

if TYPE_CHECKING:
    from agentlightning.algorithm.prompts.apo import APO

logger = logging.getLogger("agentlightning.algorithm.apo.search")  # below the public path

BEST_RESOURCES_ID: Final = "apo-best"
"""Under which the best prompts are published; they are the latest resources then."""
LEAST_PAIRS: Final = 8
"""No candidate replaces the best prompt on fewer pairs."""
FAILED_CALLS: Final = "calls that failed"
NOT_PAYABLE: Final = "candidates that the budget did not allow"
_T = TypeVar("_T")
_Branch = tuple[int, int, VersionedPromptTemplate]
"""The place of the parent, the number of the branch, and the parent."""
_SETTINGS: Final = (
    *("gradient_model", "apply_edit_model", "diversity_temperature", "gradient_batch_size", "val_batch_size"),
    *("beam_width", "branch_factor", "beam_rounds", "run_initial_validation", "alpha", "reward_range", "seed"),
)


@dataclass
class TaskBatches(Iterator[list[_T]]):
    """Batches without end, each drawn once: a run that goes on finds them in its journal."""

    dataset: Dataset[_T]
    size: int
    journal: RunJournal
    name: str
    shuffle: Callable[[list[int]], object]
    """Puts numbers in random order."""
    last: list[int] = field(default_factory=list)
    """The numbers of the last batch."""
    _drawn: int = 0

    def __post_init__(self) -> None:
        self._draws = shuffled_batches(len(self.dataset), self.size, self.shuffle)

    def __next__(self) -> list[_T]:
        drawn = list(next(self._draws))
        self._drawn += 1
        self.last = self.journal.remember(f"{self.name} batch {self._drawn}", lambda: drawn)
        return [self.dataset[number] for number in self.last]


class Search:
    """A run over two data sets."""

    def __init__(self, apo: "APO[Any]", train_dataset: Tasks | None, val_dataset: Tasks | None) -> None:
        self._apo = apo
        self._train: Tasks = [] if train_dataset is None else train_dataset
        self._val: Tasks = [] if val_dataset is None else val_dataset
        self._tasks = digest_of_tasks(self._val)
        self._seeds = seed_prompts(apo.get_initial_resources(), "APO")
        self._rewards: dict[str, dict[int, float]] = defaultdict(dict)  # of versions, by number of the validation task
        self._seen: dict[str, set[int]] = defaultdict(set)  # tasks that chose a version
        self._record = RunRecord(apo.get_store(), apo.get_run_id(), name="apo")
        self._stopped: str | None = None
        self._challenges: list[Challenge] = []
        self._refused: set[str] = set()
        """Versions that do not challenge the best prompt again."""

    @property
    def _state(self) -> RunState:
        return self._apo._state

    async def run(self) -> OptimisationResult:
        """Search until the rounds are over or the budget is spent."""
        apo = self._apo
        if apo.has_trainer:
            check_candidates_are_allowed(self._seeds, apo.get_trainer())
        apo._initialize_beam(self._train, self._val)
        apo._begin(RunJournal(apo.state_file, self._identity()))
        self.evaluator = Evaluator(apo.get_store(), self._state, apo.rollout_batch_timeout, record=self._record)
        self._name, _, self._train_batches, self._val_batches = apo._initialize_beam(self._train, self._val)
        self._gate = None if apo.alpha is None else Gate(apo.alpha, max(1, apo.beam_rounds))
        self._best = self._seed()
        self._beam = [self._best]
        async with self._record.kept(self._identity(), self._state.journal.run_id, self._summary):
            await self._search()
        result = self._result()
        await self._publish()
        await self._record.write("succeeded", self._summary())
        result.report("APO", apo.output, resources_id=BEST_RESOURCES_ID)
        return result

    async def _search(self) -> None:
        try:
            if self._apo.run_initial_validation:
                await self._validate_seed()
            for number in range(1, self._apo.beam_rounds + 1):
                await self._round(number)
        except BudgetSpent as spent:
            self._stopped = f"the budget allows no more ({spent})"
            logger.info("APO ends: %s.", self._stopped)

    def _identity(self) -> JsonObject:
        """What makes a run what it is."""
        sizes = {"n_train": len(self._train), "n_val": len(self._val)}
        prompts = {name: prompt.model_dump() for name, prompt in self._seeds.items()}
        return {**{name: getattr(self._apo, name) for name in _SETTINGS}, **sizes, "seed_prompts": prompts}

    def _seed(self) -> VersionedPromptTemplate:
        seed = self._apo._create_versioned_prompt(self._seeds[self._name])
        seed.resource_name = self._name
        seed.companions = {name: prompt for name, prompt in self._seeds.items() if name != self._name}
        text = seed.prompt_template.template
        self._state.lineage.add(Candidate(seed.version, self._name, text, fate="seed"))
        self._apo._history_best_version = seed.version
        return seed

    async def _validate_seed(self) -> None:
        apo, seed, began = self._apo, self._best, time.monotonic()
        done, score = await self._validated(seed, range(len(self._val)), "[Round 00 | Seed] ")
        await self.note_score(seed, score, len(done), time.monotonic() - began)
        seed.score = apo._history_best_score = score
        await self._record.draw(0, {"apo/best_score": score, **self._spent()})

    # ------------------------------------------------------------------ a round

    async def _round(self, number: int) -> None:
        apo, self._state.round = self._apo, number
        parents = apo._sample_parent_prompts(self._beam, number)
        before, counts = self._state.counts.copy(), self._state.counts
        wanted = counted(len(parents) * apo.branch_factor, "candidate")
        logger.info("Round %d of %d makes up to %s.", number, apo.beam_rounds, wanted)
        candidates = await apo._generate_candidate_prompts(parents, self._name, self._train_batches, number)
        if not candidates and counts[NOT_PAYABLE] > before[NOT_PAYABLE]:
            raise BudgetSpent(f"no candidate of round {number} could be paid")
        if not candidates and apo._last_failure is not None and counts[FAILED_CALLS] > before[FAILED_CALLS]:
            raise TrainingError(f"Round {number} made no candidate; {apo._last_failure}") from apo._last_failure
        admitted = self._admitted(candidates, number)
        if admitted:
            await self._select(admitted, number)
        else:
            logger.warning("Round %d made no candidate that could be tried.", number)
        await self._defend(number, has_new=bool(admitted))
        figures = {"apo/candidates": len(candidates), "apo/rejected": len(candidates) - len(admitted)}
        await self._record.draw(number, {**figures, "apo/best_score": apo._history_best_score, **self._spent()})
        await self._record.write("running", self._summary())

    def affordable(self, branches: list[_Branch], number: int) -> list[_Branch]:
        """The branches for which a batch to criticise and one to select by can be paid, and a comparison at the end."""
        apo, ledger, count = self._apo, self._state.ledger, len(branches)
        left = ledger.rollouts_left() - len(self._beam) * apo.val_batch_size - LEAST_PAIRS
        by_rollouts = left // (apo.gradient_batch_size + apo.val_batch_size)
        payable = int(max(0, min(count, by_rollouts, ledger.calls_left() // 2)))  # a critique and an edit
        payable = self._state.journal.remember(f"round {number} branches", lambda: payable)
        if payable < 1:
            raise BudgetSpent(f"round {number} does not fit")
        if payable == count:
            return branches
        # Every parent gets its first branch before any gets its second.
        first = sorted(branches, key=lambda branch: (branch[1], branch[0]))[:payable]
        return sorted(first, key=lambda branch: (branch[0], branch[1]))

    async def note_score(self, prompt: VersionedPromptTemplate, score: float, tasks: int, seconds: float) -> None:
        """Log the first score of a candidate or the seed, and add it to the curves of its round."""
        origin = "the seed" if prompt.parent is None else f"from {prompt.parent}"
        on_tasks = counted(tasks, "task")
        logger.info("Candidate %s (%s) scores %.3f on %s, %.1f s.", prompt.version, origin, score, on_tasks, seconds)
        figures = {"score": score, "tasks": tasks, "seconds": seconds}
        if prompt.parent is not None:
            figures["parent"] = _number(prompt.parent)
        values = {f"apo/candidate_{name}": value for name, value in figures.items()}
        await self._record.draw(self._state.round, {"apo/candidate": _number(prompt.version), **values})

    def _admitted(self, candidates: Sequence[VersionedPromptTemplate], number: int) -> list[VersionedPromptTemplate]:
        """The candidates that can be tried; the others are noted with the reason."""
        lineage, admitted = self._state.lineage, []
        known = {_texts(one, self._name): one.version for one in self._beam}
        for one in candidates:
            name = one.resource_name or self._name
            row = Candidate(one.version, name, one.prompt_template.template, one.parent, number, critique=one.critique)
            lineage.add(row)
            texts = _texts(one, self._name)
            reason = why_unfit(one.prompt_template, self._seeds[name])
            if reason is None and texts in known:
                reason = f"it is the same as {known[texts]}"
            if reason is None:
                known[texts] = one.version
                admitted.append(one)
                continue
            self._state.counts["candidates that were rejected"] += 1
            lineage.settle(one.version, "rejected", reason)
            logger.info("Candidate %s (from %s) is rejected: %s.", one.version, one.parent, reason)
        return admitted

    async def _select(self, admitted: Sequence[VersionedPromptTemplate], number: int) -> None:
        """The next beam, from this one and the new candidates."""
        apo, tried = self._apo, [*self._beam, *admitted]
        self._beam = await apo._evaluate_and_select_beam(tried, self._name, self._val_batches, number)
        stayed = {one.version for one in self._beam}
        for one in tried:
            self._seen[one.version].update(getattr(self._val_batches, "last", ()))
            if one.version in self._state.lineage and one.score is not None:
                self._state.lineage[one.version].scores[number] = one.score
            self._state.lineage.settle(one.version, "kept" if one.version in stayed else "dropped")
        await self._record.draw(number, {"apo/beam_score": self._beam[0].score or 0.0})

    # ------------------------------------------------------------------ the best prompt

    async def _defend(self, number: int, *, has_new: bool) -> None:
        """Let a prompt of the beam challenge the best one."""
        apo = self._apo
        if self._gate is None:
            if has_new:  # the first of the beam replaces the best prompt if its mean on all tasks is higher
                await apo._update_best_prompt(self._beam, self._name, self._val, number)
                if apo._history_best_version == self._beam[0].version != self._best.version:
                    await self._promote(self._beam[0])
            return
        first = self._challenger()
        if first is None:
            self._gate.skip()
            return
        challenge = await self._challenge(first, number)
        self._challenges.append(challenge)
        logger.info("Round %d: %s.", number, challenge)
        gain = challenge.gain
        figures = {"apo/gain": gain.mean, "apo/gain_low": gain.low, "apo/gain_high": gain.high, "apo/pairs": gain.n}
        await self._record.draw(number, figures)
        if challenge.verdict == "better":
            apo._history_best_score = fmean(self._rewards[first.version].values())
            await self._promote(first, str(challenge))
        else:
            self._refused.add(first.version)
            self._state.lineage.settle(first.version, "refused", str(challenge))

    def _challenger(self) -> VersionedPromptTemplate | None:
        """The first of the beam that stands before the best prompt, and was not found wanting already."""
        for one in self._beam:
            if one.version == self._best.version:
                return None
            if one.version not in self._refused:
                return one
        return None

    async def _challenge(self, candidate: VersionedPromptTemplate, number: int) -> Challenge:
        assert self._gate is not None
        incumbent, chunks = self._best, count()

        async def rewards(prompt: VersionedPromptTemplate, numbers: Sequence[int]) -> list[float]:
            """From rollouts where they are not known yet."""
            known = self._rewards[prompt.version]
            missing = [task for task in numbers if task not in known]
            prefix = f"[Round {number:02d} | Pairs {next(chunks):02d}] "
            if missing:
                await self._validated(prompt, missing, prefix)
            return [known[task] for task in numbers]

        tasks = self._fresh_tasks(candidate, number)
        comparison = self._gate.compare(
            max_pairs=len(tasks), min_pairs=LEAST_PAIRS, reward_range=self._apo.reward_range
        )
        await challenged(
            comparison, tasks, lambda numbers: rewards(incumbent, numbers), lambda numbers: rewards(candidate, numbers)
        )
        needed, others = comparison.pairs_needed, len(self._seen[candidate.version])  # tasks that chose it
        return Challenge(
            *(number, incumbent.version, candidate.version, comparison.verdict),
            gain=comparison.estimate,
            alpha=comparison.alpha,
            tasks_needed=None if needed is None else needed + others,
        )

    def _fresh_tasks(self, candidate: VersionedPromptTemplate, number: int) -> list[int]:
        """Validation tasks in random order, without those by which the candidate was chosen, as many as can be paid."""
        apo = self._apo
        everything = range(len(self._val))
        fresh = [task for task in everything if task not in self._seen[candidate.version]]
        if len(fresh) < LEAST_PAIRS:
            # After 20 pairs a prompt is found that solves half of the tasks more; with the fewest, hardly any is.
            logger.warning(
                "Only %d validation tasks did not choose %s, so all are used, and its gain is flattered a little; a "
                "validation set of val_batch_size + %d tasks or more avoids that.",
                len(fresh),
                candidate.version,
                20,
            )
            fresh = list(everything)
        known = self._rewards[self._best.version]
        per_pair = 1 if all(task in known for task in fresh) else 2
        payable = int(min(len(fresh), self._state.ledger.rollouts_left() // per_pair))
        step = f"round {number} pairs"
        chosen: list[int] = self._state.journal.remember(step, lambda: apo._chance(step).sample(fresh, payable))
        if not chosen:
            raise BudgetSpent("there are no rollouts left to compare with")
        return chosen

    async def _promote(self, prompt: VersionedPromptTemplate, reason: str | None = None) -> None:
        apo = self._apo
        self._refused.add(self._best.version)  # it was the best, and is no more
        self._best = prompt
        apo._history_best_prompt = prompt.prompts(self._name)[self._name]
        apo._history_best_version = prompt.version
        self._state.lineage.settle(prompt.version, "promoted", reason)
        await self._publish()
        self._result().write(apo.output)

    async def _validated(
        self, prompt: VersionedPromptTemplate, numbers: Sequence[int], prefix: str
    ) -> tuple[list[RolloutResultForAPO], float]:
        """Run a prompt on validation tasks; its rewards are kept by task, a missing one as zero, if zero can be."""
        tasks = [self._val[number] for number in numbers]
        evaluated = await self._apo.evaluate_prompt_on_batch(prompt, self._name, tasks, mode="val", prefix=prefix)
        low, high = self._apo.reward_range
        found = self._apo._rewards.get(f"{prefix}val {prompt.version}", [])
        nothing = min(max(0.0, low), high)
        for number, reward in zip(numbers, found, strict=False):
            score = nothing if reward is None else reward
            self._rewards[prompt.version][number] = (
                score if self._apo.alpha is None else self.evaluator.bounded(score, (low, high))
            )
        return evaluated

    # ------------------------------------------------------------------ the account

    async def _publish(self) -> None:
        resources = self._apo._resources(self._best, self._name)
        await self._apo.get_store().update_resources(BEST_RESOURCES_ID, resources)

    def _spent(self) -> dict[str, float]:
        return {f"apo/{name}": value for name, value in self._state.ledger.spent.items()}

    def _result(self) -> OptimisationResult:
        apo, best = self._apo, self._best
        seed_rewards, best_rewards = self._rewards["v0"], self._rewards[best.version]
        pairs = [(seed_rewards[task], reward) for task, reward in best_rewards.items() if task in seed_rewards]
        gain = None
        if apo.alpha is not None and best.version != "v0" and pairs:
            planned = len(self._val)  # an interval must not be made for the number of pairs at which it was stopped
            test = PairedComparison(apo.alpha, max_pairs=planned, min_pairs=planned, reward_range=apo.reward_range)
            gain = test.with_all(pairs).estimate
        history = apo._history_best_score if apo._history_best_score > float("-inf") else None
        before = [before for before, _ in pairs] or list(seed_rewards.values())
        prompts = best.prompts(self._name)
        return OptimisationResult(
            seed=dict(self._seeds),
            best={name: prompts[name] for name in self._seeds},
            best_version=best.version,
            seed_score=fmean(before) if before else None,
            best_score=fmean(after for _, after in pairs) if pairs else history,
            gain=gain,
            challenges=tuple(self._challenges),
            spent=self._state.ledger.spent,
            counts=dict(self._state.counts),
            stopped=self._stopped,
            seed_estimate=estimate(before) if before else None,
            best_estimate=estimate([after for _, after in pairs]) if pairs else None,
            run_id=self._record.run_id,
            tasks=self._tasks,
        )

    def _summary(self) -> JsonObject:
        return {**self._result().to_json(), "candidates": self._state.lineage.to_json()}


def _number(version: str) -> int:
    return int(version.removeprefix("v"))


def _texts(prompt: VersionedPromptTemplate, name: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, one.template) for key, one in prompt.prompts(name).items()))
