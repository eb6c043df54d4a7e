"""Replaying: a second attempt hears what the first one heard, and a fork hears it up to a call."""

import asyncio
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import requests

from agentlightning.dialects import CHAT
from agentlightning.errors import StoreUnavailable
from agentlightning.llm_proxy import Budget, LLMProxy
from agentlightning.llm_proxy.attribution import Attempts
from agentlightning.llm_proxy.recorder import Origin
from agentlightning.llm_proxy.replay import Replays
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, Span
from tests.llm_proxy.accounts import CALL, HERE, INPUTS, MODEL, RAW, ask, calls, chat, endpoint, entry, serving
from tests.stub_model.script import Failure, Script
from tests.stub_model.server import StubModel, running

TWICE = "the same question"


@pytest.fixture
def model() -> Iterator[StubModel]:
    """One that never says the same twice."""
    numbers = count(1)
    with running(Script(lambda request: f"answer {next(numbers)} to {request.text}")) as served:
        yield served


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


@pytest.fixture
def proxy(model: StubModel, store: InMemoryLightningStore) -> Iterator[LLMProxy]:
    with serving(model, store, replay=True) as served:
        yield served


def said(answer: requests.Response) -> str:
    """What the model said, whole or in pieces."""
    assert answer.status_code == 200, answer.text
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def hears(proxy: LLMProxy, rollout: AttemptedRollout, *texts: str, **fields: Any) -> list[str]:
    url = endpoint(proxy, rollout)
    heard = [said(await asyncio.to_thread(ask, url, text, **fields)) for text in texts]
    assert await asyncio.to_thread(proxy.flush)
    return heard


async def again(store: InMemoryLightningStore, rollout: AttemptedRollout) -> AttemptedRollout:
    return await store.start_attempt(rollout.rollout_id)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_second_attempt_hears_what_the_first_heard(
    proxy: LLMProxy, store: InMemoryLightningStore, model: StubModel, stream: bool
) -> None:
    first = await store.start_rollout("task")
    heard = await hears(proxy, first, TWICE, "another", TWICE, stream=stream)
    second = await again(store, first)

    assert await hears(proxy, second, TWICE, "another", TWICE, stream=stream) == heard

    assert len(set(heard)) == 3
    assert len(model.requests) == 3
    originals, repeated = await calls(store, first), await calls(store, second)
    assert [span.attributes[f"{HERE}.replayed_from"] for span in repeated] == [span.span_id for span in originals]
    assert [span.attributes["gen_ai.completion.0.content"] for span in repeated] == heard
    assert all("agentlightning.proxy.replayed_from" not in span.attributes for span in originals)


async def test_third_attempt_is_answered_from_the_second_and_new_calls_by_the_model(
    proxy: LLMProxy, store: Any, model: StubModel
) -> None:
    first = await store.start_rollout("task")
    heard = await hears(proxy, first, "a", TWICE)
    second = await again(store, first)
    await hears(proxy, second, "a", TWICE)
    third = await again(store, second)

    assert await hears(proxy, third, "a", TWICE) == heard
    assert len(model.requests) == 2
    assert (await hears(proxy, third, TWICE)) != heard[1:]
    assert len(model.requests) == 3


async def test_call_that_differs_asks_the_model_but_the_order_of_fields_does_not_matter(
    proxy: LLMProxy, store: Any, model: StubModel
) -> None:
    first = await store.start_rollout("task")
    await hears(proxy, first, "a", temperature=0.5)
    second = await again(store, first)
    reordered = dict(reversed(chat("a", temperature=0.5).items()))
    url = f"{endpoint(proxy, second)}/v1/chat/completions"

    answer = await asyncio.to_thread(lambda: requests.post(url, json=reordered, timeout=10))
    assert (answer.status_code, len(model.requests)) == (200, 1)
    await hears(proxy, second, "a", temperature=0.6)
    await hears(proxy, second, "a", temperature=0.5, stream=True)

    assert len(model.requests) == 3


async def test_caller_gets_no_token_ids_that_it_did_not_ask_for(proxy: LLMProxy, store: Any) -> None:
    first = await store.start_rollout("task")
    await hears(proxy, first, "a")
    second = await again(store, first)

    answer = await asyncio.to_thread(ask, endpoint(proxy, second), "a")
    await asyncio.to_thread(proxy.flush)

    assert "prompt_token_ids" not in answer.json()
    (span,) = await calls(store, second)
    assert span.attributes[f"{HERE}.token_ids"] == "given"


async def test_failed_call_is_made_again(store: InMemoryLightningStore) -> None:
    with running(Script([Failure(400, "no"), "yes"])) as model, serving(model, store, replay=True) as proxy:
        first = await store.start_rollout("task")
        assert (await asyncio.to_thread(ask, endpoint(proxy, first), "a")).status_code == 400
        await asyncio.to_thread(proxy.flush)
        second = await again(store, first)

        assert await hears(proxy, second, "a") == ["yes"]


async def test_nothing_is_replayed_unless_asked_for(model: StubModel, store: InMemoryLightningStore) -> None:
    with serving(model, store) as proxy:
        first = await store.start_rollout("task")
        await hears(proxy, first, "a")
        second = await again(store, first)
        await hears(proxy, second, "a")

    assert len(model.requests) == 2


async def test_replayed_calls_are_free(model: StubModel, store: InMemoryLightningStore) -> None:
    with serving(model, store, replay=True, run_budget=Budget(calls=1)) as proxy:
        first = await store.start_rollout("task")
        await hears(proxy, first, "a")
        second = await again(store, first)

        await hears(proxy, second, "a")

        assert proxy.status()["spent"]["calls"] == 1


# ---------------------------------------------------------------------- forks


async def fork(store: InMemoryLightningStore, origin: AttemptedRollout, **told: Any) -> AttemptedRollout:
    return await store.start_rollout("task", metadata={"replay_of": {"rollout_id": origin.rollout_id, **told}})


@pytest.mark.parametrize(("told", "repeated"), [({"calls": 2}, 2), ({}, 4), ({"calls": 0}, 0)])
async def test_fork_hears_the_same_up_to_a_call(
    proxy: LLMProxy, store: InMemoryLightningStore, told: dict[str, int], repeated: int
) -> None:
    first = await store.start_rollout("task")
    texts = ("a", TWICE, TWICE, "b")
    heard = await hears(proxy, first, *texts)
    forked = await fork(store, first, **told)

    new = await hears(proxy, forked, *texts)

    assert [old == now for old, now in zip(heard, new, strict=True)] == [n < repeated for n in range(4)]


async def test_call_that_a_backend_is_asked_twice_counts_once(store: InMemoryLightningStore) -> None:
    numbers, refused = count(1), 'Unrecognized request argument: "return_token_ids"'

    def answer(request: Any) -> Any:
        return Failure(400, refused) if request.body.get("return_token_ids") else f"answer {next(numbers)}"

    with running(Script(answer)) as model, serving(model, store, replay=True) as proxy:
        first = await store.start_rollout("task")
        heard = await hears(proxy, first, "a", "b")
        proxy.update_model_list(proxy.model_list)  # the backend is asked for ids again
        forked = await fork(store, first, calls=2)

        new = await hears(proxy, forked, "other", "b")

    assert heard[1] == new[1]


async def test_fork_of_an_attempt_that_is_not_the_last(proxy: LLMProxy, store: InMemoryLightningStore) -> None:
    first = await store.start_rollout("task")
    heard = await hears(proxy, first, "a")
    second = await again(store, first)
    await hears(proxy, second, "b")

    forked = await fork(store, first, attempt_id=first.attempt.attempt_id)

    assert await hears(proxy, forked, "a") == heard


async def test_metadata_that_cannot_be_read_is_an_error(proxy: LLMProxy, store: Any) -> None:
    for source in ("ro-1", {"attempt_id": "a"}, {"rollout_id": "r", "calls": "2"}):
        rollout = await store.start_rollout("task", metadata={"replay_of": source})

        answer = await asyncio.to_thread(ask, endpoint(proxy, rollout), "a")

        assert answer.status_code == 400
        assert "replay_of" in answer.json()["error"]["message"]


# ---------------------------------------------------------------------- dialects


async def test_answer_in_another_dialect_is_translated_again(store: InMemoryLightningStore) -> None:
    numbers = count(1)
    with running(Script(lambda _: f"answer {next(numbers)}")) as model:
        listed = entry(model, model=f"anthropic/{MODEL}", api_base=model.url)
        with serving(model, store, replay=True, model_list=[listed]) as proxy:
            first = await store.start_rollout("task")
            heard = await hears(proxy, first, "a", max_tokens=50)
            streamed = await hears(proxy, first, "a", max_tokens=50, stream=True)
            second = await again(store, first)

            assert await hears(proxy, second, "a", max_tokens=50) == heard
            assert await hears(proxy, second, "a", max_tokens=50, stream=True) == streamed
        assert [request.dialect for request in model.requests] == ["messages", "messages"]


async def test_every_dialect_is_replayed(proxy: LLMProxy, store: Any, model: StubModel) -> None:
    async def heard(rollout: AttemptedRollout) -> list[Any]:
        url = endpoint(proxy, rollout)
        answers = [
            await asyncio.to_thread(requests.post, url + path, json=body, timeout=10) for path, body in INPUTS.items()
        ]
        assert await asyncio.to_thread(proxy.flush)
        return [(answer.status_code, answer.json()) for answer in answers]

    first = await store.start_rollout("task")
    before = await heard(first)

    assert await heard(await again(store, first)) == before
    assert {status for status, _ in before} == {200}
    assert len(model.requests) == len(INPUTS)


# ---------------------------------------------------------------------- stores


class AwayStore(InMemoryLightningStore):
    """Cannot be asked for attempts as long as it is away."""

    is_away = True

    async def query_attempts(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().query_attempts(*args, **kwargs)


async def test_record_that_could_not_be_read_is_asked_for_again() -> None:
    store = AwayStore()
    rollout = await store.start_rollout("task")
    replays, attempts = Replays(store), Attempts(store)
    origin = Origin(rollout.rollout_id, rollout.attempt.attempt_id)

    with pytest.raises(StoreUnavailable):
        await replays.find(attempts, origin, CHAT, chat("a"))
    store.is_away = False

    assert await replays.find(attempts, origin, CHAT, chat("a")) is None


async def test_attempt_that_the_store_does_not_know_asks_the_model(proxy: LLMProxy, model: StubModel) -> None:
    llm = proxy.as_resource("ro-unknown", "at-unknown")

    answer = await asyncio.to_thread(ask, llm.endpoint, "a")

    assert answer.status_code == 200
    assert len(model.requests) == 1


_ANSWERED = {f"{HERE}.outcome": "answered", f"{HERE}.dialect": "chat"}
_SAID = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "forged"}}]})
_ASKED = json.dumps(chat("a"))


FORGED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"request_body": "{", "response_body": _SAID}),
    ({}, {"request_body": "[1]", "response_body": _SAID}),
    ({}, {"request_body": "[" * 900 + "]" * 900, "response_body": _SAID}),
    ({}, {"request_body": '{"a":' * 900 + "1" + "}" * 900, "response_body": _SAID}),
    ({}, {"request_body": "{", "received_body": _ASKED, "response_body": _SAID}),
    ({}, {"request_body": _ASKED, "response_body": "no answer"}),
    ({}, {"request_body": _ASKED, "response_body": "7"}),
    ({}, {"request_body": json.dumps(chat("a", stream=True)), "response_body": "data: {\n\n"}),
    ({"dialect": "klingon"}, {"request_body": _ASKED, "response_body": _SAID}),
    ({"dialect": ["chat"]}, {"request_body": _ASKED, "response_body": _SAID}),
    ({"backend_dialect": "klingon"}, {"request_body": _ASKED, "response_body": _SAID}),
    ({"dialect": "embeddings", "backend_dialect": "chat"}, {"request_body": _ASKED, "response_body": _SAID}),
]


async def test_spans_that_an_agent_wrote_do_not_break_the_next_attempt(
    proxy: LLMProxy, store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = await store.start_rollout("task")
    heard = await hears(proxy, first, "a", "b")
    ids = {"rollout_id": first.rollout_id, "attempt_id": first.attempt.attempt_id, "sequence_id": 0}
    for number, (of_call, of_raw) in enumerate(FORGED):
        call, raw = f"{number:016x}", f"{number + 100:016x}"
        attributes = {**_ANSWERED, **{f"{HERE}.{name}": value for name, value in of_call.items()}}
        await store.add_span(Span.from_attributes(**ids, name=CALL, span_id=call, attributes=attributes))
        attributes = {f"{HERE}.{name}": value for name, value in of_raw.items()}
        await store.add_span(Span.from_attributes(**ids, name=RAW, span_id=raw, parent_id=call, attributes=attributes))
    second = await again(store, first)

    assert await hears(proxy, second, "a", "b") == heard
    warned = [message for message in caplog.messages if "cannot be read as calls" in message]
    assert (len(warned), warned[0][:7], first.rollout_id in warned[0]) == (1, f"{len(FORGED)} span", True)
