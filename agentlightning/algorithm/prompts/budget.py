"""What an optimisation may spend, and what it has spent: rollouts, calls of the optimiser's models, money.

Everything is taken before it is used, so that what runs at the same time cannot spend the same twice. What a call or a
rollout costs is known only when it is over; until then the most that it can cost is held back, and nothing begins whose
most does not fit beside what is spent and held. So the sum never exceeds the limit, as long as what is held is really
the most:

- A call reads at most a token for each byte it is sent, and a few for each message; it writes at most `call_tokens`,
  which is sent along as its limit.
- A rollout costs at most `rollout_cost`. The user promises that; the LLM proxy can enforce it, with a budget for each
  rollout.

Where the most turns out to be exceeded, the real cost is charged, and nothing that costs money begins any more. What
has an unknown cost is charged the most. Sums are exact: no cent is lost to rounding.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from agentlightning.adapter.call_attributes import response_id_of
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.llm_proxy.budgets import Prices
from agentlightning.semconv import REQUEST_MODEL, RESPONSE_MODEL, TOKENS_READ, TOKENS_WRITTEN
from agentlightning.utils.json_values import JsonMapping, token_count
from agentlightning.utils.spelling import suggests_arguments

logger = logging.getLogger(__name__)


class BudgetSpent(TrainingError):
    """The next step does not fit into the budget; it ends the run and never leaves the algorithm."""


@suggests_arguments
@dataclass(frozen=True)
class OptimisationBudget:
    """What a run may spend; None is no limit. None of the limits is ever exceeded; see this module on money."""

    rollouts: int | None = None
    model_calls: int | None = None
    """Requests to the optimiser's models, those that are tried again counted each time. What agents call is part of
    their rollouts; the LLM proxy limits that."""
    cost: float | None = None
    """Money, in the currency of the prices: of the optimiser's calls, and of the agents' as far as their spans tell the
    model and its tokens. It needs `prices` of all the optimiser's models, `call_tokens` and `rollout_cost`."""
    prices: Mapping[str, Prices] = field(default_factory=dict)
    """Of a token, by the name of the model. Without a limit of money, models without a price are free."""
    call_tokens: int | None = None
    """The most that a call of the optimiser may write, thoughts included; sent along where money is limited."""
    rollout_cost: float | None = None
    """The most that a rollout may cost, all its attempts together; 0 if agents call nothing that costs money."""

    def __post_init__(self) -> None:
        for name in ("rollouts", "model_calls", "cost", "call_tokens", "rollout_cost"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:  # not a number is not either
                raise ConfigurationError(f"A budget is zero or more, or None for no limit; {name} is {value}.")
        for model, prices in self.prices.items():
            if not (0 <= prices.read < math.inf and 0 <= prices.written < math.inf):
                raise ConfigurationError(f"A price is zero or more; that of '{model}' is {prices}.")
        if self.call_tokens == 0:
            raise ConfigurationError("A call that may write nothing is of no use; call_tokens must be at least 1.")
        if self.cost is None:
            return
        meanings = {
            "prices": "what a token costs, by the names of the optimiser's models",
            "call_tokens": "the most that one of its calls may write",
            "rollout_cost": "the most that a rollout may cost, 0 if agents call nothing that costs money",
        }
        missing = [f"{name} ({meaning})" for name, meaning in meanings.items() if getattr(self, name) in (None, {})]
        if missing:
            raise ConfigurationError(
                f"A budget of money cannot be kept without knowing what things cost at most; give {', '.join(missing)}."
            )

    def check_models(self, *models: str) -> None:
        """ConfigurationError if money is limited and one of these has no price."""
        unknown = [model for model in dict.fromkeys(models) if model not in self.prices]
        if self.cost is not None and unknown:
            raise ConfigurationError(
                f"A budget of money needs the prices of all the optimiser's models; prices has none for "
                f"{', '.join(map(repr, unknown))}. Prices() is that of a model that costs nothing."
            )

    @property
    def most_rollouts(self) -> int | None:
        """How many rollouts there can be if nothing else costs money; None is no limit."""
        limits = [] if self.rollouts is None else [self.rollouts]
        if self.cost is not None and self.rollout_cost:
            limits.append(int(_exact(self.cost) // _exact(self.rollout_cost)))
        return min(limits, default=None)


def most_tokens_read(messages: Sequence[JsonMapping]) -> int:
    """The most tokens that chat messages can be: each stands for at least a byte."""
    # No template puts more than 64 tokens around one.
    return sum(len(str(message.get("content") or "").encode()) + 64 for message in messages)


def _exact(amount: float) -> Fraction:
    """The number as it is written in decimals."""
    return Fraction(repr(float(amount)))


@dataclass
class Hold:
    """What is held back for a call, or for some rollouts, until they are over."""

    kind: Literal["calls", "rollouts"]
    most: Fraction
    model: str = ""
    is_settled: bool = False


@dataclass
class Ledger:
    """Keeps the books of one run; used in its loop only."""

    budget: OptimisationBudget = field(default_factory=OptimisationBudget)
    rollouts: int = 0
    model_calls: int = 0
    changed: Callable[[dict[str, float]], object] = lambda spent: None
    """Called with what is spent and held when calls or money change; the sender notes rollouts."""
    kept_rollouts: int = 0
    """Rollouts for which nothing else may be spent, not even money."""
    _cost: Fraction = Fraction(0)
    _held: defaultdict[str, Fraction] = field(default_factory=lambda: defaultdict(Fraction))  # by kind
    _lost: Fraction = Fraction(0)  # charged for rollouts that were under way when an earlier process ended
    _is_settled: asyncio.Event = field(default_factory=asyncio.Event)
    _broken: str | None = None  # a promise about the most that something costs

    @property
    def cost(self) -> float:
        """Money that is spent."""
        return float(self._cost)

    @property
    def spent(self) -> dict[str, float]:
        return {"rollouts": self.rollouts, "model_calls": self.model_calls, "cost": self.cost}

    def restore(self, rollouts: int, spent: Mapping[str, float] | None) -> None:
        """Go on from what an earlier process spent. What was under way when it ended is charged the most."""
        self.rollouts = rollouts
        if spent is not None:
            self.model_calls = int(spent["model_calls"])
            self._lost = _exact(spent.get("held_rollouts", 0.0))
            self._cost = _exact(spent["cost"]) + _exact(spent.get("held_calls", 0.0)) + self._lost

    # ------------------------------------------------------------------ what is left

    def rollouts_left(self) -> float:
        """How many rollouts there can still be, those under way not among them; those that are kept are."""
        left = float("inf") if self.budget.rollouts is None else self.budget.rollouts - self.rollouts
        each = self._most_of_a_rollout
        if self.budget.cost is None or not each:
            return left
        money = _exact(self.budget.cost) - self._cost - self._all_held
        return 0 if self._broken is not None else min(left, max(0, int(money // each)))

    def calls_left(self) -> float:
        return float("inf") if self.budget.model_calls is None else self.budget.model_calls - self.model_calls

    # ------------------------------------------------------------------ rollouts

    async def take_rollouts(self, count: int, *, is_new: bool = True, found: int = 0, can_wait: bool = True) -> Hold:
        """Count rollouts that are about to be sent, all of them or none; BudgetSpent if they are too many.

        Args:
            is_new: Whether they count; those that an earlier process sent were counted by it.
            found: How many of those the store still knows: their spans show the cost, so they are not charged twice.
            can_wait: Whether to wait for money that others hold back; not where they wait for these.
        """
        left = float("inf") if self.budget.rollouts is None else self.budget.rollouts - self.rollouts
        kept = self.kept_rollouts
        if is_new and count and count > left - kept:
            rest = f", of which {kept} are kept for the comparison" if kept else ""
            raise BudgetSpent(f"{left:.0f} of {self.budget.rollouts} rollouts are left{rest}, and the next are {count}")
        refund = min(self._lost, found * self._most_of_a_rollout)
        self._lost -= refund
        self._cost -= refund
        self.rollouts += count if is_new else 0
        try:
            return await self._hold(Hold("rollouts", count * self._most_of_a_rollout), can_wait=can_wait)
        except BaseException:
            self.rollouts -= count if is_new else 0
            raise

    def end_rollouts(self, hold: Hold, traces: Iterable[Iterable[JsonMapping]], unfinished: int = 0) -> None:
        """Rollouts are over; these are the attributes of their spans.

        Args:
            unfinished: How many more there are that nobody waits for any longer; they are charged the most.
        """
        most = self._most_of_a_rollout
        costs = [self._cost_of(trace) for trace in traces] if self.budget.prices else []
        if self.budget.cost is not None and any(cost > most for cost in costs):
            self._break(f"a rollout cost {float(max(costs)):.4g}, and rollout_cost is {float(most):.4g}")
        self._settle(hold, sum(costs, unfinished * most))

    @property
    def _most_of_a_rollout(self) -> Fraction:
        return _exact(self.budget.rollout_cost or 0.0)

    def _cost_of(self, trace: Iterable[JsonMapping]) -> Fraction:
        """What the model calls of a trace cost; a call that tracer and proxy both recorded counts once.

        A call without a usage, or whose model has no price, may have cost the most.
        """
        cost_of_call: dict[object, Fraction | None] = {}
        for number, attributes in enumerate(trace):
            names = [str(attributes[name]) for name in (RESPONSE_MODEL, REQUEST_MODEL) if name in attributes]
            if not names and TOKENS_WRITTEN not in attributes:
                continue
            call = response_id_of(attributes) or number
            if cost_of_call.get(call) is None:
                model = next((name for name in names if name in self.budget.prices), None)
                cost_of_call[call] = self._price(model, attributes.get(TOKENS_READ), attributes.get(TOKENS_WRITTEN))
        known = sum((cost for cost in cost_of_call.values() if cost is not None), Fraction(0))
        return max(known, self._most_of_a_rollout) if None in cost_of_call.values() else known

    def _price(self, model: str | None, read: object, written: object) -> Fraction | None:
        """None if it cannot be told, and matters."""
        n_read, n_written = token_count(read), token_count(written)
        if model is None or n_read is None or n_written is None:
            return None if self.budget.cost is not None else Fraction(0)
        prices = self.budget.prices.get(model, Prices())
        return _exact(prices.read) * n_read + _exact(prices.written) * n_written

    # ------------------------------------------------------------------ calls

    async def take_call(self, model: str = "", most_read: int = 0) -> Hold:
        """Count a call that is about to be made; BudgetSpent if there is none left, or too little money."""
        if self.calls_left() < 1:
            raise BudgetSpent(f"all {self.budget.model_calls} model calls are spent")
        self.model_calls += 1  # before it waits, so that nobody else takes the last one
        prices = self.budget.prices.get(model, Prices())
        most = _exact(prices.read) * most_read + _exact(prices.written) * (self.budget.call_tokens or 0)
        try:
            return await self._hold(Hold("calls", most, model))
        except BaseException:
            self.model_calls -= 1
            raise

    def end_call(self, hold: Hold, usage: object) -> None:
        """A call is over that was answered; `usage` is what the model told of its tokens, or None."""
        read, written = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
        cost = self._price(hold.model, read, written)
        if cost is not None and self.budget.cost is not None and cost > hold.most:
            usage_text = f"it read {read} tokens and wrote {written}, of {self.budget.call_tokens} that it may"
            self._break(f"a call of model '{hold.model}' cost more than it should have been able to: {usage_text}")
        self._settle(hold, hold.most if cost is None else cost)

    def drop_call(self, hold: Hold, *, is_free: bool) -> None:
        """A call is over that was not answered. One that was refused is free; one that was cut off may have cost."""
        self._settle(hold, Fraction(0) if is_free else hold.most)

    # ------------------------------------------------------------------ money

    @property
    def _all_held(self) -> Fraction:
        return sum(self._held.values(), Fraction(0))

    async def _hold(self, hold: Hold, *, can_wait: bool = True) -> Hold:
        """Hold back money as soon as there is enough; BudgetSpent if there will not be."""
        if self.budget.cost is None:
            hold.most = Fraction(0)
        while hold.most and not self._fits(hold.most + self._all_held):
            if not can_wait or not self._fits(hold.most):
                raise BudgetSpent(self._broken or self._shortage(hold.most))
            self._is_settled.clear()
            await self._is_settled.wait()
        self._held[hold.kind] += hold.most
        if hold.most or hold.kind == "calls":
            self._notify()
        return hold

    def _fits(self, more: Fraction) -> bool:
        if self.budget.cost is None or not more:
            return True
        kept = self.kept_rollouts * self._most_of_a_rollout
        return self._broken is None and self._cost + kept + more <= _exact(self.budget.cost)

    def _shortage(self, most: Fraction) -> str:
        kept = ""
        if self.kept_rollouts and self._most_of_a_rollout:
            kept = f", {float(self.kept_rollouts * self._most_of_a_rollout):.4g} is kept for the comparison"
        limit = self.budget.cost or 0.0
        return f"{self.cost:.4g} of {limit:.4g} is spent{kept}, and what comes next may cost {float(most):.4g}"

    def _break(self, reason: str) -> None:
        logger.warning("Nothing that costs money begins any more: %s.", reason)
        self._broken = reason

    def _settle(self, hold: Hold, cost: Fraction) -> None:
        if hold.is_settled:
            return
        hold.is_settled = True
        self._held[hold.kind] -= hold.most
        self._cost += cost
        if hold.most or cost:
            self._notify()
        self._is_settled.set()

    def _notify(self) -> None:
        held = {f"held_{kind}": float(self._held[kind]) for kind in ("calls", "rollouts") if self._held[kind]}
        self.changed({**self.spent, **held})
