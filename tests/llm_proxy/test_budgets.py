"""Budgets: cut off exactly, also with many calls at once, and told in every dialect's words."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.dialects import CHAT, DIALECTS
from agentlightning.llm_proxy import Budget
from agentlightning.llm_proxy.attribution import Refused
from agentlightning.llm_proxy.budgets import (
    LEAST_SHARE,
    SHARES,
    Budgets,
    Prices,
    Spent,
    is_about_limit,
    with_token_limit,
)
from agentlightning.store import InMemoryLightningStore
from tests.llm_proxy.accounts import HERE, INPUTS, ask, calls, chat, endpoint, entry, serving
from tests.stub_model.raw import until
from tests.stub_model.script import Answer, Failure, Request, Script, Turn
from tests.stub_model.server import StubModel, running

FREE = Prices()
LONG = "word " * 500


def refusal(budgets: Budgets, **body: Any) -> tuple[int, str | None]:
    with pytest.raises(Refused) as told:
        budgets.admit("ro", CHAT, body, FREE)
    return told.value.failure.status, told.value.failure.code


# ---------------------------------------------------------------------- rules


@pytest.mark.parametrize("wrong", [{"calls": -1}, {"tokens": -5}, {"cost": -0.1}, {"cost": float("nan")}])
def test_negative_budget_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Budget(**wrong)


def test_call_without_limit_gets_a_share_of_what_is_left() -> None:
    budgets = Budgets(per_run=Budget(tokens=10_000_000))
    small = Budgets(per_run=Budget(tokens=1000))

    assert budgets.admit("ro", CHAT, {}, FREE).most_written == 10_000_000 // SHARES
    assert small.admit("ro", CHAT, {}, FREE).most_written == 1000 < LEAST_SHARE


def test_what_is_reserved_is_not_gone_but_to_be_waited_for() -> None:
    budgets = Budgets(per_run=Budget(tokens=1000))
    first = budgets.admit("ro", CHAT, {"max_tokens": 1000}, FREE)

    assert refusal(budgets) == (429, "budget_reserved")
    first.charge((10, 20))
    assert budgets.admit("ro", CHAT, {}, FREE).most_written == 970


def test_call_that_is_taken_back_leaves_no_trace() -> None:
    budgets = Budgets(per_run=Budget(tokens=1000, calls=1))
    budgets.admit("ro", CHAT, {}, Prices(1.0, 1.0)).cancel()

    assert budgets.of_run == Spent()
    assert budgets.admit("ro", CHAT, {}, FREE).most_written == 1000


@pytest.mark.parametrize(
    ("dialect", "body", "most"),
    [
        ("chat", {"n": 4}, 250),
        ("completions", {"best_of": 5, "n": 2}, 200),
        ("completions", {"prompt": ["a", "b"], "n": 2}, 250),
        ("completions", {"prompt": [1, 2, 3]}, 1000),
        ("messages", {"max_tokens": 2000}, 1000),
        ("responses", {"max_output_tokens": 10}, 10),
        ("completions", {"prompt": [1, "a", "b", "c"]}, 250),
        ("completions", {"prompt": ["a"], "prompt_embeds": ["x", "y", "z"]}, 250),
        ("responses", {"n": 4}, 250),
        ("chat", {"max_tokens": 5, "max_completion_tokens": 700}, 700),
        ("embeddings", {"input": ["a", "b"]}, 0),
    ],
)
def test_what_each_choice_may_write(dialect: Any, body: dict[str, Any], most: int) -> None:
    reservation = Budgets(per_run=Budget(tokens=1000)).admit("ro", DIALECTS[dialect], body, FREE)

    assert reservation.most_written == most
    assert reservation.tokens <= 1000


@pytest.mark.parametrize(
    ("dialect", "provider", "body", "limits"),
    [
        ("chat", "hosted_vllm", {}, {"max_tokens": 100}),
        ("chat", "openai", {}, {"max_completion_tokens": 100}),
        ("chat", "openai", {"max_tokens": 300}, {"max_tokens": 100}),
        ("chat", "", {"max_tokens": 30}, {"max_tokens": 30}),
        (
            "chat",
            "",
            {"max_tokens": 5, "max_completion_tokens": 10**9},
            {"max_tokens": 5, "max_completion_tokens": 100},
        ),
        ("chat", "", {"max_tokens": 500, "min_tokens": 400}, {"max_tokens": 100, "min_tokens": 100}),
        ("chat", "", {"max_tokens": 50, "min_tokens": 0}, {"max_tokens": 50, "min_tokens": 0}),
        ("completions", "openai", {}, {"max_tokens": 100}),
        ("responses", "", {}, {"max_output_tokens": 100}),
        ("messages", "", {"max_tokens": 4096}, {"max_tokens": 100}),
        ("embeddings", "", {}, {}),
    ],
)
def test_request_is_limited(dialect: Any, provider: str, body: dict[str, Any], limits: dict[str, int]) -> None:
    assert with_token_limit(DIALECTS[dialect], body, 100, provider) == limits


@pytest.mark.parametrize(
    "told", [b"'max_tokens' is too large: 9", b"maximum context length is 4096 tokens", b"max_completion_tokens"]
)
def test_error_about_the_limit_is_recognised(told: bytes) -> None:
    assert is_about_limit(told)
    assert not is_about_limit(b"The image cannot be read.")


_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.none() | st.integers(1, 300),
        st.integers(1, 4),
        st.floats(0, 1),
        st.booleans(),
        st.integers(0, 4),
    ),
    max_size=60,
)


@given(_CALLS, st.integers(0, 2000), st.integers(0, 800))
def test_what_is_written_never_exceeds_any_budget(made: list[Any], of_run: int, of_rollout: int) -> None:
    budgets = Budgets(Budget(tokens=of_rollout, cost=of_rollout * 0.5), Budget(tokens=of_run, calls=40))
    under_way: list[Any] = []
    for rollout_id, limit, choices, share, fails, settled in made:
        body = {"n": choices} if limit is None else {"n": choices, "max_tokens": limit}
        with contextlib.suppress(Refused):
            under_way.append((budgets.admit(rollout_id, CHAT, body, Prices(0.0, 1.0)), share, fails))
        for reservation, part, is_failed in [under_way.pop() for _ in range(min(settled, len(under_way)))]:
            written = int(reservation.tokens * part)
            reservation.charge(None if is_failed else (0, written))
    for reservation, part, is_failed in under_way:
        reservation.charge(None if is_failed else (0, reservation.tokens), is_begun=part > 0.5)

    assert budgets.of_run.tokens <= of_run
    assert budgets.of_run.calls <= 40
    for rollout_id in ("a", "b", "c"):
        spent = budgets.of_rollout(rollout_id)
        assert spent.tokens <= of_rollout
        assert spent.cost <= of_rollout * 0.5 + 1e-6
        assert (spent.reserved_tokens, spent.reserved_cost, spent.in_flight) == (0, 0.0, 0)


# ---------------------------------------------------------------------- through the proxy


def test_calls_are_cut_off_exactly_with_many_at_once() -> None:
    slow = Script(lambda request: Answer(request.text, latency_seconds=0.05))
    with running(slow) as model, ThreadPoolExecutor(64) as pool, serving(model, run_budget=Budget(calls=20)) as proxy:
        answers = list(pool.map(lambda number: ask(proxy.endpoint, f"call {number}"), range(64)))

        assert sorted(answer.status_code for answer in answers) == [200] * 20 + [403] * 44
        assert len(model.requests) == 20
        assert proxy.status()["spent"]["calls"] == 20


async def test_each_rollout_has_its_own_budget(model: StubModel) -> None:
    store = InMemoryLightningStore()
    rollouts = [await store.start_rollout(number) for number in range(2)]
    with serving(model, store, rollout_budget=Budget(calls=3)) as proxy:
        endpoints = [endpoint(proxy, rollout) for rollout in rollouts for _ in range(5)]
        told = [(await asyncio.to_thread(ask, url)).status_code for url in endpoints]
        await asyncio.to_thread(proxy.flush)

    assert told == [200, 200, 200, 403, 403] * 2
    outcomes = [span.attributes[f"{HERE}.outcome"] for span in await calls(store, rollouts[0])]
    assert outcomes == ["answered"] * 3 + ["refused"] * 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tokens_are_cut_off(stream: bool) -> None:
    with running(Script(lambda _: LONG)) as model, serving(model, run_budget=Budget(tokens=300)) as proxy:
        answers = [ask(proxy.endpoint, "Hi", stream=stream, max_tokens=100) for _ in range(8)]

        written = [min(request.body["max_tokens"], 500) for request in model.requests]
        assert [answer.status_code for answer in answers][-1] == 403
        assert sum(written) <= 300
        assert proxy.status()["spent"]["tokens"] <= 300 + 20 * len(model.requests)  # and the prompts
        assert "The budget of this run is 300 tokens" in answers[-1].json()["error"]["message"]


def test_money_is_cut_off() -> None:
    priced = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.01}
    with (
        running(Script(lambda _: LONG)) as model,
        serving(model, model_list=[entry(model, **priced)], run_budget=Budget(cost=2.5)) as proxy,
    ):
        answers = [ask(proxy.endpoint, max_tokens=100).status_code for _ in range(4)]

        assert answers == [200, 200, 200, 403]
        assert [request.body["max_tokens"] for request in model.requests] == [100, 100, 50]
        assert proxy.status()["spent"]["cost"] == pytest.approx(2.5)


def test_failed_call_gives_its_tokens_back() -> None:
    script = Script([Failure(400, "no"), "yes"])
    with running(script) as model, serving(model, run_budget=Budget(tokens=1000)) as proxy:
        failed, answered = ask(proxy.endpoint, max_tokens=9999), ask(proxy.endpoint, max_tokens=9999)

        assert (failed.status_code, answered.status_code) == (400, 200)
        assert [request.body["max_tokens"] for request in model.requests] == [1000, 1000]
        assert proxy.status()["spent"]["calls"] == 2


# ---------------------------------------------------------------------- what the agent hears


def test_refusal_has_the_dialects_shape(model: StubModel) -> None:
    with serving(model, run_budget=Budget(calls=0)) as proxy:
        for path, body in INPUTS.items():
            for stream in ({}, {"stream": True}):
                answer = requests.post(f"{proxy.endpoint}{path}", json={**body, **stream}, timeout=10)

                assert (answer.status_code, answer.headers["x-should-retry"]) == (403, "false")
                error = answer.json()["error"]
                assert "budget of this run is 0 model calls" in error["message"]
                if path == "/v1/messages":
                    assert (answer.json()["type"], error["type"]) == ("error", "permission_error")
                else:
                    assert error["code"] == "budget_exceeded"
    assert model.requests == []


# ---------------------------------------------------------------------- limits of ours and of backends


def with_room(tokens: int) -> Script:
    """A model that refuses requests for more than it has room for, as vLLM does."""

    def react(request: Request) -> Turn:
        asked = request.body.get("max_tokens")
        if asked is not None and asked > tokens:
            return Failure(400, f"'max_tokens' is too large: {asked}. This model's maximum context length is {tokens}.")
        return "yes"

    return Script(react)


def test_backend_with_less_room_than_our_limit_is_called_without_it() -> None:
    with running(with_room(1000)) as model, serving(model, run_budget=Budget(tokens=10**6)) as proxy:
        answer = ask(proxy.endpoint)

        assert answer.status_code == 200
        assert [request.body.get("max_tokens") for request in model.requests] == [10**6 // SHARES, None]
        assert proxy.status()["spent"]["calls"] == 1
        assert ask(proxy.endpoint, max_tokens=5000).status_code == 400  # the caller's own limit stays


def test_defaults_of_a_backend_are_limited_too(model: StubModel) -> None:
    listed = [entry(model, max_completion_tokens=5000, n=2)]
    with serving(model, model_list=listed, run_budget=Budget(tokens=100)) as proxy:
        assert ask(proxy.endpoint).status_code == 200

        assert model.requests[0].body["max_completion_tokens"] == 50
        assert "max_tokens" not in model.requests[0].body


def test_answer_whose_usage_is_not_told_costs_what_it_might_have_been() -> None:
    slow = Script(lambda _: Answer("word " * 500, pause_seconds=0.05))
    with running(slow) as model, serving(model, run_budget=Budget(tokens=1000)) as proxy:
        body = chat("Hi", stream=True, max_tokens=300)
        with requests.post(f"{proxy.endpoint}/v1/chat/completions", json=body, stream=True, timeout=10) as answer:
            next(answer.iter_content(10))

        until(lambda: proxy.status()["spent"]["tokens"])
        assert proxy.status()["spent"]["tokens"] == 300


def test_retry_after_is_told_where_what_is_left_is_reserved() -> None:
    slow = Script(lambda request: Answer(request.text, latency_seconds=0.3))
    with running(slow) as model, serving(model, run_budget=Budget(tokens=1000)) as proxy, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, proxy.endpoint, "first")
        until(lambda: model.requests)

        second = ask(proxy.endpoint, "second")

        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert "x-should-retry" not in second.headers
        assert first.result().status_code == 200
