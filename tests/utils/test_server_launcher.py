"""The launcher serves any ASGI application, in every mode, and says what kept it from doing so."""

import asyncio
import gc
import os
import socket
import threading
import urllib.request
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs, is_loopback


async def tell_process(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with its process id."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(os.getpid()).encode()})


def launcher(app: Any = tell_process, **arguments: Any) -> PythonServerLauncher:
    arguments = {"uvicorn_options": {"lifespan": "off"}, **arguments}
    return PythonServerLauncher(app, PythonServerLauncherArgs(**arguments))


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("mode", ["asyncio", "thread"])
async def test_application_is_served_in_this_process(mode: Any) -> None:
    served = launcher(launch_mode=mode, healthcheck_url="/")
    await served.start()

    assert served.is_running()
    assert await asyncio.to_thread(fetch, served.access_endpoint) == str(os.getpid())

    await served.stop()
    assert not served.is_running()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(fetch, served.access_endpoint)


async def test_busy_port_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        served = launcher(port=taken.getsockname()[1])
        with pytest.raises(RuntimeError, match="Another process may already be using this port"):
            await served.start()


async def test_server_can_be_started_again_on_its_port() -> None:
    served = launcher(launch_mode="thread")
    await served.start()
    first = served.endpoint

    await served.reload()

    assert served.endpoint == first
    assert await asyncio.to_thread(fetch, first) == str(os.getpid())
    await served.stop()


async def test_unhealthy_server_is_stopped() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    served = launcher(refuse, launch_mode="thread", healthcheck_url="/health", startup_timeout=0.3)

    with pytest.raises(RuntimeError, match="does not answer"):
        await served.start()
    assert not served.is_running()


@pytest.mark.parametrize("mode", ["asyncio", "thread"])
async def test_connection_whose_answer_takes_too_long_is_closed_with_the_server(mode: Any) -> None:
    is_called = threading.Event()

    async def hang(scope: Any, receive: Any, send: Any) -> None:
        is_called.set()
        await asyncio.sleep(3600)

    served = launcher(hang, launch_mode=mode, thread_join_timeout=3)
    await served.start()
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        await asyncio.to_thread(is_called.wait, 10)

        await served.stop()

        with suppress(ConnectionResetError):
            assert client.recv(1) == b""


async def test_no_connection_is_left_open_that_comes_while_the_server_stops(recwarn: pytest.WarningsRecorder) -> None:
    is_over, clients = threading.Event(), list[socket.socket]()

    def connect(port: int) -> None:
        while not is_over.is_set():
            with suppress(OSError):
                clients.append(socket.create_connection(("127.0.0.1", port), timeout=1.0))

    for _ in range(5):
        served = launcher(launch_mode="thread")
        await served.start()
        is_over.clear()
        thread = threading.Thread(target=connect, args=(served.port,))
        thread.start()
        await asyncio.sleep(0.01)
        await served.stop()
        is_over.set()
        await asyncio.to_thread(thread.join)

    for client in clients:
        client.close()
    gc.collect()
    assert len(clients) > 5
    assert [str(warning.message) for warning in recwarn if warning.category is ResourceWarning] == []


async def test_context_is_entered_in_the_loop_that_serves() -> None:
    seen: list[asyncio.AbstractEventLoop | str] = []

    @asynccontextmanager
    async def context() -> Any:
        seen.append(asyncio.get_running_loop())
        yield
        seen.append("left")

    served = PythonServerLauncher(
        tell_process, PythonServerLauncherArgs(uvicorn_options={"lifespan": "off"}), context()
    )
    await served.start()
    await served.stop()

    assert seen == [asyncio.get_running_loop(), "left"]


async def test_serving_for_ever_ends_with_its_task() -> None:
    served = launcher()
    serving = asyncio.create_task(served.run_forever())
    while not served.is_running():
        await asyncio.sleep(0.001)

    serving.cancel()

    with pytest.raises(asyncio.CancelledError):
        await serving
    assert not served.is_running()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_loopback_addresses_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_server_bound_everywhere_is_reached_on_this_machine() -> None:
    assert launcher(host="0.0.0.0", port=5).access_endpoint == "http://127.0.0.1:5"
    assert launcher(host="::1", port=5).endpoint == "http://[::1]:5"
    assert launcher(host="0.0.0.0", access_host="store.local", port=5, healthcheck_url="/h").health_url == (
        "http://store.local:5/h"
    )
