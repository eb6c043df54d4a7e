"""APO, automatic prompt optimisation: a beam search over prompts, whose steps are critiques by a language model.

In each round the prompts of the beam run on tasks; a model criticises them by what happened, and another rewrites them
as the critique says. The new prompts and the old ones are tried on the same batch of validation tasks, and the best
stay in the beam. The first of them that was not refused before challenges the best prompt so far, which it replaces
only if a paired comparison on tasks that did not choose it says that it is better.

The methods are the steps; `apo_search` makes a run of them. With a state file a run goes on after a kill (`journal`).
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.comparison import is_finite
from agentlightning.algorithm.prompts import poml
from agentlightning.algorithm.prompts.apo_search import FAILED_CALLS, NOT_PAYABLE, Search, TaskBatches
from agentlightning.algorithm.prompts.budget import BudgetSpent, OptimisationBudget
from agentlightning.algorithm.prompts.evaluation import Evaluator, RunJournal, RunState, messages_adapter
from agentlightning.algorithm.prompts.model import OptimiserFailed, OptimiserModel
from agentlightning.algorithm.prompts.poml import APPLY_EDIT_PROMPT_FILES, GRADIENT_PROMPT_FILES
from agentlightning.algorithm.prompts.results import (
    Candidate,
    Lineage,
    PromptOptimiser,
    RolloutResultForAPO,
    VersionedPromptTemplate,
)
from agentlightning.algorithm.prompts.templates import seed_prompts, unwrapped
from agentlightning.algorithm.utils import batch_iter_over_dataset, check_least, gathered
from agentlightning.emitter import find_final_reward
from agentlightning.errors import ConfigurationError
from agentlightning.types import Dataset, NamedResources, PromptTemplate, Rollout, RolloutMode, RolloutStatus
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.spelling import suggests_arguments

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = [
    "APO",
    "APPLY_EDIT_PROMPT_FILES",
    "GRADIENT_PROMPT_FILES",
    "RolloutResultForAPO",
    "VersionedPromptTemplate",
    "batch_iter_over_dataset",
]

logger = logging.getLogger("agentlightning.algorithm.apo.apo")  # the public path

_TaskT = TypeVar("_TaskT")


@suggests_arguments
@dataclass(eq=False, repr=False)
class APO(PromptOptimiser, Generic[_TaskT]):
    """Optimises the prompt templates among the initial resources; `APO[Task](client)` names the type of tasks.

    Args:
        async_openai_client: Asks the optimiser's models; None makes one from OPENAI_API_KEY and OPENAI_BASE_URL when it
            is first needed.
        gradient_model: Writes critiques.
        apply_edit_model: Rewrites prompts.
        diversity_temperature: At which both are sampled.
        gradient_batch_size: Rollouts that a critique looks at.
        val_batch_size: Validation tasks on which the candidates of a round are tried.
        beam_width: How many prompts stay after a round.
        branch_factor: How many candidates are made from each of them.
        beam_rounds: How many rounds there are.
        rollout_batch_timeout: Seconds to wait for the rollouts of one batch.
        run_initial_validation: Run the seed on the whole validation set first.
        alpha: How likely the run may call a prompt better that is not; None promotes whoever has the higher mean on the
            whole validation set.
        reward_range: Lowest and highest reward there can be; the comparison rests on it.
        budget: What may be spent; see `OptimisationBudget`.
        concurrency: How many candidates are made, or tried, at the same time.
        seed: Of all that is drawn: a model and agents that answer the same get the same search. None draws from the
            `random` module.
        state_file: Where the run keeps what it did, to go on from there after a kill; None keeps nothing.
        output: A JSON file for the best prompts, written whenever there is a better one.
        _poml_trace: Log every prompt for the optimiser's models as it is rendered, at INFO.
    """

    async_openai_client: "InitVar[AsyncOpenAI | None]" = None
    _: KW_ONLY
    gradient_model: str = "gpt-5-mini"
    apply_edit_model: str = "gpt-4.1-mini"
    diversity_temperature: float = 1.0
    gradient_batch_size: int = 4
    val_batch_size: int = 16
    beam_width: int = 4
    branch_factor: int = 4
    beam_rounds: int = 3
    rollout_batch_timeout: float = 3600.0
    run_initial_validation: bool = True
    alpha: float | None = 0.05
    reward_range: tuple[float, float] = (0.0, 1.0)
    budget: OptimisationBudget = None  # type: ignore[assignment] # None is one without limits
    concurrency: int = 8
    seed: int | None = None
    state_file: str | Path | None = None
    output: str | Path | None = None
    _poml_trace: bool = False

    def __post_init__(self, async_openai_client: "AsyncOpenAI | None") -> None:
        self.budget = self.budget or OptimisationBudget()  # type: ignore[truthy-bool] # as above
        check_least(self, gradient_batch_size=1, val_batch_size=1, beam_width=1, branch_factor=1, concurrency=1)
        self.budget.check_models(self.gradient_model, self.apply_edit_model)
        self._optimiser = OptimiserModel(async_openai_client)
        self._history_best_prompt: PromptTemplate | None = None
        self._history_best_score = -math.inf
        self._history_best_version: str | None = None
        self._search: Search | None = None  # while it runs
        self._begin(RunJournal())

    def _begin(self, journal: RunJournal) -> None:
        """Forget an earlier run."""
        self._state = RunState.of(journal, self.budget)
        self._optimiser.ledger = self._state.ledger
        self._last_failure: OptimiserFailed | None = None
        self._critiques: dict[str, str | None] = {}
        self._unanswered: list[str] = []  # candidates of this round without an answer
        self._rewards: dict[str, list[float | None]] = {}
        self._version_counter = 0

    def _chance(self, purpose: str | None) -> Any:
        """What draws for a purpose: a generator of its own, so that it does not matter what is drawn meanwhile.

        Without a seed, or outside a run, it is the `random` module.
        """
        return random if self.seed is None or purpose is None else random.Random(f"{self.seed} {purpose}")

    # ------------------------------------------------------------------ what it is given, and what it gives

    def get_seed_prompt_template(self) -> tuple[str, PromptTemplate]:
        """The first prompt template among the initial resources; ValueError if there is none."""
        return next(iter(seed_prompts(self.get_initial_resources(), "APO").items()))

    def get_adapter(self) -> TraceToMessages:
        """The adapter, if it is a TraceToMessages; else one of APO's own, for only that gives conversations."""
        self._adapter = adapter = messages_adapter(self._adapter, "APO")
        return adapter

    def get_best_prompt(self) -> PromptTemplate:
        """The best prompt of the last run; ValueError if there was none."""
        if self._history_best_prompt is None:
            raise ConfigurationError("There is no best prompt yet; run APO first.")
        return self._history_best_prompt

    def lineage(self, version: str | None = None) -> list[Candidate]:
        """The candidates from the seed to this version, or to the best one."""
        chosen = version or self._history_best_version
        if chosen is None:
            raise ConfigurationError("There is no best prompt yet; run APO first.")
        return self._state.lineage.ancestry(chosen)

    @property
    def candidates(self) -> Lineage:
        """All candidates of the last run."""
        return self._state.lineage

    # ------------------------------------------------------------------ critique and edit

    async def compute_textual_gradient(
        self,
        current_prompt: VersionedPromptTemplate,
        rollout_results: Sequence[RolloutResultForAPO],
        *,
        prefix: str | None = None,
    ) -> str | None:
        """A critique of a prompt by what its rollouts show; None if the model said nothing."""
        chance = self._chance(None if prefix is None else f"{prefix}critique")
        template = chance.choice(GRADIENT_PROMPT_FILES)
        if len(rollout_results) < self.gradient_batch_size:
            shown, wanted = list(rollout_results), self.gradient_batch_size
            logger.warning("%sA critique should look at %d rollouts; there are %d.", prefix or "", wanted, len(shown))
        else:
            shown = chance.sample(list(rollout_results), self.gradient_batch_size)
        context = {"experiments": shown, "prompt_template": current_prompt.prompt_template.template}
        messages = await self._rendered(template, context)
        return await self._optimiser.ask(self.gradient_model, messages, self.diversity_temperature)

    async def textual_gradient_and_apply_edit(
        self,
        current_prompt: VersionedPromptTemplate,
        rollout: Sequence[RolloutResultForAPO],
        *,
        prefix: str | None = None,
    ) -> str | None:
        """The text of a new prompt; that of the old one if there is no critique, None if the model said nothing."""
        step = f"{prefix}edit"
        if prefix is not None and step in self._state.journal:
            self._critiques[prefix], edited = self._state.journal.get(step)
            return None if edited is None else str(edited)
        critique = await self.compute_textual_gradient(current_prompt, rollout, prefix=prefix)
        text = current_prompt.prompt_template.template
        if not critique:
            logger.error("%sThere is no critique of %s; it stays as it is.", prefix or "", current_prompt.version)
            self._state.counts["empty critiques"] += 1
            self._keep_edit(prefix, None, text)
            return text
        context = {"prompt_template": text, "critique": critique}
        chance = self._chance(None if prefix is None else step)
        messages = await self._rendered(chance.choice(APPLY_EDIT_PROMPT_FILES), context)
        edited = await self._optimiser.ask(self.apply_edit_model, messages, self.diversity_temperature)
        self._keep_edit(prefix, critique, edited)
        return edited

    def _keep_edit(self, prefix: str | None, critique: str | None, edited: str | None) -> None:
        if prefix is not None:
            self._critiques[prefix] = critique
            self._state.journal.put(f"{prefix}edit", [critique, edited])

    async def _rendered(self, template: Path, context: JsonObject) -> Any:
        """Chat messages of a POML file; rendered in a thread, for traces may be long."""
        rendered = await asyncio.to_thread(poml.poml, template, context=context, format="openai_chat")
        if self._poml_trace:
            logger.info("Rendered %s: %s", template.name, rendered["messages"])
        return rendered["messages"]

    # ------------------------------------------------------------------ rollouts

    async def get_rollout_results(
        self, rollouts: Sequence[Rollout], *, prefix: str | None = None
    ) -> list[RolloutResultForAPO]:
        """What rollouts left behind."""
        store, adapter = self.get_store(), self.get_adapter()
        results: list[RolloutResultForAPO] = []
        for rollout in rollouts:
            spans = list(await store.query_spans(rollout.rollout_id))
            messages: list[Any] = []
            try:
                messages = list(adapter.adapt(spans))
            except ValueError as unreadable:  # one odd trace is no reason to end a run
                logger.warning("%sRollout %s shows no messages: %s", prefix or "", rollout.rollout_id, unreadable)
                self._state.counts["traces that could not be read"] += 1
            dumped, reward = [span.model_dump() for span in spans], find_final_reward(spans)
            reward = reward if is_finite(reward or 0.0) else None
            results.append({"status": rollout.status, "final_reward": reward, "spans": dumped, "messages": messages})
        return results

    async def evaluate_prompt_on_batch(
        self,
        prompt: VersionedPromptTemplate,
        resource_name: str,
        dataset: Sequence[_TaskT],
        mode: RolloutMode,
        *,
        prefix: str | None = None,
    ) -> tuple[list[RolloutResultForAPO], float]:
        """Run a prompt on tasks; the results of what was finished in time, and their mean reward.

        A rollout without a reward counts as zero.
        """
        tasks = [dataset[number] for number in range(len(dataset))]
        step = f"{prefix or ''}{mode} {prompt.version}"
        if prefix is not None and f"{step} done" in self._state.journal:
            return self._remembered(step, mode)
        store, name = self.get_store(), None if prefix is None else step
        evaluator = Evaluator(store, self._state, self.rollout_batch_timeout)
        if self._search is not None:
            evaluator = self._search.evaluator
        hold = await evaluator.reserve(name, len(tasks))
        update = await store.update_resources(prompt.version, self._resources(prompt, resource_name))
        sent, finished = await evaluator.run(name, tasks, mode=mode, resources_id=update.resources_id)
        results = await self.get_rollout_results(finished, prefix=prefix)
        traces = ([span.get("attributes", {}) for span in result["spans"]] for result in results)
        self._state.ledger.end_rollouts(hold, traces, unfinished=len(sent) - len(finished))
        average = fmean([result["final_reward"] or 0.0 for result in results] or [0.0])
        by_id = {one.rollout_id: result["final_reward"] for one, result in zip(finished, results, strict=False)}
        self._rewards[step] = [by_id.get(rollout_id) for rollout_id in sent]
        if self._search is not None:
            await evaluator.check(finished)
        if prefix is not None:  # a critique needs to see more than rewards
            self._state.journal.put(f"{step} done", [results if mode == "train" else self._rewards[step], average])
        logger.debug("%sPrompt %s scores %.3f on %d tasks.", prefix or "", prompt.version, average, len(results))
        return results, average

    def _remembered(self, step: str, mode: RolloutMode) -> tuple[list[RolloutResultForAPO], float]:
        """An evaluation that was finished before the run was broken off."""
        kept, average = self._state.journal.get(f"{step} done")
        if self._search is not None:
            self._search.evaluator.has_succeeded = True
        if mode == "train":
            return kept, average
        self._rewards[step] = kept  # None where a rollout was late
        status: dict[bool, RolloutStatus] = {True: "cancelled", False: "succeeded"}
        return [
            {"status": status[reward is None], "final_reward": reward, "spans": [], "messages": []} for reward in kept
        ], average

    def _resources(self, prompt: VersionedPromptTemplate, resource_name: str) -> NamedResources:
        """What a rollout is given: the prompts, and whatever else the user put beside them."""
        return {**(self.get_initial_resources() or {}), **prompt.prompts(resource_name)}

    # ------------------------------------------------------------------ the beam

    def _create_versioned_prompt(
        self, prompt: PromptTemplate, *, score: float | None = None
    ) -> VersionedPromptTemplate:
        version = f"v{self._version_counter}"
        self._version_counter += 1
        return VersionedPromptTemplate(version, prompt, score)

    def _initialize_beam(
        self, train_dataset: Dataset[_TaskT] | None, val_dataset: Dataset[_TaskT] | None
    ) -> tuple[str, PromptTemplate, Iterator[Sequence[_TaskT]], Iterator[Sequence[_TaskT]]]:
        """The seed with its name, and endless batches of both data sets; the best prompt is the seed again."""
        resource_name, seed = self.get_seed_prompt_template()
        if train_dataset is None or val_dataset is None or not len(train_dataset) or not len(val_dataset):
            raise ConfigurationError(
                "APO needs tasks to learn from and to validate; give the Trainer a train_dataset and a val_dataset."
            )
        self._history_best_prompt = seed
        self._history_best_score = -math.inf
        self._history_best_version = None
        shuffle = {name: self._chance(f"{name} batches").shuffle for name in ("train", "val")}
        train = TaskBatches(train_dataset, self.gradient_batch_size, self._state.journal, "train", shuffle["train"])
        val = TaskBatches(val_dataset, self.val_batch_size, self._state.journal, "val", shuffle["val"])
        return resource_name, seed, train, val

    def _sample_parent_prompts(
        self, beam: Sequence[VersionedPromptTemplate], round_num: int
    ) -> list[tuple[int, VersionedPromptTemplate]]:
        """As many parents as the beam is wide, with their places; a beam with fewer prompts gives them in turn."""
        if len(beam) < self.beam_width:
            return [(number % len(beam), beam[number % len(beam)]) for number in range(self.beam_width)]
        step, places = f"round {round_num} parents", range(len(beam))
        chosen = self._state.journal.remember(step, lambda: self._chance(step).sample(places, self.beam_width))
        return [(number, beam[number]) for number in chosen]

    async def _generate_candidate_prompts(
        self,
        parent_prompts: Sequence[tuple[int, VersionedPromptTemplate]],
        resource_name: str,
        grad_dataset_iterator: Iterator[Sequence[_TaskT]],
        round_num: int,
    ) -> list[VersionedPromptTemplate]:
        """New prompts, `branch_factor` from each parent at most; each parent is run on a batch for each of them."""
        resources = self.get_initial_resources() or {}
        prompts = [name for name, one in resources.items() if isinstance(one, PromptTemplate)]
        names = prompts if resource_name in prompts else [resource_name]  # which are changed in turn
        branches = [
            (place, number, parent.turned_to(names[(round_num + place + number) % len(names)]))
            for place, (_, parent) in enumerate(parent_prompts)
            for number in range(self.branch_factor)
        ]
        if self._search is not None:
            branches = self._search.affordable(branches, round_num)
        batches = [next(grad_dataset_iterator) for _ in branches]
        works = [
            self._edited(parent, resource_name, batch, f"[Round {round_num:02d} | Branch {place:02d}-{number:02d}] ")
            for (place, number, parent), batch in zip(branches, batches, strict=True)
        ]
        edits = await gathered(works, limit=self.concurrency)
        for prefix in self._unanswered if any(edits) else ():  # a run that ends for want of them asks again
            self._keep_edit(prefix, None, None)
        self._unanswered.clear()
        candidates = []
        for (_, _, parent), edited in zip(branches, edits, strict=True):
            if edited is None:
                continue
            template = PromptTemplate(template=edited[0], engine=parent.prompt_template.engine)
            candidate = self._create_versioned_prompt(template)
            candidate.resource_name, candidate.companions = parent.resource_name, parent.companions
            candidate.parent, candidate.critique = parent.version, edited[1]
            candidates.append(candidate)
        return candidates

    async def _edited(
        self, parent: VersionedPromptTemplate, resource_name: str, batch: Sequence[_TaskT], prefix: str
    ) -> tuple[str, str | None] | None:
        """A new text and the critique behind it; None, and counted, where there is none."""
        results: list[RolloutResultForAPO] = []
        try:
            if f"{prefix}edit" not in self._state.journal:
                results, _ = await self.evaluate_prompt_on_batch(
                    parent, resource_name, batch, mode="train", prefix=prefix
                )
            text = await self.textual_gradient_and_apply_edit(parent, results, prefix=prefix)
        except BudgetSpent as spent:
            logger.info("%sNo candidate: %s.", prefix, spent)
            self._state.counts[NOT_PAYABLE] += 1
            self._unanswered.append(prefix)
            return None
        except OptimiserFailed as failed:
            logger.warning("%sNo candidate: %s", prefix, failed)
            self._state.counts[FAILED_CALLS] += 1
            self._last_failure = failed
            self._unanswered.append(prefix)
            return None
        if not text:
            self._state.counts["empty edits"] += 1
            logger.warning("%sThe model wrote no prompt.", prefix)
            return None
        return unwrapped(text), self._critiques.get(prefix)

    async def _evaluate_and_select_beam(
        self,
        candidates: Sequence[VersionedPromptTemplate],
        resource_name: str,
        val_dataset_iterator: Iterator[Sequence[_TaskT]],
        round_num: int,
    ) -> list[VersionedPromptTemplate]:
        """The best of the candidates on one batch of validation tasks, the best first; ValueError if there are none."""
        if not candidates:
            raise ConfigurationError("No beam candidates any more; every one was skipped or rejected.")
        batch = next(val_dataset_iterator)
        works = [self._scored(candidate, resource_name, batch, round_num) for candidate in candidates]
        for candidate, score in zip(candidates, await gathered(works, limit=self.concurrency), strict=True):
            candidate.score = score
        ranked = sorted(candidates, key=lambda candidate: candidate.score or 0.0, reverse=True)
        return ranked[: self.beam_width]

    async def _scored(
        self, candidate: VersionedPromptTemplate, resource_name: str, batch: Sequence[_TaskT], round_num: int
    ) -> float:
        """The score on a batch by which the beam is selected; the first score of a candidate is told at once."""
        prefix, began = f"[Round {round_num:02d} | Select] ", time.monotonic()
        results, score = await self.evaluate_prompt_on_batch(candidate, resource_name, batch, mode="val", prefix=prefix)
        if self._search is not None and candidate.score is None:
            await self._search.note_score(candidate, score, len(results), time.monotonic() - began)
        return score

    async def _update_best_prompt(
        self,
        beam: Sequence[VersionedPromptTemplate],
        resource_name: str,
        val_dataset: Dataset[_TaskT],
        round_num: int,
    ) -> None:
        """Run the first of the beam on the whole validation set; it replaces the best prompt if its mean is higher."""
        first = beam[0]
        tasks = [val_dataset[number] for number in range(len(val_dataset))]
        prefix = f"[Round {round_num:02d} | Validate] "
        _, score = await self.evaluate_prompt_on_batch(first, resource_name, tasks, mode="val", prefix=prefix)
        if score > self._history_best_score:
            self._history_best_prompt = first.prompts(resource_name)[resource_name]
            self._history_best_score, self._history_best_version = score, first.version

    # ------------------------------------------------------------------ the run

    def dev_resources(self) -> NamedResources:
        """The seed prompts, and whatever else the user put beside them."""
        return {**(self.get_initial_resources() or {}), **seed_prompts(self.get_initial_resources(), "APO")}

    async def run(
        self, train_dataset: Dataset[_TaskT] | None = None, val_dataset: Dataset[_TaskT] | None = None
    ) -> None:
        """Search for better prompts; `result` tells what was found."""
        self.result = None
        self._search = Search(self, train_dataset, val_dataset)
        try:
            self.result = await self._search.run()
        finally:
            self._search = None
            await self._optimiser.close()
