"""A web page of somebody else, in a real browser: what it sends to a store on the reader's machine changes nothing."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.dashboard.browser import Page
from tests.dashboard.conftest import Serve

PAGE = """<!doctype html><title>loading</title>
<a href="{store}/dashboard">open</a><img id="image"><script>
const done = () => document.title = "done";
image.onload = image.onerror = () => fetch("{store}/v1/agl/queues/rollouts/enqueue-one", {{
  method: "POST", mode: "no-cors", headers: {{"content-type": "text/plain"}}, body: '{{"input": "forged"}}'
}}).then(done, done);
image.src = "{store}/v1/agl/statistics";
</script>"""


@pytest.fixture
def foreign_page() -> Iterator[Any]:
    """Serves `PAGE`, on a port of its own, to whoever asks; the store's address is set before."""
    shown = {"page": b""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(shown["page"] if self.path == "/" else b"")

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()

    def about(store: str, host: str) -> str:
        shown["page"] = PAGE.format(store=store).encode()
        return f"http://{host}:{http.server_port}/"

    yield about
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["another site", "the same site"])
async def test_a_page_of_somebody_else_claims_and_queues_nothing(
    page: Page, serve: Serve, foreign_page: Any, host: str
) -> None:
    server = await serve()
    await server.enqueue_rollout("task", rollout_id="waiting")

    await page.goto(foreign_page(server.endpoint, host))
    await page.until("document.title === 'done'")

    assert [(rollout.rollout_id, rollout.status) for rollout in await server.query_rollouts()] == [
        ("waiting", "queuing")
    ]


async def test_a_link_on_another_site_opens_the_dashboard(page: Page, serve: Serve, foreign_page: Any) -> None:
    server = await serve()
    await server.enqueue_rollout("task", rollout_id="waiting")
    await page.goto(foreign_page(server.endpoint, "localhost"))
    await page.until("document.title === 'done'")

    await page.click("a")

    await page.until("location.pathname === '/dashboard'")
    await page.until_text("0 of 1", "body")


async def test_the_page_of_routes_works_under_its_policy(page: Page, serve: Serve) -> None:
    server = await serve()
    await page.goto(f"{server.endpoint}/docs")
    await page.until_text("/v1/agl/rollouts", "body")
    assert await page.ask("getComputedStyle(document.querySelector('b.verb')).color") == "rgb(255, 255, 255)"
