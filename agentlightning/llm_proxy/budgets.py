"""Budgets: how many calls, tokens or how much money a rollout, or all of them together, may spend on models.

A call is admitted while there is something left, and what it may write is limited to that. What calls under way may
still cost counts as spent until they are over, so that many at once do not spend it twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.attribution import Refused
from agentlightning.llm_proxy.dialects.failures import Failure
from agentlightning.llm_proxy.dialects.names import DialectName

__all__ = ["Budget", "Budgets", "Prices", "Reservation", "Spent"]

MOST_ROLLOUTS: Final = 100_000
"""Whose spending is remembered; the oldest go first."""
_LIMIT_FIELDS: Final[dict[DialectName, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
    "embeddings": (),
}


@dataclass(frozen=True)
class Budget:
    """What may be spent; None is no limit."""

    calls: int | None = None
    tokens: int | None = None
    """Read and written."""
    cost: float | None = None
    """In the currency of the models' prices."""

    def __post_init__(self) -> None:
        for name in ("calls", "tokens", "cost"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(f"A budget cannot be negative; {name} is {value}.")

    @property
    def is_limited(self) -> bool:
        return not (self.calls is None and self.tokens is None and self.cost is None)


@dataclass(frozen=True)
class Prices:
    """Of one token."""

    read: float = 0.0
    written: float = 0.0


@dataclass
class Spent:
    """What was spent, and what calls under way may still spend."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0
    reserved_tokens: int = 0
    reserved_cost: float = 0.0


@dataclass
class Reservation:
    """What one call may cost."""

    prices: Prices
    spent: tuple[Spent, ...]
    most_written: int | None
    """Tokens it may write; None is no limit of ours."""

    @property
    def cost(self) -> float:
        return (self.most_written or 0) * self.prices.written


class Budgets:
    """Keeps the accounts of one proxy; used in its loop only."""

    def __init__(self, per_rollout: Budget | None = None, per_run: Budget | None = None) -> None:
        self.per_rollout = per_rollout or Budget()
        self.per_run = per_run or Budget()
        self.of_run = Spent()
        self._of_rollouts: dict[str, Spent] = {}

    @property
    def is_limited(self) -> bool:
        return self.per_rollout.is_limited or self.per_run.is_limited

    def of_rollout(self, rollout_id: str) -> Spent:
        spent = self._of_rollouts.get(rollout_id)
        if spent is None:
            if len(self._of_rollouts) >= MOST_ROLLOUTS:
                del self._of_rollouts[next(iter(self._of_rollouts))]
            spent = self._of_rollouts[rollout_id] = Spent()
        return spent

    def admit(
        self, rollout_id: str | None, dialect: DialectName, body: Mapping[str, Any], prices: Prices
    ) -> Reservation:
        """Take a call into account; raises `Refused` if there is nothing left for it."""
        accounts = [("run", self.per_run, self.of_run)]
        if rollout_id is not None:
            accounts.append((f"rollout '{rollout_id}'", self.per_rollout, self.of_rollout(rollout_id)))
        most = [_left(whose, budget, spent, prices) for whose, budget, spent in accounts]
        limits = [limit for limit in most if limit is not None]
        wanted = _asked_limit(dialect, body)
        if wanted is not None and limits:
            limits.append(wanted)
        reservation = Reservation(prices, tuple(spent for _, _, spent in accounts), min(limits, default=None))
        for spent in reservation.spent:
            spent.calls += 1
            spent.reserved_tokens += reservation.most_written or 0
            spent.reserved_cost += reservation.cost
        return reservation

    @staticmethod
    def settle(reservation: Reservation, usage: tuple[int, int] | None) -> None:
        """A call is over.

        Args:
            usage: Tokens read and written; None if the backend did not say, or was not reached.
        """
        read, written = usage or (0, 0)
        for spent in reservation.spent:
            spent.reserved_tokens -= reservation.most_written or 0
            spent.reserved_cost -= reservation.cost
            spent.tokens += read + written
            spent.cost += read * reservation.prices.read + written * reservation.prices.written

    @staticmethod
    def limited(dialect: DialectName, body: dict[str, Any], most_written: int) -> dict[str, Any]:
        """A request that writes no more than this."""
        names = _LIMIT_FIELDS[dialect]
        asked = [name for name in names if isinstance(body.get(name), int)]
        if not names or any(body[name] <= most_written for name in asked):
            return body
        return {**body, **dict.fromkeys(asked or names[-1:], most_written)}


def _left(whose: str, budget: Budget, spent: Spent, prices: Prices) -> int | None:
    """How many tokens may still be written."""
    if budget.calls is not None and spent.calls >= budget.calls:
        raise _exceeded(whose, f"{budget.calls} model calls", f"{spent.calls} were made")
    left: list[int] = []
    if budget.tokens is not None:
        remaining = budget.tokens - spent.tokens - spent.reserved_tokens
        if remaining <= 0:
            raise _exceeded(whose, f"{budget.tokens} tokens", _spent_words(spent.tokens, spent.reserved_tokens, "d"))
        left.append(remaining)
    if budget.cost is not None:
        money = budget.cost - spent.cost - spent.reserved_cost
        if money <= 0:
            raise _exceeded(whose, f"a cost of {budget.cost:g}", _spent_words(spent.cost, spent.reserved_cost, "g"))
        if prices.written > 0:
            affordable = int(money / prices.written)
            if affordable == 0:
                raise _exceeded(whose, f"a cost of {budget.cost:g}", _spent_words(spent.cost, spent.reserved_cost, "g"))
            left.append(affordable)
    return min(left, default=None)


def _spent_words(spent: float, reserved: float, form: str) -> str:
    under_way = f", and calls under way may use {reserved:{form}}" if reserved else ""
    return f"{spent:{form}} were used{under_way}"


def _exceeded(whose: str, what: str, used: str) -> Refused:
    message = f"The budget of this {whose} is {what}: {used}, so this call is not made."
    return Refused(Failure(403, message, "permission_error", code="budget_exceeded"))


def _asked_limit(dialect: DialectName, body: Mapping[str, Any]) -> int | None:
    limits = [body[name] for name in _LIMIT_FIELDS[dialect] if isinstance(body.get(name), int)]
    return min(limits, default=None)
