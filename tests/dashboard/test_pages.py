"""The dashboard in a real browser: pictures, prompts, changes, themes, keys, and narrow screens."""

import json

import pytest

from agentlightning.store import LightningStoreServer
from agentlightning.store.http.tokens import Scope, sign_token
from tests.dashboard.browser import Page
from tests.dashboard.conftest import TRAINING_SECONDS, Serve, failed, finished, reward_span, span_of

SECRET = "a-master-token-of-some-length"
HOSTILE = "<img src=x onerror='window.wasRun = true'>"
DOT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABpfZFQAAA"
    "AABJRU5ErkJggg=="
)


async def test_images_that_came_along_are_shown_and_others_only_named(page: Page, serve: Serve) -> None:
    server = await serve()
    rollout = await server.start_rollout("look")
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": DOT}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/spy.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zy8+"}},
    ]
    asked = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": json.dumps(parts)}
    await server.add_span(span_of(rollout, "openai.chat.completion", asked))

    await page.goto(f"{server.endpoint}/dashboard#/rollouts/{rollout.rollout_id}")
    await page.until_text("What is this?", ".message")

    assert await page.ask("[...document.querySelectorAll('main img')].map(one => one.src)") == [DOT]
    assert await page.ask("document.querySelector('main img').decode().then(() => true)")
    assert "image_url at http://127.0.0.1:9/spy.png" in await page.ask("document.querySelector('.message').innerText")


async def test_rewards_stand_where_they_were_given(page: Page, serve: Serve) -> None:
    server = await serve()
    rollout = await server.start_rollout("twice")
    for number, text in enumerate(("first answer", "second answer")):
        said = {"gen_ai.prompt.0.role": "user", "gen_ai.completion.0.role": "assistant"}
        said |= {"gen_ai.completion.0.content": text, "gen_ai.response.id": text}
        times = {"start_time": 100.0 + 10 * number, "end_time": 105.0 + 10 * number, "sequence_id": 2 * number + 1}
        await server.add_span(span_of(rollout, "openai.chat.completion", said, **times))
        given = reward_span(rollout, 0.25 + number / 2)
        await server.add_span(
            given.model_copy(update={"start_time": 106.0 + 10 * number, "sequence_id": 2 * number + 2})
        )

    await page.goto(f"{server.endpoint}/dashboard#/rollouts/{rollout.rollout_id}")
    await page.until_text("second answer", ".call:nth-of-type(2)")

    shown = await page.ask("[...document.querySelectorAll('.call, .pinned')].map(one => one.innerText)")
    assert ["first answer" in shown[0], shown[1], "second answer" in shown[2], shown[3]] == [
        *(True, "Reward 0.25"),
        *(True, "Reward 0.75"),
    ]


async def test_prompts_of_an_optimisation_stand_below_their_parents_with_what_changed(page: Page, serve: Serve) -> None:
    server = await serve()
    run = await server.start_run("apo")
    seed = {"version": "v0", "template": "Answer.\nBe brief.", "fate": "seed", "scores": {"0": 0.25}}
    child = {"version": "v1", "template": "Answer.\nBe kind.", "parent": "v0", "fate": "promoted", "critique": HOSTILE}
    odd = {"version": "v2", "template": "?", "parent": "v2", "fate": HOSTILE}
    await server.finish_run(run.run_id, summary={"best_version": "v1", "candidates": [seed, child, odd, "no record"]})

    await page.goto(f"{server.endpoint}/dashboard#/runs/{run.run_id}")
    await page.until_text("Compared with v0")

    indents = "[...document.querySelectorAll('.lineage li')].map(one => one.style.marginInlineStart)"
    assert await page.ask(indents) == ["0rem", "1.2rem", "0rem"]
    assert await page.ask("[...document.querySelectorAll('.diff del, .diff ins')].map(one => one.innerText)") == [
        "brief",
        "kind",
    ]
    await page.click("[data-key='prompt v0']")
    await page.until("location.hash.endsWith('prompt=v0')")
    await page.until_text("PROMPT V0")
    assert await page.ask("window.wasRun === undefined && document.querySelectorAll('main img').length === 0")


@pytest.mark.parametrize(("scope", "may"), [("admin", True), ("reader", False)])
async def test_a_rollout_is_tried_again_after_a_question_where_the_token_allows_it(
    page: Page, serve: Serve, scope: str, may: bool
) -> None:
    server = await serve(token=SECRET)
    rollout = await failed(server, "again", "broken")
    token = sign_token(SECRET, Scope("admin" if may else "reader"), expires_at=None)
    await page.goto(f"{server.endpoint}/dashboard#token={token}")
    await page.until("document.querySelector('#state').textContent === 'live'")
    await page.ask(f"location.hash = '#/rollouts/{rollout.rollout_id}'")
    await page.until_text("Attempt 1")

    if not may:
        assert await page.ask("document.querySelector('[data-key=Retry]')") is None
        return
    await page.click("[data-key=Retry]")
    await page.click("dialog [value='']")
    await page.until("document.querySelector('dialog') === null")
    assert (await status_of(server, rollout.rollout_id)) == "failed"
    await page.click("[data-key=Retry]")
    await page.click("dialog [value=yes]")
    await page.until_text("requeuing", ".figures")
    assert (await status_of(server, rollout.rollout_id)) == "requeuing"
    await page.click("[data-key=Cancel]")
    await page.click("dialog [value=yes]")
    await page.until_text("cancelled", ".figures")


async def status_of(server: LightningStoreServer, rollout_id: str) -> str:
    (found,) = await server.query_rollouts(rollout_id_in=[rollout_id])
    return found.status


async def test_the_theme_is_chosen_and_kept(page: Page, serve: Serve) -> None:
    server = await serve()
    await page.goto(f"{server.endpoint}/dashboard")
    await page.until("document.querySelector('#theme')?.textContent === '◐ Auto'")
    for _ in range(2):
        await page.click("#theme")

    await page.send("Page.reload")

    await page.until("document.querySelector('#theme').textContent === '☾ Dark'")
    await page.until("getComputedStyle(document.body).backgroundColor === 'rgb(18, 21, 28)'")


async def test_keys_lead_to_views_rows_and_filters(page: Page, serve: Serve) -> None:
    server = await serve()
    rollout = await finished(server, "by keys")
    await page.goto(f"{server.endpoint}/dashboard")
    await page.until("document.querySelector('#state').textContent === 'live'")

    await page.ask("for (const key of ['g', 'r']) document.body.dispatchEvent("
                   "new KeyboardEvent('keydown', {key, bubbles: true}))")  # fmt: skip
    await page.until(f"document.querySelector('a[data-key={rollout.rollout_id}]') !== null")
    await page.ask("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'j', bubbles: true}))")
    assert await page.ask("document.activeElement.dataset.key") == rollout.rollout_id
    await page.ask("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true}))")
    assert await page.ask("document.activeElement.closest('.filters') !== null")


async def trained_ids(server: LightningStoreServer) -> tuple[str, str]:
    """A training, and one of its rollouts."""
    run = next(one for one in await server.query_runs() if one.name.startswith("groups of"))
    (rollout,) = await server.query_rollouts(mode_in=["train"], run_id_in=[run.run_id], limit=1)
    return run.run_id, rollout.rollout_id


NAMED = ("button", "checkbox", "combobox", "image", "link", "searchbox", "slider", "spinbutton", "textbox")
"""Roles of what a screen reader must have a name for."""


@pytest.mark.timeout(TRAINING_SECONDS + 120)
async def test_every_control_and_picture_has_a_name_for_screen_readers(
    page: Page, trained: LightningStoreServer
) -> None:
    run, rollout = await trained_ids(trained)
    await page.send("Accessibility.enable")

    for view in ("", "runs", f"runs/{run}", "rollouts", f"rollouts/{rollout}", "resources", "workers"):
        await page.goto(f"{trained.endpoint}/dashboard#/{view}")
        await page.until("document.querySelector('main table, main .chart') !== null")
        await page.until("document.querySelector('#state').textContent === 'live'")
        nodes = (await page.send("Accessibility.getFullAXTree"))["nodes"]
        found = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]]
        assert [role for role, name in found if role in NAMED and not name] == [], view
        assert {"banner", "main", "navigation"} <= {role for role, _ in found}, view
        assert await page.ask("document.querySelectorAll('h1').length") == 1, view


async def test_an_empty_store_is_told_in_words(page: Page, serve: Serve) -> None:
    server = await serve()

    for view, missing in {"runs": "run", "rollouts": "rollout", "resources": "resources", "workers": "worker"}.items():
        await page.goto(f"{server.endpoint}/dashboard#/{view}")
        await page.until(f"/No {missing}/.test(document.querySelector('main .empty')?.innerText)")
        text = await page.ask("document.querySelector('main').innerText")
        assert not any(odd in text for odd in ("undefined", "null", "NaN", "[object")), view


NARROW_COLUMNS = ["Rollout", "Status", "Reward", "Task", "Output"]


@pytest.mark.timeout(TRAINING_SECONDS + 120)  # it may have to train first
async def test_every_view_fits_a_narrow_screen(page: Page, trained: LightningStoreServer) -> None:
    run, rollout = await trained_ids(trained)
    await page.send("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)

    for view in ("", "runs", f"runs/{run}", "rollouts", f"rollouts/{rollout}", "resources", "workers"):
        await page.goto(f"{trained.endpoint}/dashboard#/{view}")
        await page.until("document.querySelector('#state').textContent === 'live'")
        await page.until("document.querySelector('main table, main .chart') !== null")
        assert await page.ask("document.documentElement.scrollWidth") <= 400, view
        if view == "rollouts":
            shown = "[...document.querySelectorAll('thead th')].filter((one) => one.offsetParent)"
            assert await page.ask(f"{shown}.map((one) => one.innerText)") == NARROW_COLUMNS
            hidden = "((one) => one.scrollWidth - one.clientWidth)(document.querySelector('.scroll'))"
            assert await page.ask(hidden) == 0
