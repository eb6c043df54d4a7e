"""Whose call it is, and with which key: paths, headers, keys of attempts; and secrets that nobody sees."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from agentlightning.dialects import DIALECTS
from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.llm_proxy import LLMProxy
from agentlightning.llm_proxy.attribution import (
    FRESH_SECONDS,
    STALE_SECONDS,
    Attempts,
    Authenticator,
    Refused,
    route_of,
    trace_parent,
)
from agentlightning.llm_proxy.recorder import Origin
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.types import LLM, AttemptedRollout, ProxyLLM, Rollout
from agentlightning.types.resources import derive_attempt_key
from tests.conftest import Clock
from tests.llm_proxy.accounts import HERE, ask, bound, calls, chat, endpoint, entry, serving
from tests.stub_model.script import Answer, Failure, Request, Script, Turn
from tests.stub_model.server import StubModel, running

KEY = "the-key-of-the-proxy"


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


@pytest.fixture
async def rollout(store: InMemoryLightningStore) -> AttemptedRollout:
    return await store.start_rollout("task")


@pytest.fixture
def proxy(model: StubModel, store: InMemoryLightningStore) -> Iterator[LLMProxy]:
    """One that is locked."""
    with serving(model, store, api_key=KEY) as served:
        yield served


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def names(rollout: AttemptedRollout) -> dict[str, str]:
    return {"x-rollout-id": rollout.rollout_id, "x-attempt-id": rollout.attempt.attempt_id}


async def status(url: str, headers: dict[str, str]) -> int:
    return (await asyncio.to_thread(ask, url, headers=headers)).status_code


# ---------------------------------------------------------------------- paths and headers


@pytest.mark.parametrize(
    ("path", "origin", "rest", "dialect"),
    [
        ("/v1/chat/completions", None, "/chat/completions", "chat"),
        ("/rollout/r/attempt/a/v1/chat/completions", Origin("r", "a"), "/chat/completions", "chat"),
        ("/rollout/r/attempt/a/chat/completions/", Origin("r", "a"), "/chat/completions", "chat"),
        ("/rollout/r/attempt/a/v1/v1/messages", Origin("r", "a"), "/messages", "messages"),
        ("/rollout/r/attempt/a/agent/x/v1/responses", Origin("r", "a", "x"), "/responses", "responses"),
        (
            "/rollout/r%2F1/attempt/a%20b/agent/%C3%A4/embeddings",
            Origin("r/1", "a b", "ä"),
            "/embeddings",
            "embeddings",
        ),
        ("/rollout/r/attempt/a", Origin("r", "a"), "/", None),
        ("/rollout/r/v1/completions", None, "/rollout/r/v1/completions", None),
    ],
)
def test_path_names_the_attempt(path: str, origin: Origin | None, rest: str, dialect: str | None) -> None:
    route = route_of(path)

    assert (route.origin, route.path) == (origin, rest)
    assert route.dialect is (None if dialect is None else DIALECTS[dialect])


def test_parent_of_a_call_is_the_span_that_made_it() -> None:
    assert trace_parent({b"traceparent": b"00-%s-%s-01" % (b"a" * 32, b"b" * 16)}) == ("a" * 32, "b" * 16)
    assert trace_parent({b"traceparent": b"nonsense"}) is None
    assert trace_parent({b"traceparent": b"00-%s-%s-01" % (b"0" * 32, b"b" * 16)}) is None


async def test_headers_name_the_attempt(model: StubModel, store: Any, rollout: AttemptedRollout) -> None:
    with serving(model, store) as proxy:
        assert await status(proxy.endpoint, {**names(rollout), "x-agent-name": "writer"}) == 200

    (call,) = await calls(store, rollout)
    assert call.attributes["agent.name"] == "writer"


async def test_key_alone_names_the_attempt_also_where_none_is_needed(
    model: StubModel, store: Any, rollout: AttemptedRollout
) -> None:
    with serving(model, store) as proxy:
        key = proxy.attempt_key(rollout.rollout_id, rollout.attempt.attempt_id)
        assert await status(proxy.endpoint, {"x-api-key": key}) == 200

    assert len(await calls(store, rollout)) == 1


async def test_call_without_a_name_is_served_and_counted(model: StubModel, caplog: pytest.LogCaptureFixture) -> None:
    with serving(model) as proxy:
        for _ in range(3):
            assert await status(proxy.endpoint, {}) == 200

        assert proxy.status()["calls"]["unattributed"] == 3
    assert caplog.text.count("names no rollout") == 1


# ---------------------------------------------------------------------- keys


async def test_key_alone_is_enough(proxy: LLMProxy, store: Any, rollout: AttemptedRollout) -> None:
    key = proxy.attempt_key(rollout.rollout_id, rollout.attempt.attempt_id, "writer")

    for headers in (bearer(key), {"x-api-key": key}, {"api-key": key}):
        assert await status(proxy.endpoint, headers) == 200

    await asyncio.to_thread(proxy.flush)
    assert [call.attributes["agent.name"] for call in await calls(store, rollout)] == ["writer"] * 3


async def test_resource_gives_each_attempt_its_key(proxy: LLMProxy, store: Any, rollout: AttemptedRollout) -> None:
    resource = proxy.as_resource()
    assert isinstance(resource, ProxyLLM)
    llm = resource.with_attempted_rollout(rollout)

    assert llm.api_key is not None
    assert KEY not in llm.api_key
    assert await status(llm.endpoint, bearer(llm.api_key)) == 200


OTHER_SECRET = derive_attempt_key("agl-proxy-other", "ro-1", "at-1")


async def test_wrong_key_is_refused(proxy: LLMProxy, rollout: AttemptedRollout) -> None:
    for key in (None, "", "wrong", "agl-attempt-e30.e30", "agl-proxy-wrong", "ü", OTHER_SECRET):
        headers = {"authorization": f"Bearer {key}".encode()} if key is not None else {}
        answer = await asyncio.to_thread(ask, endpoint(proxy, rollout), headers=headers)  # type: ignore[arg-type]

        assert (answer.status_code, answer.headers["x-should-retry"]) == (401, "false")


async def test_key_of_another_attempt_is_refused(proxy: LLMProxy, store: Any, rollout: AttemptedRollout) -> None:
    other = await store.start_rollout("other")
    key = bound(proxy, other).api_key

    assert await status(endpoint(proxy, rollout), bearer(key)) == 403
    assert await status(proxy.endpoint, {**bearer(key), **names(rollout)}) == 403


def test_key_of_one_agent_is_not_for_another() -> None:
    keeper = Authenticator(KEY)
    key = derive_attempt_key(keeper.secret, "r", "a", "reader").encode()
    headers = {b"authorization": b"Bearer " + key}

    with pytest.raises(Refused) as told:
        keeper.admit(route_of("/rollout/r/attempt/a/agent/writer/v1/messages"), headers)

    assert told.value.failure.status == 403
    assert keeper.admit(route_of("/rollout/r/attempt/a/v1/messages"), headers).origin == Origin("r", "a", "reader")


async def test_own_key_opens_for_everybody_and_that_of_an_unknown_attempt_for_nobody(
    proxy: LLMProxy, rollout: AttemptedRollout
) -> None:
    for key in (KEY, f"agl-proxy-{KEY}"):
        assert await status(endpoint(proxy, rollout), bearer(key)) == 200
        assert await status(proxy.endpoint, bearer(key)) == 200
    llm = proxy.as_resource("ro-unknown", "at-unknown")
    assert await status(llm.endpoint, bearer(llm.api_key)) == 401


@pytest.mark.parametrize("end", ["finished", "cancelled", "followed"])
async def test_key_ends_with_its_attempt(
    proxy: LLMProxy, store: InMemoryLightningStore, rollout: AttemptedRollout, end: str
) -> None:
    llm = bound(proxy, rollout)
    assert await status(llm.endpoint, bearer(llm.api_key)) == 200
    if end == "cancelled":
        await store.update_rollout(rollout.rollout_id, status="cancelled")
    elif end == "followed":  # it was lost, and its agent goes on; calls do not revive it
        await store.start_attempt(rollout.rollout_id)
    else:
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")

    deadline = asyncio.get_running_loop().time() + FRESH_SECONDS + 5.0
    while await status(llm.endpoint, bearer(llm.api_key)) == 200:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)

    answer = await asyncio.to_thread(ask, llm.endpoint, headers=bearer(llm.api_key))
    assert answer.status_code == 401
    assert "is over" in answer.json()["error"]["message"]


async def test_status_and_models_need_a_key(proxy: LLMProxy, rollout: AttemptedRollout) -> None:
    def get(path: str, key: str | None) -> int:
        return requests.get(f"{proxy.endpoint}{path}", headers=bearer(key), timeout=10).status_code

    told = [await asyncio.to_thread(get, path, None) for path in ("/agl/status", "/v1/models", "/health")]
    opened = [await asyncio.to_thread(get, path, KEY) for path in ("/agl/status", "/v1/models")]

    assert (told, opened) == ([401, 401, 200], [200, 200])


async def test_the_key_of_an_attempt_does_not_read_where_the_backends_are(
    proxy: LLMProxy, model: StubModel, rollout: AttemptedRollout
) -> None:
    llm = bound(proxy, rollout)
    key = bearer(llm.api_key)

    def answers() -> list[requests.Response]:
        read = [requests.get(llm.endpoint + path, headers=key, timeout=10) for path in ("/agl/status", "/v1/models")]
        return [*read, requests.post(f"{llm.endpoint}/agl/flush", headers=key, timeout=10)]

    status, models, flush = await asyncio.to_thread(answers)

    assert (status.status_code, models.status_code, flush.status_code) == (403, 200, 200)
    assert "its own key" in status.json()["error"]["message"]
    assert model.url not in status.text + models.text


def test_the_status_of_an_open_proxy_shows_no_credentials_of_addresses(model: StubModel) -> None:
    address = model.openai_url.replace("http://", "http://ada:pass-word@") + "?token=query-secret"
    with serving(model, model_list=[entry(model, api_base=address)]) as proxy:
        told = requests.get(f"{proxy.endpoint}/agl/status", timeout=10)

    assert (told.status_code, len(told.json()["backends"])) == (200, 1)
    assert not [secret for secret in ("ada", "pass-word", "query-secret") if secret in told.text]


# ---------------------------------------------------------------------- what is known of an attempt


class CountingStore(InMemoryLightningStore):
    """Counts how often it is asked, and can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.is_away = False

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        self.asked += 1
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().get_rollout_by_id(rollout_id)


async def known(clock: Clock) -> tuple[CountingStore, Attempts, Origin]:
    store = CountingStore()
    rollout = await store.start_rollout("task")
    return store, Attempts(store, clock), Origin(rollout.rollout_id, rollout.attempt.attempt_id)


async def test_attempt_is_looked_up_once_a_second_also_by_many_calls_at_once(clock: Clock) -> None:
    store, attempts, origin = await known(clock)

    facts = await asyncio.gather(*(attempts.facts(origin) for _ in range(50)))
    facts += [await attempts.facts(origin) for _ in range(50)]

    assert (store.asked, {fact.is_running for fact in facts}) == (1, {True})


async def test_facts_older_than_a_second_are_not_used(clock: Clock) -> None:
    store, attempts, origin = await known(clock)
    await attempts.facts(origin)
    await store.update_attempt(origin.rollout_id, origin.attempt_id, status="failed")
    clock.advance(FRESH_SECONDS)

    assert not (await attempts.facts(origin)).is_running


async def test_facts_are_used_while_the_store_is_away_but_not_for_ever(clock: Clock) -> None:
    store, attempts, origin = await known(clock)
    await attempts.facts(origin)
    store.is_away = True
    clock.advance(FRESH_SECONDS + 5)

    assert (await attempts.facts(origin)).is_running
    clock.advance(STALE_SECONDS)
    with pytest.raises(StoreUnavailable):
        await attempts.facts(origin)


async def test_agent_gets_the_model_of_its_resources(clock: Clock) -> None:
    store = InMemoryLightningStore()
    await store.update_resources("v1", {"main_llm": LLM(endpoint="e", model="first")})
    rollout = await store.start_rollout("task", resources_id="v1")
    attempts = Attempts(store, clock)
    origin = Origin(rollout.rollout_id, rollout.attempt.attempt_id, "writer")

    first = await attempts.llm_of(origin)
    await store.update_resources("v1", {"main_llm": LLM(endpoint="e", model="second")})
    clock.advance(FRESH_SECONDS)
    second = await attempts.llm_of(origin)

    assert [llm and llm.model for llm in (first, second)] == ["first", "second"]


# ---------------------------------------------------------------------- secrets

PROVIDER_KEY, HEADER_SECRET = "sk-provider-0123456789abcdef", "extra-secret-fedcba9876543210"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_secrets_of_providers_are_seen_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    store = SqliteLightningStore(tmp_path / "store.db")
    rollout = await store.start_rollout("task")
    leaky = Failure(400, f"Incorrect API key provided: {PROVIDER_KEY}, with {HEADER_SECRET}")
    broken = Answer("one two three", cut_after_events=2, cut_with=leaky if stream else None)

    def react(request: Request) -> Turn:
        return {"fine": "fine", "refused": leaky, "failed": Failure(500, f"Oh, {PROVIDER_KEY}")}.get(
            request.text, broken
        )

    with running(Script(react), api_key=PROVIDER_KEY) as model:
        secret = {"api_key": PROVIDER_KEY, "extra_headers": {"x-secret": HEADER_SECRET}}
        with serving(model, store, api_key=KEY, raw_spans=True, model_list=[entry(model, **secret)]) as proxy:
            llm = bound(proxy, rollout)

            def call(text: str) -> str:
                url, headers = f"{llm.endpoint}/v1/chat/completions", bearer(llm.api_key)
                try:
                    answer = requests.post(url, json=chat(text, stream=stream), headers=headers, timeout=20)
                except requests.RequestException as error:
                    return repr(error)
                return answer.text + repr(answer.headers)

            heard = [await asyncio.to_thread(call, text) for text in ("fine", "refused", "failed", "broken")]
            shown = repr(await asyncio.to_thread(proxy.status)) + repr(proxy) + repr(proxy.as_resource("r", "a"))
            await asyncio.to_thread(proxy.flush)
        assert model.requests[0].headers["authorization"] == f"Bearer {PROVIDER_KEY}"  # it was used
        assert model.requests[0].headers["x-secret"] == HEADER_SECRET
    spans = [span.model_dump_json() for span in await store.query_spans(rollout.rollout_id)]
    await store.close()
    assert len(spans) == 8
    for place in (*heard, shown, caplog.text, *spans):
        assert PROVIDER_KEY not in place
        assert HEADER_SECRET not in place
    assert KEY not in caplog.text + "".join(heard) + "".join(spans)


async def test_key_that_a_caller_shows_is_not_passed_on(proxy: LLMProxy, model: StubModel, store: Any) -> None:
    rollout = await store.start_rollout("task")
    llm = bound(proxy, rollout)
    assert llm.api_key is not None

    await status(llm.endpoint, bearer(llm.api_key))
    await asyncio.to_thread(proxy.flush)

    assert llm.api_key not in repr(model.requests[0].headers)
    (call,) = await calls(store, rollout)
    assert llm.api_key not in call.model_dump_json()
    assert call.attributes[f"{HERE}.outcome"] == "answered"


@pytest.mark.parametrize(
    ("key", "why"),
    [("", "is empty"), (" ", "holds white space"), ("a\tb", "holds white space"), ("schlüssel", "is not plain ASCII")],
)
def test_an_api_key_that_protects_nothing_is_refused(key: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"The API key of the LLM proxy {why}; make one with"):
        LLMProxy(api_key=key)
