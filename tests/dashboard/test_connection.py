"""The dashboard and its server: how it is handed out, tokens, and what happens when the server goes away."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from agentlightning import dashboard
from agentlightning.dashboard import address_with_token, asset_at
from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.store.http.tokens import Scope, sign_token
from tests.dashboard.browser import LOOK_SECONDS, PATIENCE_SECONDS, Page
from tests.dashboard.conftest import Serve, finished

SECRET = "a-master-token-of-some-length"
LONGEST_LINE = 120
SOON_SECONDS = 10.0
"""Less than the time after which a page is refreshed anyway."""
HIDDEN_MS = 2000
"""Longer than a page that is seen takes to show a change."""


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def test_page_comes_with_a_strict_policy(serve: Serve, session: aiohttp.ClientSession) -> None:
    server = await serve()

    async with session.get(f"{server.endpoint}/dashboard") as response:
        headers, text = response.headers, await response.text()

    assert response.status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-cache"
    assert "://" not in text


async def test_what_is_known_is_not_sent_again(serve: Serve, session: aiohttp.ClientSession) -> None:
    server = await serve()
    address = f"{server.endpoint}/dashboard/main.js"
    async with session.get(address) as response:
        tag, media_type = response.headers["ETag"], response.content_type

    async with session.get(address, headers={"If-None-Match": tag}) as again:
        assert (again.status, await again.read(), media_type) == (304, b"", "text/javascript")


async def test_nothing_else_is_handed_out(serve: Serve, session: aiohttp.ClientSession) -> None:
    server = await serve()
    for name in ("nothing.js", "__init__.py", "..%2F__init__.py", "%2e%2e/errors.py"):
        async with session.get(f"{server.endpoint}/dashboard/{name}") as response:
            assert response.status == 404


async def test_token_is_wanted_for_everything_but_the_page(serve: Serve, session: aiohttp.ClientSession) -> None:
    server = await serve(token=SECRET)
    statuses = {}

    for verb, path in (("GET", "/dashboard"), ("GET", "/v1/agl/rollouts"), ("POST", "/dashboard"), ("GET", "/metrics")):
        async with session.request(verb, server.endpoint + path) as response:
            statuses[verb, path] = response.status

    assert list(statuses.values()) == [200, 401, 401, 401]
    for path in ("/", "/dashboard/"):
        async with session.get(server.endpoint + path) as response:
            assert (response.status, str(response.url)) == (200, f"{server.endpoint}/dashboard")


def test_assets_load_nothing_from_elsewhere_and_can_be_read() -> None:
    names = [file.name for file in Path(dashboard.__file__).parent.iterdir() if file.suffix in (".html", ".css", ".js")]
    assert len(names) > 2

    for name in names:
        asset = asset_at(name)
        assert asset is not None
        for word in (b"innerHTML", b"outerHTML", b"insertAdjacentHTML", b"document.write", b"eval(", b"https://"):
            assert word not in asset.body, (name, word)
        assert max(map(len, asset.body.decode().splitlines())) <= LONGEST_LINE, name


async def test_token_is_asked_for_until_one_may_read_and_kept(page: Page, serve: Serve) -> None:
    server = await serve(token=SECRET)
    rollout = await finished(server, "behind a token")
    attempt = Scope("attempt", rollout.rollout_id, rollout.attempt.attempt_id)
    narrow, token = [sign_token(SECRET, scope, expires_at=None) for scope in (attempt, Scope("runner"))]
    await page.goto(f"{server.endpoint}/dashboard#/rollouts")
    await page.until("!document.querySelector('#ask').hidden")
    assert "behind a token" not in await page.ask("document.body.innerText")

    refusals = {"wrong": "neither this server's master token", narrow: "use a runner's token"}
    for refused, reason in refusals.items():
        await page.fill("#token", refused)
        await page.press("Enter")
        await page.until_text(reason, "#refused")
    await page.fill("#token", token)
    await page.press("Enter")

    await page.until_text("behind a token")
    assert await page.ask("document.querySelector('#ask').hidden")
    await page.send("Page.reload")
    await page.until_text("behind a token")
    assert await page.ask("sessionStorage.getItem('agl-token')") == token


async def test_wrong_token_in_the_address_is_told_and_another_address_can_be_given(page: Page, serve: Serve) -> None:
    server = await serve(token=SECRET)
    await finished(server, "behind a token")
    await page.goto(f"{server.endpoint}/dashboard#token=wrong")
    await page.until_text("neither this server's master token", "#refused")
    assert await page.ask("location.hash") == ""

    await page.fill("#token", address_with_token(f"{server.endpoint}/dashboard", SECRET))
    await page.press("Enter")

    await page.until("document.querySelector('[data-count=succeeded]')?.innerText === '1'")
    assert await page.ask("document.querySelector('#ask').hidden")


async def test_address_with_a_token_works_in_a_tab_that_waits_for_one(page: Page, serve: Serve) -> None:
    secret = 'a/secret+with"#%&letters'
    server = await serve(token=secret)
    await finished(server, "behind a token")
    await page.goto(f"{server.endpoint}/dashboard")
    await page.until("!document.querySelector('#ask').hidden")
    await page.ask("window.isSamePage = true")

    await page.goto(address_with_token(f"{server.endpoint}/dashboard", secret))

    await page.until("document.querySelector('[data-count=succeeded]')?.innerText === '1'")
    assert await page.ask("document.querySelector('#ask').hidden && window.isSamePage")
    assert await page.ask("location.href") == f"{server.endpoint}/dashboard"
    await page.send("Page.reload")
    await page.until("document.querySelector('[data-count=succeeded]')?.innerText === '1'")


async def test_hidden_page_asks_for_nothing_and_is_refreshed_when_it_is_seen(page: Page, serve: Serve) -> None:
    server = await serve()
    await finished(server, "before")
    await page.goto(f"{server.endpoint}/dashboard")
    await page.until_text("Mean reward, last 1")
    await until(lambda: server.app.service.waiting_calls == 1)
    await page.ask("window.fetched = 0, window.ask = fetch, window.fetch = (...given) => (fetched++, ask(...given))")

    await page.hide()
    await until(lambda: server.app.service.waiting_calls == 0)
    await finished(server, "meanwhile")
    await page.ask(f"new Promise(resolve => setTimeout(resolve, {HIDDEN_MS}))")

    assert await page.ask("fetched") == 0
    assert await page.ask("document.querySelector('[data-count=succeeded]').innerText") == "1"
    await page.show()
    await page.until("document.querySelector('[data-count=succeeded]').innerText === '2'")
    assert await page.ask("fetched") > 0


async def test_page_that_is_opened_behind_others_waits_until_it_is_seen(page: Page, serve: Serve) -> None:
    server = await serve()
    await finished(server, "a task")
    await page.hide()
    await page.goto(f"{server.endpoint}/dashboard#/rollouts")
    await page.until("document.querySelector('h1')?.textContent === 'Rollouts'")
    assert (
        await page.ask("performance.getEntriesByType('resource').filter(one => one.name.includes('/v1/')).length") == 0
    )

    await page.show()

    await page.until_text("a task")


async def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(LOOK_SECONDS)


async def test_rollout_that_begins_past_the_queue_appears_at_once(page: Page, serve: Serve) -> None:
    server = await serve()
    await finished(server, "the first")
    await page.goto(f"{server.endpoint}/dashboard#/rollouts")
    await page.until_text("the first", "tbody")
    await until(lambda: server.app.service.waiting_calls == 1)

    await finished(server, "the second")

    await asyncio.wait_for(page.until_text("the second", "tbody"), SOON_SECONDS)


async def test_page_waits_for_changes_no_longer_than_until_its_next_refresh(page: Page, serve: Serve) -> None:
    server = await serve()
    run, other = [await server.start_run(name) for name in ("shown", "other")]
    await page.goto(f"{server.endpoint}/dashboard#/runs/{run.run_id}")
    await until(lambda: server.app.service.waiting_calls == 1)
    await page.ask("window.waits = [], window.ask = fetch, window.clock = performance.now.bind(performance)")
    await page.ask("performance.now = () => clock() + 10000")  # of the 15 seconds after which it is refreshed
    await page.ask("window.fetch = (url, ...more) => (waits.push(url.searchParams.get('wait')), ask(url, ...more))")

    await server.add_metrics(other.run_id, 1, {"loss": 1.0})

    await page.until("waits.length > 0")
    assert 0 < float(await page.ask("waits[0]")) <= 5


async def test_page_says_that_the_server_is_gone_and_recovers(page: Page, serve: Serve) -> None:
    store = InMemoryLightningStore()
    server = await serve(store)
    await finished(server, "before")
    await page.goto(f"{server.endpoint}/dashboard#/rollouts")
    await page.until_text("before")
    assert await page.ask("document.querySelector('#gone').hidden")

    await server.stop()
    await page.until_text("The server does not answer.", "#gone")
    assert "before" in await page.ask("document.querySelector('main').innerText")
    await finished(store, "meanwhile")
    await asyncio.wait_for(started_again(server), 10.0)

    await page.until_text("meanwhile")
    await page.until("document.querySelector('#gone').hidden")


async def test_page_shows_another_store_that_is_served_at_once_in_place_of_its_own(page: Page, serve: Serve) -> None:
    server, other = await serve(), InMemoryLightningStore()
    rollout = await finished(other, "of the other store")
    for _ in range(20):  # so that its log of changes is the longer one, and no rollout begins at its end
        await other.update_rollout(rollout.rollout_id, metadata={})
    await page.goto(f"{server.endpoint}/dashboard#/rollouts")
    await until(lambda: server.app.service.waiting_calls == 1)
    await finished(server, "of the first store")
    await page.until_text("of the first store", "tbody")

    await server.stop()
    await asyncio.wait_for(started_again(server := LightningStoreServer(other, "127.0.0.1", server.port)), 10.0)

    try:
        await asyncio.wait_for(page.until_text("of the other store", "tbody"), SOON_SECONDS)
        assert "of the first store" not in await page.ask("document.querySelector('tbody').innerText")
    finally:
        await server.stop()


async def started_again(server: LightningStoreServer) -> None:
    """The same server on the same port, which somebody else may have for a moment."""
    while True:
        try:
            return await server.start()
        except RuntimeError:
            await asyncio.sleep(0.05)
