"""The server's life: starting, stopping under load, launch modes, health, metrics, and what breaks."""

import asyncio
import contextlib
import logging
import pickle
import resource
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.asgi import protocol
from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
)
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.utils.server_launcher import PythonServerLauncherArgs
from tests.e2e.server_process import ServerProcess

DEQUEUE = "/v1/agl/queues/rollouts/dequeue-one"
TOKEN = "a-secret-nobody-may-read"


async def fetched(url: str, **options: Any) -> requests.Response:
    """A plain request, as a stranger would make it."""
    return await asyncio.to_thread(requests.get, url, timeout=10, **options)


# ---------------------------------------------------------------------- starting and stopping


async def test_busy_port_is_an_error_at_once(serve: Any) -> None:
    first = await serve()
    second = LightningStoreServer(InMemoryLightningStore(), port=first.port)

    for method in (second.start, second.run_forever):
        with pytest.raises(RuntimeError, match="Another process may already be using this port"):
            await asyncio.wait_for(method(), 30)

    await second.stop()
    assert (second.host, second.endpoint) == ("127.0.0.1", first.endpoint)  # this machine only, by default
    assert (await fetched(f"{first.endpoint}/health")).status_code == 200


async def test_requests_are_no_lines_of_a_log_at_info(
    serve: Any, caplog: pytest.LogCaptureFixture, eventually: Any
) -> None:
    server = await serve()

    with caplog.at_level(logging.DEBUG, logger="agentlightning"):
        await fetched(f"{server.endpoint}/health")
        await eventually(lambda: "/health" in caplog.text)  # written once the answer is on its way
    with caplog.at_level(logging.INFO, logger="agentlightning"):
        await fetched(f"{server.endpoint}/ready")
        await server.stop()

    assert "/ready" not in caplog.text


@pytest.mark.parametrize("mode", ["thread", "asyncio"])
async def test_server_is_a_store_in_its_own_process(mode: Any, serve: Any, connect: Any) -> None:
    store = InMemoryLightningStore()
    server = await serve(store, launch_mode=mode)
    client = connect(server.endpoint)

    rollout = await server.enqueue_rollout("a")
    claimed = await client.dequeue_rollout("w")
    await server.update_attempt(rollout.rollout_id, "latest", status="succeeded")

    assert claimed.rollout_id == rollout.rollout_id
    assert [found.status for found in await client.wait_for_rollouts([rollout.rollout_id])] == ["succeeded"]
    assert server.store is store


def test_processes_are_started_by_themselves() -> None:
    options: list[Any] = [{"launch_mode": "mp"}, {"n_workers": 2}]
    for each in options:
        with pytest.raises(ConfigurationError, match="start further servers"):
            LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0, **each)


async def test_serving_for_ever_ends_with_its_task_and_ends_what_waits(connect: Any, eventually: Any) -> None:
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
    serving = asyncio.create_task(server.run_forever())
    await eventually(lambda: server._launcher is not None and server._launcher.is_running())
    client = connect(server.endpoint, transport="http", retry_delays=())
    await server.enqueue_rollout("a", rollout_id="a")
    waiting = asyncio.create_task(client.wait_for_rollouts(["a"], 30))
    await eventually(lambda: server.app.service.waiting_calls == 1)

    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(serving, 30)
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(waiting, 30)

    await server.start()
    assert (await fetched(f"{server.endpoint}/health")).status_code == 200
    await server.stop()


async def test_copy_in_another_process_is_a_client(serve: Any) -> None:
    server = await serve(token=TOKEN)

    copied = pickle.loads(pickle.dumps(server))
    rollout = await copied.enqueue_rollout("a")

    assert (await server.get_rollout_by_id(rollout.rollout_id)).input == "a"
    assert (copied.endpoint, copied.host, copied.port) == (server.endpoint, server.host, server.port)
    assert TOKEN not in repr(copied) + repr(server)
    with pytest.raises(RuntimeError, match="process"):
        await copied.start()
    await copied.close()


# ---------------------------------------------------------------------- stopping under load


class Slow(InMemoryLightningStore):
    """Takes its time over every enqueue, and says how many are under way."""

    under_way = 0

    async def enqueue_rollout(self, *args: Any, **kwargs: Any) -> Any:
        self.under_way += 1
        try:
            await asyncio.sleep(0.3)
            return await super().enqueue_rollout(*args, **kwargs)
        finally:
            self.under_way -= 1


@pytest.mark.parametrize("transport", ["http", "ws"])
async def test_stop_under_load_loses_nothing_and_is_prompt(
    transport: str, serve: Any, connect: Any, eventually: Any
) -> None:
    store = Slow()
    server = await serve(store)
    client = connect(server.endpoint, transport=transport, outage_seconds=20.0, health_retry_delays=(0.05,))
    await client.statistics()
    waiting = [asyncio.create_task(client.dequeue_rollout(f"w{n}", wait=60)) for n in range(50)]
    await eventually(lambda: server.app.service.waiting_calls == 50)
    asking = [asyncio.create_task(client.enqueue_rollout(n)) for n in range(50)]
    await eventually(lambda: store.under_way == 50)

    began = time.monotonic()
    await server.stop()
    took = time.monotonic() - began
    await server.start()
    enqueued = await asyncio.wait_for(asyncio.gather(*asking), 20)
    claimed = await asyncio.wait_for(asyncio.gather(*waiting), 20)

    assert took < 5
    assert sorted(rollout.input for rollout in enqueued) == list(range(50))
    assert sorted(claim.input for claim in claimed) == list(range(50))
    assert len(await store.query_rollouts()) == 50


async def test_call_that_waits_is_told_to_ask_again_when_the_server_stops(
    serve: Any, session: aiohttp.ClientSession, eventually: Any
) -> None:
    server = await serve()
    asking = asyncio.create_task(session.post(f"{server.endpoint}{DEQUEUE}", json={"wait": 60}))
    await eventually(lambda: server.app.service.waiting_calls == 1)

    server.app.service.close()
    answer = await asyncio.wait_for(asking, 30)

    assert (answer.status, (await answer.json())["error_type"]) == (503, "StoreUnavailable")
    async with session.post(f"{server.endpoint}{DEQUEUE}", json={"wait": 60}) as again:  # no new wait begins
        assert again.status == 503
    for call in ("v1/agl/notices?after=0&wait=60", "ready"):
        assert (await fetched(f"{server.endpoint}/{call}")).status_code == 503


# ---------------------------------------------------------------------- health and metrics


class Unavailable(InMemoryLightningStore):
    """Answers nothing but an error."""

    error: Exception

    async def statistics(self) -> Any:
        raise self.error


async def test_broken_or_closed_store_is_alive_but_not_ready(serve: Any) -> None:
    store = Unavailable()
    server, other = await serve(store), await serve(closing := InMemoryLightningStore())
    answers = [(await fetched(f"{other.endpoint}/ready")).status_code]
    await closing.close()
    answers.append((await fetched(f"{other.endpoint}/ready")).status_code)

    for store.error in (StoreUnavailable("no"), OSError("disk"), sqlite3.OperationalError("x")):
        answers += [(await fetched(f"{server.endpoint}/{path}")).status_code for path in ("health", "ready", "metrics")]

    assert answers == [200, 503, *(200, 503, 200) * 3]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs limits of another process, as Linux has them")
def test_a_store_that_cannot_write_is_not_ready_until_it_can(tmp_path: Path) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with ServerProcess(tmp_path / "store.db") as server:
        answers = [requests.get(f"{server.url}/ready")]
        for limit in ((0, resource.RLIM_INFINITY), unlimited):  # how large files may become that it writes
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, limit)
            answers += [requests.get(f"{server.url}/{path}") for path in ("ready", "health", "v1/agl/rollouts/x")]

    assert [answer.status_code for answer in answers] == [200, 503, 200, 200, 200, 200, 200]


async def answers_of(server: LightningStoreServer) -> list[int]:
    """What a readiness check, a read and a write are answered."""
    write = asyncio.to_thread(
        requests.post, f"{server.endpoint}/v1/agl/queues/rollouts/enqueue-one", json={"input": "y" * 50_000}
    )
    ready, read = [await fetched(f"{server.endpoint}/{path}") for path in ("ready", "v1/agl/rollouts/x")]
    return [ready.status_code, read.status_code, (await write).status_code]


async def test_file_that_turned_out_corrupt_takes_no_more_writes(tmp_path: Path, serve: Any) -> None:
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    server = await serve(store)
    await server.enqueue_rollout("x" * 100_000)
    for file in (path, path.with_name("store.db-wal")):
        file.write_bytes(b"Z" * file.stat().st_size)

    answers = await answers_of(server)
    states = store.state, server.state
    with contextlib.suppress(StoreUnavailable):
        await store.close()

    assert answers == [503, 503, 503]
    assert all(state.startswith("failed: ") for state in states)


@pytest.mark.claim(508)
async def test_metrics_can_be_parsed_and_count_what_happened(serve: Any, connect: Any) -> None:
    server = await serve()
    client = connect(server.endpoint)
    await client.enqueue_rollout("a")
    with contextlib.suppress(ValueError):
        await client.start_attempt("nobody")

    text = (await fetched(f"{server.endpoint}/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    assert samples["agl_server_operation_seconds_count", "enqueue_rollout"] == 1
    assert samples["agl_server_failures_total", "NotFound", "start_attempt"] == 1
    assert samples["agl_store_total_rollouts",] == 1
    assert samples["agl_store_up",] == 1


async def test_token_guards_everything(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = await serve(token=TOKEN)

    for path in ("health", "ready", "metrics", "v1/agl/statistics", "openapi.json", "v1/agl/health"):
        url = f"{server.endpoint}/{path}"
        shown = ("Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"bearer {TOKEN}")
        answers = [await fetched(url), *[await fetched(url, headers={"Authorization": each}) for each in shown]]

        assert [answer.status_code for answer in answers] == [401, 401, 401, 401, 200], path
        assert answers[0].headers["WWW-Authenticate"] == "Bearer"
    assert TOKEN not in caplog.text


async def test_an_attempt_learns_of_the_server_only_whether_it_runs(serve: Any) -> None:
    server = await serve(token=TOKEN)
    headers = {"Authorization": f"Bearer {sign_token(TOKEN, Scope('attempt', 'ro-1', 'at-1'), expires_at=None)}"}
    statuses = dict.fromkeys(("health", "v1/agl/health", "ready", "docs"), 200)
    statuses |= dict.fromkeys(("metrics", "v1/prometheus", "openapi.json"), 403)

    found = {path: (await fetched(f"{server.endpoint}/{path}", headers=headers)).status_code for path in statuses}

    assert found == statuses


def test_public_address_without_a_token_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    public = [(host, None) for host in ("0.0.0.0", "::", "10.1.2.3")]
    guarded = [("0.0.0.0", TOKEN), ("127.0.0.1", None), ("localhost", None), ("::1", None), (None, None)]

    for host, token in (*public, *guarded):
        caplog.clear()
        LightningStoreServer(InMemoryLightningStore(), host, 0, token=token)
        warnings = [r for r in caplog.records if r.levelno == logging.WARNING and "token" in r.getMessage()]
        assert bool(warnings) is ((host, token) in public), host


# ---------------------------------------------------------------------- slow clients


@pytest.mark.parametrize("has_asked_before", [False, True], ids=["first request", "second request"])
async def test_half_a_header_does_not_hold_a_connection(
    has_asked_before: bool, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.3)
    server = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    if has_asked_before:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}")

    writer.write(b"GET /health HTTP/1.1\r\nHo")
    rest = await asyncio.wait_for(reader.read(), 30)
    writer.close()

    assert rest == b""


def test_server_arguments_can_be_given_as_one() -> None:
    args = PythonServerLauncherArgs(port=0, host="127.0.0.1", launch_mode="thread", access_host="store.example")
    server = LightningStoreServer(InMemoryLightningStore(), launcher_args=args)
    assert server.endpoint == "http://store.example:0"
    assert isinstance(pickle.loads(pickle.dumps(server))._target, LightningStoreClient)


# ---------------------------------------------------------------------- not observed

SERVED_AND_TRACED = """
import asyncio, warnings
import opentelemetry.trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
opentelemetry.trace.set_tracer_provider(provider)

import requests
import agentlightning as agl

warnings.simplefilter("ignore", DeprecationWarning)

async def serve_both():
    server = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", 0)
    await server.start()
    for transport in ("http", "ws"):
        async with agl.LightningStoreClient(server.endpoint, transport=transport) as client:
            await client.enqueue_rollout("a")
    await server.stop()
    old = agl.AgentLightningServer("127.0.0.1", 0)
    await old.start()
    answer = await asyncio.to_thread(requests.get, old.endpoint + "/task", timeout=30)
    await old.stop()
    return answer.status_code

print(asyncio.run(serve_both()), [span.name for span in spans.get_finished_spans()])
"""


def test_servers_make_no_spans_of_their_own() -> None:
    ended = subprocess.run([sys.executable, "-c", SERVED_AND_TRACED], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "200 []\n", ended.stderr


@pytest.mark.parametrize(
    ("allowed", "credentials"), [(["http://a.example"], "true"), ("*", None)], ids=["named", "every"]
)
async def test_web_pages_get_the_headers_that_were_configured(
    serve: Any, allowed: Any, credentials: str | None
) -> None:
    server = await serve(cors_allow_origins=allowed)
    page = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}

    async with aiohttp.ClientSession(headers=page) as session:
        for method in ("GET", "OPTIONS"):
            async with session.request(method, f"{server.endpoint}/v1/agl/rollouts") as answer:
                assert answer.status == 200
                assert answer.headers["Access-Control-Allow-Origin"] == ("*" if allowed == "*" else allowed[0])
                assert answer.headers.get("Access-Control-Allow-Credentials") == credentials
