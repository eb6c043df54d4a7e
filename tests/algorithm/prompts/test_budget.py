"""No budget is exceeded: not by one call, not by one rollout, not by one cent."""

import asyncio
import json
import random
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.algorithm.apo.apo import APO
from agentlightning.algorithm.gepa import GEPA
from agentlightning.algorithm.prompts.budget import BudgetSpent, Ledger, OptimisationBudget, most_tokens_read
from agentlightning.algorithm.prompts.model import OptimiserModel as Asker
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.budgets import Prices
from agentlightning.store import InMemoryLightningStore
from tests.algorithm.prompts.world import Optimiser, Writer, agents, apo_in, evolved, optimised

pytestmark = pytest.mark.usefixtures("quick_poml")

MODEL = "m"
MODELS: dict[str, Any] = {"gradient_model": MODEL, "apply_edit_model": MODEL}
PRICES = {MODEL: Prices(read=0.001, written=0.01)}
CENT = Fraction(1, 100)


def budget(cost: float, *, call_tokens: int = 10, rollout_cost: float = 0.0, **limits: Any) -> OptimisationBudget:
    return OptimisationBudget(cost=cost, prices=PRICES, call_tokens=call_tokens, rollout_cost=rollout_cost, **limits)


def used(read: object, written: object) -> Any:
    return SimpleNamespace(prompt_tokens=read, completion_tokens=written)


def attributes(read: int, written: int, **more: Any) -> dict[str, Any]:
    told = {"gen_ai.usage.prompt_tokens": read, "gen_ai.usage.completion_tokens": written}
    return {"gen_ai.request.model": MODEL, **told, **more}


# ---------------------------------------------------------------------- what must be known

MONEY = {"cost": 1.0, "prices": PRICES, "call_tokens": 10, "rollout_cost": 0.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollouts": -1}, "is zero or more"),
        ({"cost": float("nan")}, "is zero or more"),
        ({"cost": float("inf")}, "is zero or more"),
        ({"prices": {MODEL: Prices(read=-1.0)}}, "is zero or more"),
        ({**MONEY, "call_tokens": 0}, "call_tokens must be at least 1"),
        ({**MONEY, "prices": {}}, r"give prices \("),
        ({**MONEY, "call_tokens": None}, r"give call_tokens \("),
        ({**MONEY, "rollout_cost": None}, r"give rollout_cost \("),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        OptimisationBudget(**options)


def test_models_without_a_price_are_named_when_the_algorithm_is_made() -> None:
    with pytest.raises(ConfigurationError, match=r"none for 'thinker', 'gpt-4\.1-mini'"):
        APO[int](None, gradient_model="thinker", budget=budget(1.0))
    with pytest.raises(ConfigurationError, match="none for 'thinker'"):
        GEPA(reflection_model="thinker", budget=budget(1.0))


def test_function_that_costs_money_cannot_be_counted() -> None:
    with pytest.raises(ConfigurationError, match="A function does not tell"):
        GEPA(Writer(), reflection_model=MODEL, budget=budget(1.0))


def test_no_token_is_smaller_than_a_byte() -> None:
    assert most_tokens_read([{"content": "größer"}, {"content": None}]) >= len("größer".encode())


# ---------------------------------------------------------------------- the books


async def test_what_is_under_way_counts_as_the_most_it_can_cost() -> None:
    ledger = Ledger(budget(0.5))  # a call costs 0.2 at most: 100 tokens read, 10 written
    first, second = await ledger.take_call(MODEL, 100), await ledger.take_call(MODEL, 100)
    third = asyncio.ensure_future(ledger.take_call(MODEL, 100))
    await asyncio.sleep(0)
    assert not third.done(), "it waits for what the others leave"

    ledger.end_call(first, used(100, 0))
    ledger.end_call(second, used(100, 0))

    ledger.end_call(await third, used(100, 10))
    assert ledger.cost == 0.4
    with pytest.raises(BudgetSpent, match=r"0\.4 of 0\.5 is spent, and what comes next may cost 0\.2"):
        await ledger.take_call(MODEL, 100)
    assert ledger.model_calls == 3


@pytest.mark.parametrize("seed", range(8))
async def test_sum_never_exceeds_the_limits_whatever_runs_at_the_same_time(seed: int) -> None:
    rng = random.Random(seed)
    limit = rng.randint(5, 80) * CENT
    limits = budget(float(limit), rollout_cost=0.03, rollouts=40, model_calls=40)
    ledger, real, refused = Ledger(limits), Fraction(0), 0

    async def call() -> None:
        nonlocal real
        hold = await ledger.take_call(MODEL, rng.randint(0, 60))
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        cost = hold.most * rng.choice((0, 1))
        real += cost
        if cost:
            ledger.end_call(hold, None)  # it does not tell
        else:
            ledger.drop_call(hold, is_free=True)

    async def rollouts() -> None:
        nonlocal real
        count, read = rng.randint(1, 4), rng.randint(0, 30)
        hold = await ledger.take_rollouts(count)
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        late = rng.randint(0, count)
        real += late * 3 * CENT + (count - late) * Fraction(read, 1000)
        ledger.end_rollouts(hold, [[attributes(read, 0)]] * (count - late), unfinished=late)

    async def one() -> None:
        nonlocal refused
        try:
            await rng.choice((call, rollouts))()
        except BudgetSpent:
            refused += 1
        assert real <= limit

    await asyncio.wait_for(asyncio.gather(*(one() for _ in range(120))), timeout=30)
    assert refused > 0
    assert float(real) == ledger.cost <= limits.cost  # type: ignore[operator] # there is a limit
    assert ledger.rollouts <= 40
    assert ledger.model_calls <= 40


async def test_a_call_that_tracer_and_proxy_recorded_costs_once() -> None:
    ledger = Ledger(budget(1.0, rollout_cost=0.1))
    call = {"gen_ai.response.id": "r"}

    hold = await ledger.take_rollouts(1)
    ledger.end_rollouts(hold, [[{"gen_ai.request.model": MODEL, **call}, attributes(3, 1, **call), {"x": 1}]])

    assert ledger.cost == 0.013


@pytest.mark.parametrize("count", [float("nan"), float("inf"), 1e308, -(2**63), "many", [1]], ids=str)
async def test_a_count_that_no_call_can_have_is_charged_as_unknown(count: Any) -> None:
    ledger = Ledger(budget(1.0, rollout_cost=0.1))

    trace = [attributes(count, 1, **{"gen_ai.response.id": ["a", "b"]}), attributes(3, 1)]
    ledger.end_rollouts(await ledger.take_rollouts(1), [trace])

    assert ledger.cost == 0.1


async def test_after_a_broken_promise_nothing_that_costs_begins(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(budget(1.0, rollout_cost=0.1))
    free = Ledger(OptimisationBudget(prices=PRICES))

    for books in (ledger, free):
        books.end_rollouts(await books.take_rollouts(1), [[attributes(200, 0)]])

    with pytest.raises(BudgetSpent, match=r"a rollout cost 0\.2, and rollout_cost is 0\.1"):
        await ledger.take_rollouts(1)
    assert (ledger.rollouts, ledger.rollouts_left(), ledger.cost) == (1, 0, 0.2)
    assert caplog.text.count("a rollout cost") == 1
    await free.take_rollouts(1)  # where money is not limited, nothing was promised


async def test_what_was_under_way_at_a_kill_is_charged_unless_it_is_found_again() -> None:
    notes: list[dict[str, float]] = []
    killed = Ledger(budget(1.0, rollout_cost=0.1), changed=notes.append)
    await killed.take_rollouts(4)
    await killed.take_call(MODEL, 100)

    again = Ledger(budget(1.0, rollout_cost=0.1))
    again.restore(4, json.loads(json.dumps(notes[-1])))

    assert (again.cost, again.rollouts, again.model_calls) == (0.6, 4, 1)
    again.end_rollouts(await again.take_rollouts(4, is_new=False, found=3), [[attributes(10, 0)]] * 4)
    assert again.cost == pytest.approx(0.2 + 0.1 + 4 * 0.01)
    assert again.rollouts == 4


# ---------------------------------------------------------------------- the optimiser's calls


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status


def asker(limits: OptimisationBudget, *outcomes: Any) -> tuple[Asker, list[dict[str, Any]]]:
    """One whose model raises or answers these in turn, and what it was asked."""
    left, asked = list(outcomes), []

    async def create(**request: Any) -> Any:
        asked.append(request)
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="yes"))], usage=outcome)

    async def sleep(seconds: float) -> None: ...

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    made = Asker(client, sleep)
    made.ledger = Ledger(limits)
    return made, asked


HELLO = [{"role": "user", "content": "hello"}]
MOST = most_tokens_read(HELLO) * 0.001 + 10 * 0.01


async def test_the_limit_of_what_a_call_writes_is_sent_along_where_money_is_limited() -> None:
    limited, asked = asker(budget(1.0), used(9, 1))
    unlimited, asked_too = asker(OptimisationBudget(prices=PRICES, call_tokens=10), used(9, 1))

    for one in (limited, unlimited):
        await one.ask(MODEL, HELLO, 1.0)

    assert asked[0]["max_completion_tokens"] == 10
    assert set(asked_too[0]) == {"model", "messages", "temperature"}
    assert limited.ledger.cost == unlimited.ledger.cost == 0.019


async def test_a_server_that_knows_the_older_name_of_the_limit_gets_it() -> None:
    unknown = Refusal(400, "Unsupported parameter: 'max_completion_tokens'")
    model, asked = asker(budget(1.0), unknown, used(9, 1), used(9, 1))

    assert [await model.ask(MODEL, HELLO, 1.0) for _ in range(2)] == ["yes", "yes"]
    assert [sorted(one)[0] for one in asked] == ["max_completion_tokens", "max_tokens", "max_tokens"]
    assert (model.ledger.model_calls, model.ledger.cost) == (3, 0.038)


@pytest.mark.parametrize(
    ("outcome", "cost"),
    [
        (Refusal(429, "later"), 0.0),
        (Refusal(504, "gateway"), MOST),
        (Refusal(408, "timeout"), MOST),
        (None, MOST),
    ],
    ids=["refused", "lost behind a gateway", "timed out", "answered without usage"],
)
async def test_what_a_call_may_have_cost_is_charged(outcome: Any, cost: float) -> None:
    model, _ = asker(budget(1.0), outcome, used(0, 0))
    await model.ask(MODEL, HELLO, 1.0)
    assert model.ledger.cost == pytest.approx(cost)


async def test_a_call_that_is_broken_off_may_have_cost() -> None:
    model, _ = asker(budget(1.0), asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await model.ask(MODEL, HELLO, 1.0)
    assert model.ledger.cost == pytest.approx(MOST)


async def test_a_server_that_does_not_keep_the_limit_ends_the_calls() -> None:
    model, _ = asker(budget(10.0), used(9, 500))
    await model.ask(MODEL, HELLO, 1.0)
    with pytest.raises(BudgetSpent, match=r"cost more than it should .* wrote 500, of 10"):
        await model.ask(MODEL, HELLO, 1.0)


# ---------------------------------------------------------------------- whole runs


class Dear(Optimiser):
    """An optimiser that costs money: what it used is drawn, and never more than it may."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self.cost = Fraction(0)

    async def _create(self, **asked: Any) -> Any:
        answer = await super()._create(**asked)
        usage = used(self._rng.randint(1, 60), self._rng.randint(1, asked["max_completion_tokens"]))
        self.cost += Fraction(usage.prompt_tokens, 1000) + Fraction(usage.completion_tokens, 100)
        answer.usage = usage
        return answer


class Spending:
    """What agents read costs money, by the task and at most 3 cents."""

    def __init__(self) -> None:
        self.cost = Fraction(0)

    def __call__(self, task: Any) -> dict[str, Any]:
        read = task % 31
        self.cost += Fraction(read, 1000)
        return attributes(read, 0)


@pytest.mark.parametrize(("cost", "concurrency"), [(0.01, 8), (4.0, 1), (5.37, 8)])
async def test_apo_never_spends_more_money_than_it_has(cost: float, concurrency: int) -> None:
    client, spending, store = Dear(1), Spending(), InMemoryLightningStore()
    options: dict[str, Any] = {"budget": budget(cost, rollout_cost=0.03), "concurrency": concurrency, **MODELS}

    apo = await optimised(client, usage=spending, store=store, tasks=60, beam_rounds=20, **options)

    real = client.cost + spending.cost
    assert float(real) == apo.result.spent["cost"] <= cost
    assert apo.result.spent["rollouts"] == len(await store.query_rollouts())
    assert "budget" in apo.result.stopped
    assert apo.get_best_prompt().template == apo.result.best["prompt"].template


async def test_resumed_run_keeps_to_the_money_of_both(tmp_path: Path) -> None:
    store, path, limits = InMemoryLightningStore(), tmp_path / "state", budget(1.0, rollout_cost=0.03)
    client = Optimiser()
    running = asyncio.create_task(
        apo_in(store, client, state_file=path, budget=limits, seed=1, **MODELS).run([1, 2], list(range(20)))
    )
    while len(await store.query_rollouts()) < 20:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    again = apo_in(store, client, state_file=path, budget=limits, seed=1, **MODELS)
    async with agents(store, usage=lambda task: attributes(10, 0)):
        await again.run([1, 2], list(range(20)))

    assert again.result.spent["rollouts"] >= 20
    assert 0.2 <= again.result.spent["cost"] <= 1.0


@pytest.mark.parametrize("cost", [4.0, 7.7])
async def test_gepa_never_spends_more_money_than_it_has_and_keeps_some_to_compare(cost: float) -> None:
    write, spending, total = Writer(), Spending(), Fraction(0)

    async def create(**request: Any) -> Any:
        nonlocal total
        said = SimpleNamespace(content=write(request["messages"][0]["content"]))
        total += Fraction(100, 1000) + Fraction(request["max_completion_tokens"], 100)
        return SimpleNamespace(
            choices=[SimpleNamespace(message=said)], usage=used(100, request["max_completion_tokens"])
        )

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    gepa = await evolved(
        client, reflection_model=MODEL, budget=budget(cost, rollout_cost=0.03), usage=spending, proposals=2
    )

    assert gepa.result is not None
    assert float(total + spending.cost) == gepa.result.spent["cost"] <= cost
    assert "budget" in str(gepa.result.stopped)
    assert gepa.result.challenges, "enough is kept for the comparison"
