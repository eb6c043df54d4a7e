"""GEPA: prompts that evolve by reflection, with rollouts through the store and their traces as feedback.

The evolution is that of the `gepa` package (`gepa_engine`); its candidates run as rollouts (`gepa_rollouts`), and a
model that is shown their traces writes new ones (`reflection`). The validation tasks are split: by one part candidates
are chosen, and on the other the best of them is compared with the seed, pair by pair. It replaces the seed only if it
is better there.

With a state file a run goes on after a kill. The engine draws by its seed alone; it is played again, and finds every
evaluation and every answer that it had in the file.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.comparison import PairedComparison
from agentlightning.algorithm.prompts.budget import OptimisationBudget
from agentlightning.algorithm.prompts.candidates import Candidate, Lineage
from agentlightning.algorithm.prompts.gepa_engine import require_gepa
from agentlightning.algorithm.prompts.gepa_run import GepaRun
from agentlightning.algorithm.prompts.model import OptimiserModel, ReflectionModel
from agentlightning.algorithm.prompts.results import OptimisationResult
from agentlightning.algorithm.prompts.templates import check_candidates_are_allowed, seed_prompts
from agentlightning.algorithm.utils import running_proxy, with_llm_proxy
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.budgets import Prices
from agentlightning.types import LLM, Dataset, NamedResources, PromptTemplate

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["GEPA"]

PROXY_RESOURCE: Final = "main_llm"
"""Under which agents find the trainer's LLM proxy, if they are given no other model."""


class GEPA(Algorithm):
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

    def __init__(
        self,
        model: "AsyncOpenAI | ReflectionModel | None" = None,
        *,
        reflection_model: str = "gpt-5-mini",
        temperature: float = 1.0,
        iterations: int = 50,
        patience: int = 15,
        minibatch_size: int = 4,
        proposals: int = 1,
        front_size: int | None = None,
        alpha: float | None = 0.05,
        reward_range: tuple[float, float] = (0.0, 1.0),
        budget: OptimisationBudget | None = None,
        rollout_batch_timeout: float = 3600.0,
        seed: int = 0,
        state_file: str | Path | None = None,
        output: str | Path | None = None,
    ) -> None:
        require_gepa()
        self.reflection_model = reflection_model
        self.temperature = temperature
        self.iterations = iterations
        self.patience = patience
        self.minibatch_size = minibatch_size
        self.proposals = proposals
        self.front_size = front_size
        self.alpha = alpha
        self.reward_range = reward_range
        self.budget = budget or OptimisationBudget()
        self.rollout_batch_timeout = rollout_batch_timeout
        self.seed = seed
        self.state_file = None if state_file is None else Path(state_file)
        self.output = None if output is None else Path(output)
        for name in ("iterations", "patience", "minibatch_size", "proposals"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1; it is {getattr(self, name)}.")
        if front_size is not None and front_size < 1:
            raise ConfigurationError(f"front_size must be at least 1, or None; it is {front_size}.")
        PairedComparison(alpha or 0.5, reward_range=reward_range)  # tells what is wrong with them
        if model is not None and not (hasattr(model, "chat") or callable(model)):
            raise ConfigurationError(
                f"A reflecting model is a client or a function; this is of type {type(model).__name__}."
            )
        self._check_money(model)
        self.optimiser = OptimiserModel(model, algorithm="GEPA")
        """Calls the model, and counts the calls."""
        self.result: OptimisationResult | None = None
        """How the last run ended."""
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

    def get_best_prompts(self) -> dict[str, PromptTemplate]:
        """The best prompts of the last run by name; ValueError if there was none."""
        return dict(self._finished().best)

    @property
    def candidates(self) -> Lineage:
        """All candidates of the last run."""
        return self._lineage

    def lineage(self, version: str | None = None) -> list[Candidate]:
        """The candidates from the seed to this version, or to the best one."""
        return self._lineage.ancestry(version or self._finished().best_version)

    def _finished(self) -> OptimisationResult:
        if self.result is None:
            raise ConfigurationError("There are no best prompts yet; run GEPA first.")
        return self.result

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
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
        self, proxy: Any = None, *, prompts: dict[str, PromptTemplate], train: Dataset[Any], val: Dataset[Any]
    ) -> None:
        run = GepaRun(self, self._resources(proxy), prompts, train=train, val=val)
        self._lineage = run.state.lineage
        self.result = await run.run()

    def _resources(self, proxy: Any) -> NamedResources:
        resources: NamedResources = dict(self.get_initial_resources() or {})
        if proxy is not None and not any(isinstance(one, LLM) for one in resources.values()):
            resources[PROXY_RESOURCE] = proxy.as_resource()
        return resources
