"""Budgets: how many calls, tokens or how much money a rollout, or all of them together, may spend on models.

A call is admitted while there is something left, and what it may write is limited to that. What calls in flight may
still write is reserved until they are over, so that many at once do not spend it twice. A call that names no limit of
its own gets a share of what is left, so that it does not keep others waiting.

- Calls count when they are sent to a backend, once each, however often they are tried and however they end.
- Tokens count as the backend reports them. Prompt tokens are known with the answer only: they can carry the sum beyond
  a budget by the prompts of calls in flight; completion tokens cannot. A backend that begins an answer and reports no
  usage is taken to have written all it might. A call that failed before its answer began costs nothing.
- Answers from the record are free.
- Numbers in a request that say how much is written are made whole numbers first, or refused, so that a backend reads
  in them what was counted.

The accounts belong to a proxy object: they outlive its restarts, not its process.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.dialects import DIALECTS, Dialect
from agentlightning.dialects.failures import Failure
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.attribution import Refused

SHARES: Final = 64
LEAST_SHARE: Final = 4096
"""Tokens. A call without a limit of its own may write one of `SHARES` of what is left, and at least this."""
RETRY_SECONDS: Final = 1.0
"""When to try again, where all that is left is reserved for calls in flight."""
LARGEST_COUNT: Final = 2**31 - 1
_LEAST_FIELD: Final = "min_tokens"
_COUNT_FIELDS: Final = tuple(
    dict.fromkeys(("n", "best_of", _LEAST_FIELD, *(name for one in DIALECTS.values() for name in one.limit_fields)))
)
"""What multiplies or limits the tokens that are written; a backend may read those of another dialect too."""
_IS_ABOUT_LIMIT: Final = re.compile(
    rb"max_(completion_|output_|new_)?tokens|context (length|window)|too many tokens", re.IGNORECASE
)


@dataclass(frozen=True)
class Budget:
    """What may be spent; None is no limit."""

    calls: int | None = None
    tokens: int | None = None
    """Prompt and completion."""
    cost: float | None = None
    """In the currency of the models' prices, which are `input_cost_per_token` and `output_cost_per_token`."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value >= 0:  # not a number is not either
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
    """What was spent, and what calls in flight may still spend."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0
    reserved_tokens: int = 0
    reserved_cost: float = 0.0
    in_flight: int = 0


@dataclass
class Reservation:
    """What one call may cost."""

    prices: Prices
    accounts: tuple[Spent, ...]
    most_written: int | None
    """Tokens it may write for each of its choices; None is no limit of ours."""
    choices: int = 1
    is_ours: bool = False
    """Whether the caller named no limit. A backend that finds ours too large writes less anyway."""

    def __post_init__(self) -> None:
        for spent in self.accounts:
            spent.calls += 1
            spent.in_flight += 1
            spent.reserved_tokens += self.tokens
            spent.reserved_cost += self.tokens * self.prices.written

    @property
    def tokens(self) -> int:
        return (self.most_written or 0) * self.choices

    def charge(self, usage: tuple[int, int] | None, *, is_begun: bool = False) -> None:
        """The call is over; once for each reservation.

        Args:
            usage: Prompt and completion tokens; None if the backend did not say, or was not reached.
            is_begun: Whether there was an answer, or a part of one.
        """
        read, written = usage or (0, self.tokens if is_begun else 0)
        self._release()
        for spent in self.accounts:
            spent.tokens += read + written
            spent.cost += read * self.prices.read + written * self.prices.written

    def cancel(self) -> None:
        """As if the call had not been admitted: it goes to a backend with other prices, and is admitted again."""
        self._release()
        for spent in self.accounts:
            spent.calls -= 1

    def _release(self) -> None:
        for spent in self.accounts:
            spent.in_flight -= 1
            spent.reserved_tokens -= self.tokens
            # Sums of fractions leave a rest, which must not add up.
            spent.reserved_cost = spent.reserved_cost - self.tokens * self.prices.written if spent.in_flight else 0.0


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
            # The spending of so many rollouts is remembered; the oldest go first.
            if len(self._of_rollouts) >= 100_000:
                del self._of_rollouts[next(iter(self._of_rollouts))]
            spent = self._of_rollouts[rollout_id] = Spent()
        return spent

    def admit(self, rollout_id: str | None, dialect: Dialect, body: Mapping[str, Any], prices: Prices) -> Reservation:
        """Take a call into account; raises `Refused` if there is nothing left for it.

        Args:
            body: The request in the dialect, as `with_whole_counts` made it.
        """
        accounts = [("run", self.per_run, self.of_run)]
        if rollout_id is not None:
            accounts.append((f"rollout '{rollout_id}'", self.per_rollout, self.of_rollout(rollout_id)))
        limits = dialect.limit_fields
        choices = _choices(body) if limits else 1
        left = [_left(whose, budget, spent, prices, choices) for whose, budget, spent in accounts]
        most = min((limit for limit in left if limit is not None), default=None)
        # Of two limits the larger counts, since backends differ in which they read.
        wanted = max((body[name] for name in limits if body.get(name) is not None), default=None)
        if most is not None:
            most = min(most, wanted if wanted is not None else max(most // SHARES, LEAST_SHARE))
        if not limits:
            most = 0  # it writes nothing
        return Reservation(prices, tuple(spent for _, _, spent in accounts), most, choices, is_ours=wanted is None)


def with_token_limit(dialect: Dialect, body: dict[str, Any], most_written: int, provider: str = "") -> dict[str, Any]:
    """A request that writes no more than this, for each of its choices."""
    names = dialect.limit_fields
    if not names:
        return body
    named = [name for name in names if body.get(name) is not None]
    if not named:
        # Providers whose newer models take the first name of a limit only; other servers may know the last alone.
        named = [names[0] if provider in ("openai", "azure") else names[-1]]
    if body.get(_LEAST_FIELD) is not None:  # a backend refuses less than that, and would be called without a limit
        named.append(_LEAST_FIELD)
    limits = {name: most_written for name in named if body.get(name) is None or body[name] > most_written}
    return {**body, **limits} if limits else body


def with_whole_counts(dialect: Dialect, body: dict[str, object]) -> dict[str, Any]:
    """A request whose counts are whole numbers; the same object, if they are.

    Raises:
        Refused: One of them is no such number, or has a name that is not counted.
    """
    if not dialect.limit_fields:
        return body
    # Other names of the same that some servers prefer to the dialect's own.
    for name in ("n_predict", "num_predict", "max_new_tokens", "n_cmpl"):
        if body.get(name) is not None:
            known = ", ".join(("n", *dialect.limit_fields))
            raise _invalid(name, f"'{name}' is not counted, so it cannot be used where there is a budget; use {known}.")
    changed = {}
    for name in _COUNT_FIELDS:
        value = body.get(name)
        if value is None:
            continue
        count, least = _whole(value), 0 if name == _LEAST_FIELD else 1
        if count is None or not least <= count <= LARGEST_COUNT:
            shown = repr(value)[:80]
            raise _invalid(name, f"'{name}' is {shown}; it must be a whole number from {least} to {LARGEST_COUNT}.")
        if not isinstance(value, int):
            changed[name] = count
    return {**body, **changed} if changed else body


def is_about_limit(answer: bytes) -> bool:
    """Whether a backend's error may say that the limit of what is written is too large for it."""
    return _IS_ABOUT_LIMIT.search(answer) is not None


def _left(whose: str, budget: Budget, spent: Spent, prices: Prices, choices: int) -> int | None:
    """How many tokens may still be written for each choice; None, if there is no limit."""
    if budget.calls is not None and spent.calls >= budget.calls:
        raise _exceeded(whose, f"{budget.calls} model calls", f"{spent.calls} were made")
    left: list[int] = []
    if budget.tokens is not None:
        unspent = budget.tokens - spent.tokens
        if unspent < choices:
            raise _exceeded(whose, f"{budget.tokens} tokens", f"{spent.tokens} were used")
        left.append((unspent - spent.reserved_tokens) // choices)
    if budget.cost is not None:
        unspent_cost = budget.cost - spent.cost
        if unspent_cost <= 0 or unspent_cost < prices.written * choices:
            raise _exceeded(whose, f"a cost of {budget.cost:g}", f"{spent.cost:g} were used")
        if prices.written > 0:
            left.append(int((unspent_cost - spent.reserved_cost) / (prices.written * choices)))
    least = min(left, default=None)
    if least is not None and least <= 0:  # what calls in flight do not use is there again when they are over
        message = f"The rest of the budget of this {whose} is reserved for calls in flight; try again when one is over."
        raise Refused(Failure(429, message, "rate_limit_error", code="budget_reserved", retry_after=RETRY_SECONDS))
    return least


def _exceeded(whose: str, what: str, used: str) -> Refused:
    message = f"The budget of this {whose} is {what}: {used}, so this call is not made."
    return Refused(Failure(403, message, "permission_error", code="budget_exceeded"))


def _invalid(name: str, message: str) -> Refused:
    return Refused(Failure(400, message, "invalid_request_error", param=name))


def _choices(body: Mapping[str, Any]) -> int:
    """How many answers are written."""
    choices: int = max(body.get("n") or 1, body.get("best_of") or 1)
    prompts = body.get("prompt")
    several = 0
    if isinstance(prompts, list) and any(isinstance(prompt, (str, list)) for prompt in prompts):
        several = len(prompts)
    if isinstance(body.get("prompt_embeds"), list):  # of vLLM, beside the prompts
        several += len(body["prompt_embeds"])
    return choices * max(several, 1)


def _whole(value: object) -> int | None:
    """The whole number that a backend may read in a value; None, if it is none."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(LARGEST_COUNT)):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
