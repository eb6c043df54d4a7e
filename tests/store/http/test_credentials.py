"""Keys in resources over the network: who reads them, and how a runner's attempts get theirs without the secrets."""

import json
import re
from typing import Any, get_type_hints

import aiohttp
import pytest

from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreServer
from agentlightning.store.http.tokens import Scope, ScopeKind, sign_token
from agentlightning.store.operations import operations_of
from agentlightning.types import LLM, NamedResources, PaginatedResult, PromptTemplate, ProxyLLM, ResourcesUpdate, Run
from agentlightning.types.resources import AttemptKey, read_attempt_key
from tests.store.http.conftest import Connect, Serve

MASTER = "the-master-token-of-this-server"
PROXY_SECRET = "agl-proxy-0123456789abcdef"
PROVIDER_KEY = "sk-of-the-provider"
RESOURCES: NamedResources = {
    "plain": LLM(
        endpoint="http://h/v1",
        model="m",
        api_key=PROVIDER_KEY,
        sampling_parameters={"max_tokens": 9, "extra_headers": {"Authorization": f"Bearer {PROVIDER_KEY}"}},
    ),
    "proxied": ProxyLLM(endpoint="http://p:1", model="m", api_key=PROXY_SECRET),
    "open": ProxyLLM(endpoint="http://p:2", model="m"),
    "prompt": PromptTemplate(template="Be brief.", engine="f-string"),
}
READS = ("/v1/agl/resources/latest", "/v1/agl/resources/mine", "/v1/agl/resources")
"""Every route that answers with resources."""
every_transport = pytest.mark.parametrize("transport", ["http", "ws"])


def token_of(kind: ScopeKind) -> str:
    return sign_token(MASTER, Scope(kind), expires_at=None)


@pytest.fixture
async def server(serve: Serve) -> LightningStoreServer:
    started: LightningStoreServer = await serve(token=MASTER)
    await started.update_resources("mine", RESOURCES)
    return started


def keys_in(found: Any) -> dict[str, Any]:
    """The keys of resources by name; of the first of several."""
    update = found.items[0] if isinstance(found, PaginatedResult) else found
    assert isinstance(update, ResourcesUpdate)
    return {name: llm.api_key for name, llm in update.resources.items() if isinstance(llm, LLM)}


# ---------------------------------------------------------------------- who reads what


async def test_a_reader_sees_no_key_on_any_route(server: LightningStoreServer, session: aiohttp.ClientSession) -> None:
    for path in READS:
        headers = {"Authorization": f"Bearer {token_of('reader')}"}
        async with session.get(server.endpoint + path, headers=headers) as response:
            text = await response.text()

        assert response.status == 200, path
        assert [secret for secret in (PROXY_SECRET, PROVIDER_KEY) if secret in text] == [], path
        assert all(part in text for part in ('"api_key":"***"', '"api_key":null', '"max_tokens":9')), path


async def test_a_reader_sees_no_key_on_the_live_channel(server: LightningStoreServer, connect: Connect) -> None:
    client = connect(server.endpoint, token=token_of("reader"), transport="ws")
    for found in (await client.get_latest_resources(), await client.query_resources()):
        assert keys_in(found) == {"plain": "***", "proxied": "***", "open": None}


@every_transport
async def test_a_runner_sees_keys_of_providers_and_references_to_secrets_of_proxies(
    server: LightningStoreServer, connect: Connect, transport: str
) -> None:
    client = connect(server.endpoint, token=token_of("runner"), transport=transport)

    found = [
        await client.get_latest_resources(),
        await client.get_resources_by_id("mine"),
        await client.query_resources(),
    ]

    for keys in map(keys_in, found):
        assert (keys["plain"], keys["open"]) == (PROVIDER_KEY, None)
        assert keys["proxied"].startswith("agl-proxyref-")
        assert PROXY_SECRET.removeprefix("agl-proxy-") not in keys["proxied"]


async def test_the_master_token_and_the_process_itself_see_all(server: LightningStoreServer, connect: Connect) -> None:
    await connect(server.endpoint, token=token_of("reader")).get_latest_resources()
    for store in (server, connect(server.endpoint, token=MASTER)):
        keys = keys_in(await store.get_latest_resources())
        assert keys == {"plain": PROVIDER_KEY, "proxied": PROXY_SECRET, "open": None}


async def test_a_reference_says_nothing_to_whoever_guesses_the_secret(serve: Serve, connect: Connect) -> None:
    references = set()
    for master in (MASTER, f"{MASTER}-2"):
        server = await serve(token=master)
        await server.add_resources(RESOURCES)
        client = connect(server.endpoint, token=sign_token(master, Scope("runner"), expires_at=None))
        references.add(keys_in(await client.get_latest_resources())["proxied"])

    assert len(references) == 2  # made with what the caller does not have


class OldRuns(LightningStore):
    """A store of somebody else's, or of an earlier release: it has kept what a run was configured with."""

    async def query_runs(self, **_: Any) -> PaginatedResult[Run]:
        run = Run(run_id="run-1", name="old", start_time=0.0, config={"api_key": PROVIDER_KEY, "lr": 0.1})
        return PaginatedResult(items=[run], limit=-1, offset=0, total=1)


async def test_keys_that_a_run_has_kept_are_for_the_admin(serve: Serve, connect: Connect) -> None:
    server = await serve(OldRuns(), token=MASTER)

    shown: dict[Any, str] = {"reader": "***", "runner": "***", "admin": PROVIDER_KEY}
    for kind, key in shown.items():
        (run,) = await connect(server.endpoint, token=token_of(kind)).query_runs()

        assert run.config == {"api_key": key, "lr": 0.1}


def test_every_operation_that_answers_with_keys_is_known_here() -> None:
    answers = {name: get_type_hints(op.declared)["return"] for name, op in operations_of(LightningStore).items()}

    found = {name for name, hint in answers.items() if re.search(r"\b(ResourcesUpdate|Claim|Run)\b", str(hint))}

    assert found == {
        *("claim_rollouts", "finish_and_claim"),
        *("add_resources", "update_resources", "get_latest_resources", "get_resources_by_id", "query_resources"),
        *("start_run", "finish_run", "get_run_by_id", "query_runs"),
    }


# ---------------------------------------------------------------------- the keys of a claim


async def claim_with_keys(client: Any, server: LightningStoreServer, **options: Any) -> Any:
    await server.enqueue_rollout("task", **options)
    (claim,) = await client.claim_rollouts(worker_id="w")
    return claim


def reference_in(claim: Any) -> str:
    return str(keys_in(claim.resources)["proxied"])


@every_transport
async def test_a_claim_carries_the_attempt_s_keys_by_reference(
    server: LightningStoreServer, connect: Connect, transport: str
) -> None:
    client = connect(server.endpoint, token=token_of("runner"), transport=transport)

    claim = await claim_with_keys(client, server)

    assert list(claim.proxy_keys) == [reference_in(claim)]
    key = read_attempt_key(PROXY_SECRET, claim.proxy_keys[reference_in(claim)])
    assert key == AttemptKey(claim.rollout.rollout_id, claim.rollout.attempt.attempt_id)


async def test_a_claim_whose_resources_are_known_carries_keys_all_the_same(
    server: LightningStoreServer, connect: Connect, serve: Serve
) -> None:
    client = connect(server.endpoint, token=token_of("runner"))
    first = await claim_with_keys(client, server)
    restarted = await serve(server.store, token=MASTER)  # has seen no resources yet
    client = connect(restarted.endpoint, token=token_of("runner"))
    await server.enqueue_rollout("task")
    await server.enqueue_rollout("task")

    claims = [(await client.claim_rollouts(known_resources=[first.version]))[0] for _ in range(2)]

    for claim in claims:
        key = read_attempt_key(PROXY_SECRET, claim.proxy_keys[reference_in(first)])
        assert claim.resources is None
        assert key == AttemptKey(claim.rollout.rollout_id, claim.rollout.attempt.attempt_id)


async def test_a_new_version_brings_the_key_of_its_own_secret(server: LightningStoreServer, connect: Connect) -> None:
    client = connect(server.endpoint, token=token_of("runner"))
    first = await claim_with_keys(client, server)
    proxied = ProxyLLM(endpoint="http://p:1", model="m", api_key="agl-proxy-another-secret")
    await server.update_resources("mine", {"proxied": proxied})

    second = await claim_with_keys(client, server)

    assert reference_in(second) != reference_in(first)
    assert read_attempt_key("agl-proxy-another-secret", second.proxy_keys[reference_in(second)]) is not None


async def test_resources_that_a_rollout_pins_an_agent_to_have_their_keys_in_its_claim(
    server: LightningStoreServer, connect: Connect
) -> None:
    client = connect(server.endpoint, token=token_of("runner"))
    await server.update_resources("latest", {"prompt": RESOURCES["prompt"]})

    claim = await claim_with_keys(client, server, metadata={"pinned_resources": {"critic": "mine", "other": "none"}})

    reference = keys_in(await client.get_resources_by_id("mine"))["proxied"]
    assert read_attempt_key(PROXY_SECRET, claim.proxy_keys[reference]) is not None


async def test_pins_that_are_none_do_not_stop_a_claim(server: LightningStoreServer, connect: Connect) -> None:
    client = connect(server.endpoint, token=token_of("runner"))
    for pins in ("mine", ["mine"], {"critic": 7}, None):
        assert await claim_with_keys(client, server, metadata={"pinned_resources": pins}) is not None


async def test_a_claim_of_the_master_token_has_the_secrets_and_needs_no_keys(
    server: LightningStoreServer, connect: Connect
) -> None:
    claim = await claim_with_keys(connect(server.endpoint, token=MASTER), server)
    assert (reference_in(claim), dict(claim.proxy_keys)) == (PROXY_SECRET, {})


async def test_a_server_before_another_passes_the_keys_on(
    server: LightningStoreServer, serve: Serve, connect: Connect
) -> None:
    before = await serve(connect(server.endpoint, token=token_of("runner")), token=f"{MASTER}-2")
    client = connect(before.endpoint, token=sign_token(f"{MASTER}-2", Scope("runner"), expires_at=None))
    claim = await claim_with_keys(client, server)
    assert read_attempt_key(PROXY_SECRET, claim.proxy_keys[reference_in(claim)]) is not None


async def test_the_answer_to_a_runner_s_claim_holds_no_secret_of_a_proxy(
    server: LightningStoreServer, session: aiohttp.ClientSession
) -> None:
    await server.enqueue_rollout("task")
    headers = {"Authorization": f"Bearer {token_of('runner')}"}

    url = f"{server.endpoint}/v1/agl/queues/rollouts/claim"
    async with session.post(url, json={}, headers=headers) as response:
        text = await response.text()

    assert len(json.loads(text)) == 1
    assert PROXY_SECRET not in text
    assert isinstance(server.store, InMemoryLightningStore)
