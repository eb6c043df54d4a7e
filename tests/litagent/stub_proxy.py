"""A stub model behind the paths of the LLM proxy: it serves attempts, and knows whose call each was."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from agentlightning.utils.loop_thread import LoopThread
from tests.stub_model.dialect import openai_error
from tests.stub_model.script import Request, Script
from tests.stub_model.server import DIALECTS, StubModel

_ATTEMPT = "/rollout/{rollout}/attempt/{attempt}"


class StubProxy(StubModel):
    """Serves nothing outside the paths of attempts."""

    async def start(self) -> None:
        app = web.Application()
        for prefix in (_ATTEMPT, f"{_ATTEMPT}/v1"):
            for dialect in DIALECTS:
                app.router.add_post(prefix + dialect.path, self._generating(dialect))
            app.router.add_post(f"{prefix}/embeddings", self._guarded(openai_error, self._embed))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"


def attempt_of(request: Request) -> tuple[str, str]:
    """The rollout and the attempt that a request came for."""
    match = re.match("/rollout/([^/]+)/attempt/([^/]+)/", request.path)
    assert match is not None, request.path
    return match[1], match[2]


@contextmanager
def running_proxy(script: Script | None = None, **options: Any) -> Iterator[StubProxy]:
    """Served for the length of the block; options are those of `StubModel`."""
    proxy = StubProxy(script, **options)
    thread = LoopThread("stub-proxy")
    thread.run(proxy.start())
    try:
        yield proxy
    finally:
        thread.run(proxy.stop())
        thread.stop()
