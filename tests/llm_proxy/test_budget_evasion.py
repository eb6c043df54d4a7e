"""Budgets that a caller tries to get round: with numbers that are none, and with calls of no rollout."""

import asyncio
from collections.abc import Iterator

import pytest
import requests

from agentlightning.llm_proxy import Budget
from agentlightning.store import InMemoryLightningStore
from tests.llm_proxy.accounts import INPUTS, ask, endpoint, entry, serving
from tests.stub_model.script import Failure, Request, Script, Turn
from tests.stub_model.server import StubModel, running

COUNTS_BY_PATH = {
    "/v1/chat/completions": ("n", "best_of", "min_tokens", "max_tokens", "max_completion_tokens"),
    "/v1/completions": ("n", "best_of", "max_tokens"),
    "/v1/responses": ("n", "max_output_tokens"),
    "/v1/messages": ("max_tokens",),
}


@pytest.fixture(scope="module")
def budgeted() -> Iterator[str]:
    """The endpoint of a proxy with a budget, whose model speaks every dialect and is never asked."""
    with running() as model:
        listed = [entry(model, model_info={"dialects": ["chat", "completions", "responses", "messages"]})]
        with serving(model, model_list=listed, run_budget=Budget(tokens=1000)) as proxy:
            yield proxy.endpoint
        assert model.requests == []


# ---------------------------------------------------------------------- numbers that are none


def test_what_multiplies_an_answer_is_counted_as_the_backend_reads_it(model: StubModel) -> None:
    for name in ("n", "best_of"):
        for count in (50.0, "50", 50):
            model.requests.clear()
            with serving(model, run_budget=Budget(tokens=1000)) as proxy:
                ask(proxy.endpoint, max_tokens=900, **{name: count})

            sent = model.requests[0].body
            assert (sent[name], type(sent[name])) == (50, int)
            assert sent["max_tokens"] == 1000 // 50


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in COUNTS_BY_PATH.items() for name in names])
def test_a_count_that_is_no_whole_number_is_refused(budgeted: str, path: str, name: str) -> None:
    for wrong in (True, -1, 1.5, "many", "-1", "1_0", "٣", 10**10, 1e300, [1], {}, False):
        answer = requests.post(f"{budgeted}{path}", json={**INPUTS[path], name: wrong}, timeout=10)

        assert answer.status_code == 400, (wrong, answer.text)
        assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["n_predict", "num_predict", "max_new_tokens", "n_cmpl"])
def test_a_limit_by_a_name_that_is_not_counted_is_refused(budgeted: str, name: str) -> None:
    answer = ask(budgeted, **{name: 5000})

    assert (answer.status_code, "use n, max_completion_tokens, max_tokens." in answer.text) == (400, True)


def test_without_a_budget_numbers_are_the_backends_to_judge(model: StubModel) -> None:
    with serving(model, callbacks=[]) as proxy:
        ask(proxy.endpoint, n=1.0, min_tokens="x", n_predict=5)

        assert [model.requests[0].body[name] for name in ("n", "min_tokens", "n_predict")] == [1.0, "x", 5]


def test_least_number_of_tokens_does_not_undo_the_limit() -> None:
    def react(request: Request) -> Turn:
        least, most = request.body.get("min_tokens", 0), request.body.get("max_tokens")
        if most is not None and least > most:
            return Failure(400, f"min_tokens must be less than or equal to max_tokens={most}.")
        return "yes"

    with running(Script(react)) as model, serving(model, run_budget=Budget(tokens=1000)) as proxy:
        ask(proxy.endpoint, min_tokens=5000)

        assert [request.body["max_tokens"] for request in model.requests] == [1000]


# ---------------------------------------------------------------------- calls of no rollout


async def test_a_call_of_no_rollout_that_runs_has_no_budget_and_is_refused(model: StubModel) -> None:
    store = InMemoryLightningStore()
    ended, running_one = [await store.start_rollout(number) for number in range(2)]
    await store.update_attempt(ended.rollout_id, ended.attempt.attempt_id, status="succeeded")
    with serving(model, store, rollout_budget=Budget(calls=2)) as proxy:
        places = {
            "this call names no rollout": proxy.endpoint,
            "attempt 'at' of rollout 'made-up' is not known here": f"{proxy.endpoint}/rollout/made-up/attempt/at",
            "is not known here": f"{endpoint(proxy, running_one)}-other",
            "is over": endpoint(proxy, ended),
        }
        answers = {why: await asyncio.to_thread(ask, url) for why, url in places.items()}
        served = await asyncio.to_thread(ask, endpoint(proxy, running_one))

    assert {why: (told.status_code, told.json()["error"]["code"]) for why, told in answers.items()} == dict.fromkeys(
        places, (403, "no_rollout")
    )
    assert [why for why, told in answers.items() if why not in told.text] == []
    assert (served.status_code, len(model.requests)) == (200, 1)


async def test_headers_cannot_leave_a_budget_and_calls_of_no_rollout_count_for_the_run(model: StubModel) -> None:
    made_up = {"x-rollout-id": "made-up", "x-attempt-id": "at"}
    with serving(model, rollout_budget=Budget(calls=2)) as proxy:
        answer = await asyncio.to_thread(ask, proxy.endpoint, headers=made_up)

        assert (answer.status_code, proxy.status()["calls"]["unattributed"]) == (403, 0)
    with serving(model, run_budget=Budget(calls=1)) as proxy:
        assert [(await asyncio.to_thread(ask, proxy.endpoint)).status_code for _ in range(2)] == [200, 403]


def test_the_proxys_own_key_does_without_a_rollout(model: StubModel) -> None:
    with serving(model, rollout_budget=Budget(calls=1), api_key="the-key") as proxy:
        told = [ask(proxy.endpoint, headers={"authorization": "Bearer the-key"}).status_code for _ in range(3)]

    assert told == [200, 200, 200]
