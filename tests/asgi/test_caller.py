"""The caller check of all four servers: what web pages of others send is refused, what programs send is served."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from agentlightning.legacy.server import AgentLightningServer
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.utils.loop_thread import LoopThread

PATIENCE_SECONDS = 60.0
HELLO = {"messages": [{"role": "user", "content": "37+58?"}]}


@dataclass(frozen=True)
class Target:
    """A running server without a key, and two requests that it serves to programs."""

    url: str
    reading: str
    changing: str
    body: Any
    message_of: Callable[[Any], str]
    """Reads the message out of an error of this server."""
    served: int = 200
    """Status of the changing request when it is served."""

    def send(self, method: str, headers: dict[str, str]) -> httpx.Response:
        known = {name: value.format(host=self.url.removeprefix("http://")) for name, value in headers.items()}
        if method == "GET":
            return httpx.get(self.url + self.reading, headers=known, timeout=PATIENCE_SECONDS)
        return httpx.post(self.url + self.changing, json=self.body, headers=known, timeout=PATIENCE_SECONDS)


@contextmanager
def served_store() -> Iterator[Target]:
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
    asyncio.run(server.start())
    try:
        yield Target(
            server.endpoint,
            "/v1/agl/statistics",
            "/v1/agl/rollouts/search",
            {"limit": 1},
            lambda body: body["detail"],
        )
    finally:
        asyncio.run(server.stop())


@contextmanager
def served_proxy() -> Iterator[Target]:
    proxy = LLMProxy(port=0, model_list=[], store=InMemoryLightningStore())
    proxy.start()
    try:
        asked = {"model": "none", **HELLO}
        yield Target(
            proxy.endpoint, "/agl/status", "/v1/chat/completions", asked, lambda body: body["error"]["message"], 404
        )
    finally:
        proxy.stop()


@contextmanager
def served_engine() -> Iterator[Target]:
    pytest.importorskip("torch", reason="the engine needs torch")
    from tests.engine.scripted import ScriptedModel, saying, serving

    with serving(ScriptedModel(saying("95"))) as served:
        yield Target(served.url, "/agl/status", "/v1/chat/completions", HELLO, lambda body: body["error"]["message"])


@contextmanager
def served_legacy() -> Iterator[Target]:
    with pytest.warns(DeprecationWarning, match="AgentLightningServer"):
        server = AgentLightningServer(port=0)
    thread = LoopThread("legacy-server")
    thread.run(server.start())
    try:
        yield Target(server.endpoint, "/task", "/task", {"sample": 1}, lambda body: body["detail"])
    finally:
        thread.run(server.stop())
        thread.stop()


_SERVERS = {"store": served_store, "proxy": served_proxy, "engine": served_engine, "legacy": served_legacy}


@pytest.fixture(scope="module", params=_SERVERS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with ExitStack() as life:
        yield life.enter_context(_SERVERS[request.param]())


_FROM_PAGES_OF_OTHERS = {
    "a form": {"Origin": "http://evil.example", "Content-Type": "text/plain"},
    "a script": {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "a sandboxed frame": {"Origin": "null"},
    "another port of this machine": {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},
    "a name that leads here": {"Host": "evil.example"},
    "the page of a name that leads here": {"Host": "evil.example", "Origin": "http://evil.example"},
    "an image on another site": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "an image on this site": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    "an image at 0.0.0.0": {"Host": "0.0.0.0:8000", "User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"},
    "a link on another site": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
}
_FROM_PROGRAMS_AND_OWN_PAGES = {
    "a program": {},
    "fetch of Node.js": {"Sec-Fetch-Mode": "cors"},
    "a page of the server itself": {"Origin": "http://{host}", "Sec-Fetch-Site": "same-origin"},
    "a typed address": {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
    "a program at 0.0.0.0": {"Host": "0.0.0.0:8000"},
    "a container on this machine": {"Host": "host.docker.internal:8000"},
}


def test_web_pages_of_others_are_refused_with_the_reason(target: Target) -> None:
    for method in ("GET", "POST"):
        for who, headers in _FROM_PAGES_OF_OTHERS.items():
            response = target.send(method, headers)
            assert response.status_code == 403, (who, response.text)
            assert "this server" in target.message_of(response.json()).lower()
        assert_not_guessed(response)


def test_programs_and_own_pages_are_served(target: Target) -> None:
    for method in ("GET", "POST"):
        for who, headers in _FROM_PROGRAMS_AND_OWN_PAGES.items():
            response = target.send(method, headers)
            assert response.status_code == (200 if method == "GET" else target.served), (who, response.text)
        assert_not_guessed(response)


def assert_not_guessed(response: httpx.Response) -> None:
    """No browser takes the answer for a script or a page."""
    assert response.headers.get_list("x-content-type-options") == ["nosniff"]
    assert response.headers["content-type"] == "application/json"


def test_the_body_of_a_refused_request_is_not_awaited(target: Target) -> None:
    host, _, port = target.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        head = f"POST {target.changing} HTTP/1.1\r\nHost: {host}\r\nOrigin: null\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode())

        assert connection.recv(4096).startswith(b"HTTP/1.1 403 ")


def test_links_from_elsewhere_open_the_pages_of_the_store_and_embed_none() -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    with served_store() as store:
        pages = [httpx.get(store.url + path, headers=link) for path in ("/", "/docs", "/dashboard", "/dashboard/")]
        others = [httpx.get(store.url + path) for path in ("/health", "/openapi.json", "/nowhere")]
        embedded = [
            httpx.get(f"{store.url}/dashboard", headers={**link, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": place})
            for mode, place in (("navigate", "iframe"), ("no-cors", "script"))
        ]

    assert [response.status_code for response in pages] == [307, 200, 200, 307]
    assert [response.status_code for response in embedded] == [403, 403]
    for response in (*pages, *others):
        assert response.headers.get_list("x-content-type-options") == ["nosniff"], response.url
        assert "unsafe" not in response.headers.get("content-security-policy", ""), response.url


def test_an_allowed_origin_is_served_from_another_site() -> None:
    allowed_origins = ["http://good.example", ""]
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0, cors_allow_origins=allowed_origins)
    asyncio.run(server.start())
    try:
        allowed = {"Origin": "http://good.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
        served = httpx.get(f"{server.endpoint}/v1/agl/rollouts", headers=allowed)
        without_origin = httpx.get(f"{server.endpoint}/v1/agl/statistics", headers={"Sec-Fetch-Site": "cross-site"})
    finally:
        asyncio.run(server.stop())

    assert (served.status_code, without_origin.status_code) == (200, 403)
    assert "--cors-origin" in without_origin.json()["detail"]
