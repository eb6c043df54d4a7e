"""What an optimisation may spend, and what it has spent: rollouts, calls of the optimiser's models, money.

Everything is taken before it is used, so that what runs at the same time cannot spend the same twice. Money is known
only afterwards: what is under way counts as much as the dearest of its kind so far. The first call and the first
rollouts can therefore carry the sum beyond the limit by what they cost; later ones do so only if they are dearer than
all before them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.llm_proxy.budgets import Prices

__all__ = ["BudgetSpent", "Ledger", "OptimisationBudget"]

_READ, _WRITTEN = "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"
_MODEL_NAMES = ("gen_ai.response.model", "gen_ai.request.model")
_RESPONSE_ID = "gen_ai.response.id"


class BudgetSpent(TrainingError):
    """The next step does not fit into the budget; it ends the run and never leaves the algorithm."""


@dataclass(frozen=True)
class OptimisationBudget:
    """What a run may spend; None is no limit."""

    rollouts: int | None = None
    model_calls: int | None = None
    """Requests to the optimiser's models, those that are tried again counted each time. What agents call is part of
    their rollouts; the LLM proxy limits that."""
    cost: float | None = None
    """Money, in the currency of the prices: of the optimiser's calls, and of the agents' as far as their spans tell the
    model and its tokens."""
    prices: Mapping[str, Prices] = field(default_factory=dict)
    """Of a token, by the name of the model; models without a price are free."""

    def __post_init__(self) -> None:
        for name in ("rollouts", "model_calls", "cost"):
            value = getattr(self, name)
            if value is not None and not value >= 0:  # not a number is not either
                raise ConfigurationError(f"A budget cannot be negative; {name} is {value}.")
        if self.cost is not None and not self.prices:
            raise ConfigurationError("A budget of money needs prices, by the names of the models.")


@dataclass
class Ledger:
    """The books of one run."""

    budget: OptimisationBudget = field(default_factory=OptimisationBudget)
    rollouts: int = 0
    model_calls: int = 0
    cost: float = 0.0
    changed: Callable[[dict[str, float]], None] = lambda spent: None
    """Told what is spent so far, when calls or money grow; rollouts are noted by whoever sends them."""
    _calls_under_way: int = 0
    _rollouts_under_way: int = 0
    _dearest_call: float = 0.0
    _dearest_rollout: float = 0.0

    @property
    def spent(self) -> dict[str, float]:
        return {"rollouts": self.rollouts, "model_calls": self.model_calls, "cost": self.cost}

    def restore(self, rollouts: int, spent: Mapping[str, float] | None) -> None:
        """Go on from what an earlier process spent."""
        self.rollouts = rollouts
        if spent is not None:
            self.model_calls, self.cost = int(spent["model_calls"]), float(spent["cost"])

    def rollouts_left(self) -> float:
        return float("inf") if self.budget.rollouts is None else self.budget.rollouts - self.rollouts

    def calls_left(self) -> float:
        return float("inf") if self.budget.model_calls is None else self.budget.model_calls - self.model_calls

    def take_rollouts(self, count: int) -> None:
        """Count rollouts that are about to be sent; BudgetSpent if they are too many."""
        if count > self.rollouts_left():
            raise BudgetSpent(f"{self.rollouts} of {self.budget.rollouts} rollouts are spent, and the next are {count}")
        self._check_cost(count * self._dearest_rollout)
        self.rollouts += count
        self._rollouts_under_way += count

    def take_call(self) -> None:
        """Count a call that is about to be made; BudgetSpent if there is none left."""
        if self.calls_left() < 1:
            raise BudgetSpent(f"all {self.budget.model_calls} model calls are spent")
        self._check_cost(self._dearest_call)
        self.model_calls += 1
        self._calls_under_way += 1
        self.changed(self.spent)

    def end_call(self, model: str, usage: Any) -> None:
        """A call is over; `usage` is what the model told of its tokens, or None."""
        self._calls_under_way -= 1
        read, written = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
        cost = self._price(model, read, written)
        self._dearest_call = max(self._dearest_call, cost)
        self._charge(cost)

    def end_rollouts(self, count: int, traces: Iterable[Iterable[Mapping[str, Any]]]) -> None:
        """Rollouts are over, or nobody waits for them any more; these are the attributes of their spans."""
        self._rollouts_under_way -= count
        for trace in traces if self.budget.prices else ():
            cost = self._cost_of(trace)
            self._dearest_rollout = max(self._dearest_rollout, cost)
            self._charge(cost)

    def _cost_of(self, trace: Iterable[Mapping[str, Any]]) -> float:
        """What the model calls of a trace cost; a call that tracer and proxy both recorded counts once."""
        cost, seen = 0.0, set()
        for attributes in trace:
            response_id = attributes.get(_RESPONSE_ID)
            if _WRITTEN not in attributes or (response_id is not None and response_id in seen):
                continue
            seen.add(response_id)
            names = [str(attributes[name]) for name in _MODEL_NAMES if name in attributes]
            model = next((name for name in names if name in self.budget.prices), "")
            cost += self._price(model, attributes.get(_READ), attributes.get(_WRITTEN))
        return cost

    def _price(self, model: str, read: object, written: object) -> float:
        prices = self.budget.prices.get(model, Prices())
        tokens = [count if isinstance(count, (int, float)) else 0 for count in (read, written)]
        return prices.read * tokens[0] + prices.written * tokens[1]

    def _check_cost(self, next_cost: float) -> None:
        limit = self.budget.cost
        if limit is None:
            return
        reserved = self._calls_under_way * self._dearest_call + self._rollouts_under_way * self._dearest_rollout
        if self.cost >= limit or self.cost + reserved + next_cost > limit:
            raise BudgetSpent(f"{self.cost:.4g} of {limit:.4g} is spent, and what comes next may cost {next_cost:.4g}")

    def _charge(self, cost: float) -> None:
        if cost:
            self.cost += cost
            self.changed(self.spent)
