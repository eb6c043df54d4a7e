"""The life of a proxy: start, stop, restart, new models, new stores, other processes."""

import asyncio
import gc
import logging
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from agentlightning.llm_proxy import LLMProxy, get_active_llm_proxy, set_active_llm_proxy
from agentlightning.llm_proxy.proxy import _active
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.types import LLM, ProxyLLM
from tests.llm_proxy.accounts import MODEL, ask, calls, endpoint, entry, serving
from tests.stub_model.raw import until
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running

THREAD = "agl-llm-proxy"
A_FEW = 5
"""Connections that may be open at one moment and not at another; a leak would be thirty."""


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)])


def unused_model(name: str = MODEL) -> dict[str, object]:
    return {"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_base": "http://127.0.0.1:9/v1"}}


# ---------------------------------------------------------------------- start and stop


async def test_start_and_stop_work_without_await_in_a_running_loop(model: StubModel) -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("task")
    proxy = LLMProxy(store=store, model_list=[entry(model)])

    proxy.start()
    answer = await asyncio.to_thread(ask, endpoint(proxy, rollout))
    proxy.stop()

    assert (answer.status_code, proxy.is_running()) == (200, False)
    proxy.start()  # waits for what the stop has left to do
    await proxy.stop()
    assert len(await calls(store, rollout)) == 1


async def test_start_stop_and_restart_can_be_awaited(model: StubModel) -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("task")
    proxy = LLMProxy(store=store, model_list=[entry(model)])

    await proxy.start()
    first = await asyncio.to_thread(ask, endpoint(proxy, rollout))
    port = proxy.port
    await proxy.restart()
    second = await asyncio.to_thread(ask, endpoint(proxy, rollout))
    await proxy.stop()

    assert (first.status_code, second.status_code, proxy.port) == (200, 200, port)
    assert len(await calls(store, rollout)) == 2


def test_start_of_a_running_proxy_restarts_it_and_another_port_is_taken_with_the_next_start(model: StubModel) -> None:
    with serving(model) as proxy:
        first = proxy.port
        proxy.start()
        assert proxy.port == first
        proxy.update_port(0)
        proxy.restart()
        second = proxy.port
        proxy.restart(_port=first)

        assert first != second
        assert proxy.port == first
        assert ask(proxy.endpoint).status_code == 200


def test_start_that_cannot_be_is_an_error_and_leaves_nothing() -> None:
    proxy = LLMProxy(0, [])

    with pytest.raises(ValueError, match="has no store"):
        proxy.start()

    assert not proxy.is_running()


def test_stop_of_a_proxy_that_does_not_run_warns(caplog: pytest.LogCaptureFixture) -> None:
    LLMProxy(0).stop()

    assert "not running" in caplog.text


def test_port_in_use_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        proxy = LLMProxy(taken.getsockname()[1], [], store)
        before = set(threading.enumerate())

        with pytest.raises(RuntimeError, match="Another process may already be using this port"):
            proxy.start()

        assert not proxy.is_running()
        assert {thread for thread in threading.enumerate() if thread.name.startswith(THREAD)} <= before
    proxy.start()
    proxy.stop()
    asyncio.run(store.close())


def test_thirty_restarts_leak_nothing_and_log_no_errors(model: StubModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    process = psutil.Process()
    with serving(model) as proxy:
        assert ask(proxy.endpoint).status_code == 200
        threads, files = threading.active_count(), process.num_fds()

        for _ in range(30):
            proxy.restart()
        answer = ask(proxy.endpoint)

        gc.collect()
        assert answer.status_code == 200
        until(lambda: threading.active_count() <= threads and process.num_fds() < files + A_FEW)
    assert [told.message for told in caplog.records if told.levelno > logging.WARNING] == []


def test_two_proxies_in_one_process(model: StubModel) -> None:
    with running(Script(lambda _: "other"), models=("other",)) as other, serving(model) as first:
        with serving(other, model_list=[entry(other, "other")]) as second:
            answers = [ask(first.endpoint), ask(second.endpoint, model="other"), ask(second.endpoint)]

            assert [answer.status_code for answer in answers] == [200, 200, 404]
            assert get_active_llm_proxy() is second
        assert ask(first.endpoint).status_code == 200


def test_losses_are_in_status_flush_and_log(model: StubModel, caplog: pytest.LogCaptureFixture) -> None:
    with serving(model) as proxy:
        url = proxy.as_resource("ro-unknown", "at-unknown").endpoint
        assert [ask(url).status_code for _ in range(3)] == [200] * 3

        reports = [requests.post(f"{url}/agl/flush", timeout=10).json() for _ in range(2)]

        assert reports[0] == reports[1]
        assert reports[0]["is_complete"] is False
        assert (reports[0]["stored"], reports[0]["waiting"], list(reports[0]["lost"].values())) == (0, 0, [3])
    assert proxy.status()["calls"]["lost"] == {"NotFound": 3}  # the last state, after it has stopped
    assert LLMProxy(store=InMemoryLightningStore()).status() == {}
    assert caplog.text.count("is not recorded (NotFound: Rollout ro-unknown not found") == 1


# ---------------------------------------------------------------------- models, ports and stores


def test_model_list_that_cannot_be_read_changes_nothing(model: StubModel) -> None:
    proxy = LLMProxy(0, [], InMemoryLightningStore())
    proxy.update_model_list([entry(model)])  # used when it starts
    proxy.start()
    with pytest.raises(ValueError, match="Entry 0"):
        proxy.update_model_list([{"model_name": "x"}])  # type: ignore[typeddict-item] # that is the point

    assert ask(proxy.endpoint).status_code == 200
    proxy.stop()


@pytest.mark.parametrize("in_loop", [True, False], ids=["in a loop", "outside"])
def test_another_store_gets_the_later_calls(model: StubModel, in_loop: bool) -> None:
    stores = [InMemoryLightningStore(), InMemoryLightningStore()]
    rollouts = [asyncio.run(store.start_rollout("task")) for store in stores]

    async def exchange_stores(proxy: LLMProxy) -> None:
        proxy.set_store(stores[1])

    with serving(model, stores[0]) as proxy:
        ask(endpoint(proxy, rollouts[0]))
        if in_loop:
            asyncio.run(exchange_stores(proxy))
        else:
            proxy.set_store(stores[1])
        ask(endpoint(proxy, rollouts[1]))
    assert proxy.get_store() is stores[1]
    for store, rollout in zip(stores, rollouts, strict=True):
        assert len(asyncio.run(calls(store, rollout))) == 1


# ---------------------------------------------------------------------- other processes


def test_pickled_proxy_is_the_same_and_does_not_run(model: StubModel, tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    with serving(model, store, api_key="a-key-of-ours") as proxy:
        copy: LLMProxy = pickle.loads(pickle.dumps(proxy))

        assert not copy.is_running()
        assert (copy.port, copy.model_list, copy.as_resource()) == (proxy.port, proxy.model_list, proxy.as_resource())
        assert copy.attempt_key("r", "a") == proxy.attempt_key("r", "a")
        copy.update_port(0)
        copy.start()
        assert ask(copy.endpoint, headers={"authorization": "Bearer a-key-of-ours"}).status_code == 200
        copy.stop()
    asyncio.run(store.close())


def _own_proxy_in_child(proxy: LLMProxy) -> bytes:
    """Whether it runs there, and what it answers when it is started there."""
    try:
        was_running = proxy.is_running()
        proxy.update_port(0)
        proxy.start()
        return f"{was_running} {ask(proxy.endpoint).status_code}".encode()
    except BaseException as error:
        return repr(error).encode()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_does_not_run_it_and_does_not_hold_its_port(model: StubModel, tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    told, tell = os.pipe()
    leave, let_go = os.pipe()
    with serving(model, store) as proxy:
        rollout = asyncio.run(store.start_rollout("task"))
        ask(endpoint(proxy, rollout))
        child = os.fork()
        if child == 0:
            os.write(tell, _own_proxy_in_child(proxy))
            os.read(leave, 1)
            os._exit(0)
        try:
            assert os.read(told, 100) == b"False 200"

            proxy.restart()  # would find its port taken by the child

            assert ask(endpoint(proxy, rollout)).status_code == 200
        finally:
            os.write(let_go, b"x")
            os.waitpid(child, 0)
            for file in (told, tell, leave, let_go):
                os.close(file)
    assert len(asyncio.run(calls(store, rollout))) == 2
    asyncio.run(store.close())


# ---------------------------------------------------------------------- resources


def test_resource_for_all_attempts_or_one() -> None:
    proxy = LLMProxy(12345, [unused_model(), unused_model()])  # type: ignore[list-item] # written as a plain dict

    resource = proxy.as_resource(sampling_parameters={"temperature": 0.5})
    of_attempt = proxy.as_resource("ro-1", "at-1", "chosen")

    assert isinstance(resource, ProxyLLM)
    assert resource.get_base_url(None, None) == "http://127.0.0.1:12345"
    assert (resource.model, resource.sampling_parameters, resource.api_key) == (MODEL, {"temperature": 0.5}, None)
    assert type(of_attempt) is LLM
    assert (of_attempt.endpoint, of_attempt.model) == ("http://127.0.0.1:12345/rollout/ro-1/attempt/at-1", "chosen")
    for ids in (("ro-1", None), (None, "at-1")):
        with pytest.raises(ValueError, match="both rollout_id and attempt_id"):
            proxy.as_resource(*ids)


@pytest.mark.parametrize("names", [(), ("a", "b")], ids=["none", "two"])
def test_resource_needs_a_model_name_where_there_is_not_one(names: tuple[str, ...]) -> None:
    proxy = LLMProxy(12345, [unused_model(name) for name in names])  # type: ignore[misc] # written as a plain dict

    with pytest.raises(ValueError, match="say which with model="):
        proxy.as_resource()

    assert proxy.as_resource(model="b").model == "b"


def test_resource_of_a_proxy_without_a_port_is_an_error() -> None:
    with pytest.raises(ValueError, match="start it first"):
        LLMProxy(model_list=[unused_model()]).as_resource()  # type: ignore[list-item] # written as a plain dict


@pytest.mark.parametrize(
    ("host", "access_host", "told"),
    [
        (None, None, "127.0.0.1"),
        ("0.0.0.0", None, "127.0.0.1"),
        ("0.0.0.0", "proxy.example", "proxy.example"),
        ("::", None, "127.0.0.1"),
        ("::1", None, "[::1]"),
        ("localhost", None, "localhost"),
    ],
)
def test_address_that_agents_are_told(host: str | None, access_host: str | None, told: str) -> None:
    proxy = LLMProxy(12345, host=host, access_host=access_host, api_key="k")

    assert proxy.endpoint == f"http://{told}:12345"


def test_open_proxy_for_other_machines_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    LLMProxy(12345, host="0.0.0.0")

    assert "give it an api_key" in caplog.text


# ---------------------------------------------------------------------- the proxy of the process


def test_active_proxy(model: StubModel) -> None:
    _active.cache_clear()
    with pytest.raises(ValueError, match="No LLM proxy"):
        get_active_llm_proxy()

    with serving(model) as proxy:
        assert get_active_llm_proxy() is proxy

    other = LLMProxy(12345)
    set_active_llm_proxy(other)
    assert get_active_llm_proxy() is other
    _active.cache_clear()


# ---------------------------------------------------------------------- earlier releases


def test_arguments_of_the_first_release_are_taken_by_position(model: StubModel) -> None:
    store = InMemoryLightningStore()
    proxy = LLMProxy(12345, [entry(model)], store, "127.0.0.1", {"litellm_settings": {"drop_params": True}}, 2)

    assert (proxy.port, proxy.store, proxy.host) == (12345, store, "127.0.0.1")
    assert proxy.litellm_config["litellm_settings"] == {"num_retries": 2, "drop_params": True}


def test_names_of_the_second_release_are_known() -> None:
    LLMProxy(launch_mode="mp", middlewares=["stream_conversion"], callbacks=["return_token_ids", "opentelemetry"])

    with pytest.raises(ValueError, match="no middleware 'x'"):
        LLMProxy(middlewares=["x"])
    with pytest.raises(ValueError, match="no callback 'x'"):
        LLMProxy(callbacks=["x"])
