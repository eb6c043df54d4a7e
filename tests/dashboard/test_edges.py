"""The dashboard in a real browser: what is rare, and must not break it."""

import asyncio

from agentlightning.store import InMemoryLightningStore, LightningStore
from tests.dashboard.browser import LOOK_SECONDS, Page
from tests.dashboard.conftest import Serve, finished, reward_span, span_of


async def test_reward_behind_thousands_of_spans_is_shown(page: Page, serve: Serve) -> None:
    server = await serve()
    rollout = await server.start_rollout("a long one")
    steps = [span_of(rollout, f"step {number}", {}, sequence_id=number) for number in range(1, 1101)]
    await server.add_many_spans([*steps, reward_span(rollout, 0.625).model_copy(update={"sequence_id": 1101})])
    await server.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")

    await page.goto(f"{server.endpoint}/dashboard#/rollouts/{rollout.rollout_id}")

    await page.until("document.querySelector('#reward')?.innerText === '0.625'")
    assert await page.ask("document.querySelectorAll('.span').length") == 1000
    await page.click(".spans > button")
    await page.until("document.querySelectorAll('.span').length === 1101")


async def test_curve_of_values_that_differ_by_rounding_is_drawn(page: Page, serve: Serve) -> None:
    server = await serve()
    run = await server.start_run("flat")
    for step, value in enumerate((0.3, 0.1 + 0.2, 0.3)):
        await server.add_metrics(run.run_id, step, {"loss": value})

    await page.goto(f"{server.endpoint}/dashboard#/runs/{run.run_id}")

    await page.until("document.querySelectorAll('polyline').length === 1")
    assert "NaN" not in await page.ask("document.querySelector('polyline').getAttribute('points')")


async def test_address_that_leads_nowhere_is_told(page: Page, serve: Serve) -> None:
    server = await serve()

    for view, what in {"constructor": "view", "main": "view", "rollouts/%": "rollout"}.items():
        await page.goto(f"{server.endpoint}/dashboard#/")
        await page.until("document.querySelector('h1') !== null")
        await page.goto(f"{server.endpoint}/dashboard#/{view}")
        await page.until(f"document.querySelector('main').innerText.includes('There is no such {what}')")


async def test_other_store_behind_the_same_address_is_shown(page: Page, serve: Serve) -> None:
    server = await serve()
    for _ in range(8):
        await finished(server, "old", reward=0.25, mode="train")
    await page.goto(f"{server.endpoint}/dashboard")
    await page.until_text("0.25")
    while server.app.service.waiting_calls == 0:  # else the page may not notice that it is gone
        await asyncio.sleep(LOOK_SECONDS)
    await server.stop()
    other = InMemoryLightningStore()
    for _ in range(16):
        await finished(other, "new", reward=0.75, mode="train")

    await asyncio.wait_for(served_at(server.port, other, serve), 10.0)

    await page.until_text("Mean reward, last 16\n0.75")


async def served_at(port: int, store: LightningStore, serve: Serve) -> None:
    """A store on a port that somebody else may have for a moment."""
    while True:
        try:
            await serve(store, port=port)
            return
        except RuntimeError:
            await asyncio.sleep(0.05)


async def test_focus_on_a_span_outlives_a_change(page: Page, serve: Serve) -> None:
    server = await serve()
    rollout = await server.start_rollout("while you read")
    await server.add_span(span_of(rollout, "first", {"colour": "blue"}, span_id="a" * 16))
    await page.goto(f"{server.endpoint}/dashboard#/rollouts/{rollout.rollout_id}")
    await page.click(".span summary")
    await page.until_text("colour", ".span .attributes")
    await page.ask("document.querySelector('.span summary').focus()")

    await server.add_span(span_of(rollout, "second", {}, sequence_id=2))

    await page.until("document.querySelectorAll('.span').length === 2")
    assert await page.ask("document.activeElement.matches('summary')")
    assert await page.ask("document.activeElement.querySelector('.name').innerText") == "first"
    assert "colour" in await page.ask("document.querySelector('.span .attributes').innerText")


async def test_skip_link_leaves_the_view_as_it_is(page: Page, serve: Serve) -> None:
    server = await serve()
    await page.goto(f"{server.endpoint}/dashboard#/runs")
    await page.until_text("No run was recorded.")

    await page.press("Tab")
    await page.press("Enter")

    await page.until("document.activeElement.id === 'main'")
    assert await page.ask("location.hash") == "#/runs"
