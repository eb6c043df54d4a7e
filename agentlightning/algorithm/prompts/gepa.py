"""GEPA: prompts that evolve by reflection, with rollouts through the store and their traces as feedback.

The evolution is that of the `gepa` package, and its candidates run as rollouts (`gepa_engine`); a model that is shown
their traces writes new ones (`reflection`). The validation tasks are split: by one part candidates
are chosen, and on the other the best of them is compared with the seed, pair by pair. It replaces the seed only if it
is better there.

With a state file a run goes on after a kill. The engine draws by its seed alone; it is played again, and finds every
evaluation and every answer that it had in the file.
"""

import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentlightning.algorithm.base import Tasks
from agentlightning.algorithm.comparison import PairedComparison, estimate
from agentlightning.algorithm.prompts.budget import BudgetSpent, OptimisationBudget
from agentlightning.algorithm.prompts.evaluation import RunJournal, RunState, messages_adapter
from agentlightning.algorithm.prompts.gepa_engine import (
    CandidateEvaluator,
    Evaluation,
    Evolution,
    Member,
    new_text_in,
    reflection_question,
    require_gepa,
)
from agentlightning.algorithm.prompts.model import OptimiserModel, ReflectionModel
from agentlightning.algorithm.prompts.reflection import PromptTexts, Proposer, digest_of
from agentlightning.algorithm.prompts.results import (
    Candidate,
    Challenge,
    Lineage,
    OptimisationResult,
    PromptOptimiser,
    RunRecord,
    challenged,
    digest_of_tasks,
)
from agentlightning.algorithm.prompts.templates import check_candidates_are_allowed, seed_prompts
from agentlightning.algorithm.utils import check_least, running_proxy, with_llm_proxy
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.budgets import Prices
from agentlightning.types import LLM, NamedResources, PromptTemplate
from agentlightning.utils.clipped_text import counted
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.spelling import suggests_arguments

if TYPE_CHECKING:
    from openai import AsyncOpenAI


NAME: Final = "GEPA"
RUN_NAME: Final = "gepa"
BEST_RESOURCES_ID: Final = "gepa-best"
"""Under which the best prompts are published; they are the latest resources then."""
SEED_VERSION: Final = "v0"
ROLLOUTS_A_PAIR: Final = 2
_SETTINGS: Final = (
    *("reflection_model", "temperature", "iterations", "patience", "minibatch_size", "proposals", "front_size"),
    *("alpha", "reward_range", "seed"),
)


@suggests_arguments
@dataclass(eq=False, repr=False)
class GEPA(PromptOptimiser):
    """Evolves the prompt templates among the initial resources.

    Agents find the trainer's LLM proxy under `main_llm`, unless the initial resources hold a model.

    Args:
        model: Reflects and writes prompts: a client of any OpenAI-compatible endpoint, or a function from a text to an
            answer. None makes a client from OPENAI_API_KEY and OPENAI_BASE_URL when it is first needed.
        reflection_model: The name that the client asks for.
        temperature: At which it is sampled.
        iterations: How many there are at most.
        patience: Iterations without a new candidate in the pool, after which the evolution ends.
        minibatch_size: Training tasks that a reflection looks at.
        proposals: Candidates that are made at the same time, in each iteration.
        front_size: Validation tasks by which candidates are chosen; None takes half of them. The others decide whether
            the best candidate replaces the seed.
        alpha: How likely the run may call prompts better that are not; None promotes whoever has the higher mean.
        reward_range: Lowest and highest reward there can be. The evolution ends when the highest is reached everywhere.
        budget: What may be spent; see `OptimisationBudget`.
        rollout_batch_timeout: Seconds to wait for the rollouts of one batch.
        seed: Of the evolution's draws.
        state_file: Where the run keeps what it did, to go on from there after a kill; None keeps nothing.
        output: A JSON file for the best prompts.
    """

    model: "InitVar[AsyncOpenAI | ReflectionModel | None]" = None
    _: KW_ONLY
    reflection_model: str = "gpt-5-mini"
    temperature: float = 1.0
    iterations: int = 50
    patience: int = 15
    minibatch_size: int = 4
    proposals: int = 1
    front_size: int | None = None
    alpha: float | None = 0.05
    reward_range: tuple[float, float] = (0.0, 1.0)
    budget: OptimisationBudget = None  # type: ignore[assignment] # None is one without limits
    rollout_batch_timeout: float = 3600.0
    seed: int = 0
    state_file: str | Path | None = None
    output: str | Path | None = None

    def __post_init__(self, model: "AsyncOpenAI | ReflectionModel | None") -> None:
        require_gepa()
        self.budget = self.budget or OptimisationBudget()  # type: ignore[truthy-bool] # as above
        check_least(self, iterations=1, patience=1, minibatch_size=1, proposals=1, front_size=1)
        PairedComparison(self.alpha or 0.5, reward_range=self.reward_range)  # tells what is wrong with them
        if model is not None and not (hasattr(model, "chat") or callable(model)):
            raise ConfigurationError(
                f"A reflecting model is a client or a function; this is of type {type(model).__name__}."
            )
        self._check_money(model)
        self.optimiser = OptimiserModel(model, algorithm="GEPA")
        """Calls the model, and counts the calls."""
        self._lineage = Lineage()

    def _check_money(self, model: object) -> None:
        """ConfigurationError if money is limited, and what a call costs could not be known."""
        self.budget.check_models(self.reflection_model)
        is_function = model is not None and not hasattr(model, "chat")
        prices = self.budget.prices.get(self.reflection_model, Prices())
        if self.budget.cost is not None and is_function and (prices.read or prices.written):
            raise ConfigurationError(
                "A function does not tell how many tokens it read and wrote, so a budget of money cannot count them; "
                f"pass a client, or give '{self.reflection_model}' the price of nothing, Prices()."
            )

    async def ask(self, text: str) -> str | None:
        """The reflecting model's answer."""
        return await self.optimiser.ask(self.reflection_model, [{"role": "user", "content": text}], self.temperature)

    @property
    def candidates(self) -> Lineage:
        """All candidates of the last run."""
        return self._lineage

    def lineage(self, version: str | None = None) -> list[Candidate]:
        """The candidates from the seed to this version, or to the best one."""
        if version is None:
            if self.result is None:
                raise ConfigurationError("There are no candidates yet; run GEPA first.")
            version = self.result.best_version
        return self._lineage.ancestry(version)

    async def run(self, train_dataset: Tasks | None = None, val_dataset: Tasks | None = None) -> None:
        """Evolve the prompts, and publish the best ones."""
        prompts = seed_prompts(self.get_initial_resources(), "GEPA")
        if self.has_trainer:
            check_candidates_are_allowed(prompts, self.get_trainer())
        for label, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
            if dataset is None or len(dataset) == 0:
                raise ConfigurationError(f"GEPA needs tasks in both data sets; give the Trainer a {label}.")
        assert train_dataset is not None
        assert val_dataset is not None
        try:
            await self._run(prompts=prompts, train=train_dataset, val=val_dataset)
        finally:
            await self.optimiser.close()

    @asynccontextmanager
    async def dev_resources(self) -> AsyncIterator[NamedResources]:
        """The seed prompts, and whatever else agents run with; the trainer's proxy runs meanwhile."""
        seed_prompts(self.get_initial_resources(), "GEPA")
        async with running_proxy(self) as proxy:
            yield self._resources(proxy)

    @with_llm_proxy()
    async def _run(
        self,
        proxy: object = None,
        *,
        prompts: dict[str, PromptTemplate],
        train: Tasks,
        val: Tasks,
    ) -> None:
        run = GepaRun(self, self._resources(proxy), prompts, train=train, val=val)
        self._lineage, self.result = run.state.lineage, None
        self.result = await run.run()

    def _resources(self, proxy: Any) -> NamedResources:
        resources: NamedResources = dict(self.get_initial_resources() or {})
        if proxy is not None and not any(isinstance(one, LLM) for one in resources.values()):
            resources["main_llm"] = proxy.as_resource()
        return resources


class GepaRun:
    """A run over two data sets."""

    def __init__(
        self,
        gepa: "GEPA",
        resources: NamedResources,
        prompts: dict[str, PromptTemplate],
        *,
        train: Tasks,
        val: Tasks,
    ) -> None:
        self._gepa = gepa
        self._prompts = prompts
        self._seed: PromptTexts = {name: prompt.template for name, prompt in prompts.items()}
        self._front, self._judges = _split(len(val), gepa.front_size, gepa.seed)
        self._n_train, self._tasks = len(train), digest_of_tasks(val)
        self._identity: JsonObject = {
            "algorithm": RUN_NAME,
            **{name: getattr(gepa, name) for name in _SETTINGS},
            # A larger one would lead to another best candidate, and to a second test on the same tasks.
            "budget": [gepa.budget.rollouts, gepa.budget.model_calls, gepa.budget.cost, gepa.budget.rollout_cost],
            "n_train": len(train),
            "n_val": len(val),
            "seed_prompts": {name: prompt.model_dump() for name, prompt in prompts.items()},
        }
        reserve = self._reserve()  # tells what cannot work before a state file is begun
        self.state = RunState.of(RunJournal(gepa.state_file, self._identity, algorithm=NAME), gepa.budget)
        gepa.optimiser.ledger = self.state.ledger
        self.state.ledger.kept_rollouts = reserve
        self._challenge: Challenge | None = None
        self._record = RunRecord(gepa.get_store(), gepa.get_run_id(), name=RUN_NAME)
        self._evaluator = CandidateEvaluator(
            gepa.get_store(),
            self.state,
            resources,
            tasks={"train": train, "val": val},
            adapter=messages_adapter(gepa._adapter, NAME),
            reward_range=gepa.reward_range,
            timeout_seconds=gepa.rollout_batch_timeout,
            key=self.state.journal.remember("key", lambda: f"{RUN_NAME}-{uuid.uuid4().hex[:12]}"),
            record=self._record,
        )
        first = next(iter(self._seed))
        self.state.lineage.add(Candidate(SEED_VERSION, first, self._seed[first], fate="seed"))
        proposer = Proposer(
            gepa.ask,
            prompts,
            self.state,
            render=reflection_question,
            extract=new_text_in,
            version_of={digest_of(self._seed): SEED_VERSION},
        )
        self._evolution = Evolution(self._evaluator, proposer, gepa)

    def _reserve(self) -> int:
        """Rollouts that are kept for the comparison; ConfigurationError if it could not decide anything."""
        alpha, budget = self._gepa.alpha, self._gepa.budget.most_rollouts
        most, fewest = len(self._judges), 1
        if alpha is not None:
            fewest = PairedComparison(alpha, max_pairs=most, reward_range=self._gepa.reward_range).fewest_pairs
        if fewest > most:
            raise ConfigurationError(
                f"{most} validation tasks are left to compare on, and a comparison takes at least {fewest} to decide;"
                " give more of them, a smaller front_size, or alpha=None to do without."
            )
        if budget is None:
            return 0
        before = 2 * (len(self._front) + self._gepa.minibatch_size)  # of the seed and of one candidate
        least = before + ROLLOUTS_A_PAIR * fewest
        if budget < least:
            raise ConfigurationError(
                f"A budget of {counted(budget, 'rollout')} is too small: the scores of the seed and of one candidate, "
                f"and their comparison, take {least}; raise it, or take a smaller front_size or minibatch_size."
            )
        # A third at most; more only where less could decide nothing.
        kept = min(budget - before, max(budget // 3, ROLLOUTS_A_PAIR * fewest))
        return ROLLOUTS_A_PAIR * min(most, kept // ROLLOUTS_A_PAIR)

    # ------------------------------------------------------------------ the run

    async def run(self) -> OptimisationResult:
        """Evolve, compare, publish."""
        async with self._record.kept(self._identity, self._evaluator.key, self._account):
            await self._evolution.run(self._seed, range(self._n_train), self._front)
            result = await self._judged()
        best = {name: prompt.template for name, prompt in result.best.items()}
        await self._gepa.get_store().update_resources(BEST_RESOURCES_ID, self._evaluator.resources_with(best))
        await self._record.write("succeeded", {**result.to_json(), **self._account()})
        result.report(NAME, self._gepa.output, resources_id=BEST_RESOURCES_ID)
        return result

    def _account(self) -> JsonObject:
        state = self.state
        return {"candidates": state.lineage.to_json(), "spent": state.ledger.spent, "counts": dict(state.counts)}

    # ------------------------------------------------------------------ the comparison

    async def _judged(self) -> OptimisationResult:
        """The outcome: the best candidate if it is better than the seed, otherwise the seed."""
        stopped, best = self._evolution.stopped, None
        before = self._evolution.pool[0].scores if self._evolution.pool else ()
        pairs: list[tuple[float, float]] = []
        if self._evolution.pool and self._evolution.best.version != SEED_VERSION:
            best = self._evolution.best
            try:
                await self._challenge_seed(best, pairs)
            except BudgetSpent as spent:
                stopped = f"the budget allows no more ({spent})"
        is_better = self._challenge is not None and self._challenge.verdict == "better"
        if best is not None:
            fate_reason = str(self._challenge) if self._challenge is not None else "it could not be compared"
            self.state.lineage.settle(best.version, "promoted" if is_better else "refused", fate_reason)
        chosen = best if best is not None and is_better else None
        if pairs:
            before = [reward for reward, _ in pairs]
        seed_estimate = estimate(before) if before else None
        best_estimate = seed_estimate if chosen is None else estimate([after for _, after in pairs])
        texts = self._seed if chosen is None else chosen.texts
        return OptimisationResult(
            seed=self._prompts,
            best={name: one.model_copy(update={"template": texts[name]}) for name, one in self._prompts.items()},
            best_version=SEED_VERSION if chosen is None else chosen.version,
            seed_score=None if seed_estimate is None else seed_estimate.mean,
            best_score=None if best_estimate is None else best_estimate.mean,
            gain=None if chosen is None or self._challenge is None else self._challenge.gain,
            challenges=[] if self._challenge is None else [self._challenge],
            spent=self.state.ledger.spent,
            counts=self.state.counts,
            stopped=stopped,
            seed_estimate=seed_estimate,
            best_estimate=best_estimate,
            run_id=self._record.run_id,
            tasks=self._tasks,
        )

    async def _challenge_seed(self, best: Member, pairs: list[tuple[float, float]]) -> None:
        """Run both on the tasks that chose nothing; the pairs are those that the verdict rests on."""
        self.state.ledger.kept_rollouts = 0
        affordable = min(float(len(self._judges)), self.state.ledger.rollouts_left() // ROLLOUTS_A_PAIR)
        tasks = self._judges[: self.state.journal.remember("pairs", lambda: int(affordable))]
        if not tasks:
            raise BudgetSpent("no rollouts are left for the comparison")
        alpha = self._gepa.alpha
        comparison = PairedComparison(
            0.05 if alpha is None else alpha,  # for the interval of a run without a test
            max_pairs=len(tasks),
            min_pairs=len(tasks) if alpha is None else 8,
            reward_range=self._gepa.reward_range,
        )
        scores: dict[str, list[float]] = {SEED_VERSION: [], best.version: []}

        async def rewards(version: str, texts: PromptTexts, numbers: Sequence[int]) -> list[float]:
            (outcomes,) = await self._evaluator.evaluate([Evaluation(texts, "val", numbers)])
            scores[version] += [outcome.score for outcome in outcomes]
            return scores[version][-len(numbers) :]

        try:
            await challenged(
                comparison,
                tasks,
                lambda numbers: rewards(SEED_VERSION, self._seed, numbers),
                lambda numbers: rewards(best.version, best.texts, numbers),
            )
        finally:
            pairs += list(zip(*scores.values(), strict=False))[: comparison.pairs]
            if pairs:
                self._challenge = self._verdict(best, comparison)

    def _verdict(self, best: Member, comparison: PairedComparison) -> Challenge:
        verdict = comparison.verdict
        if self._gepa.alpha is None:
            verdict = "better" if comparison.estimate.mean > 0 else "not better"
        needed, front = comparison.pairs_needed, self._gepa.front_size  # of all tasks, some choose by the front
        return Challenge(
            round=self.state.round,
            incumbent=SEED_VERSION,
            candidate=best.version,
            verdict=verdict,
            gain=comparison.estimate,
            alpha=comparison.alpha,
            tasks_needed=None if needed is None else needed + (needed if front is None else front),
        )


def _split(count: int, front_size: int | None, seed: int) -> tuple[list[int], list[int]]:
    """Validation tasks by which candidates are chosen, and those that judge the best of them; at random."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    size = count // 2 if front_size is None else front_size
    if not 0 < size < count:
        raise ConfigurationError(
            f"Of {count} validation tasks {size} cannot choose candidates and leave others to judge them; give more of "
            "them, or another front_size."
        )
    return sorted(numbers[:size]), numbers[size:]
