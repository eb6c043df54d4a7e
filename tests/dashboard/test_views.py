"""The dashboard in a real browser: what its views show of a store."""

import itertools
from typing import Any

import pytest

from agentlightning.errors import SpansEvicted
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.types import AttemptedRollout, PromptTemplate, RolloutConfig
from tests.dashboard.browser import Page
from tests.dashboard.conftest import Serve, failed, finished, reward_span, span_of

COUNTS = "Object.fromEntries([...document.querySelectorAll('[data-count]')].map(e => [e.dataset.count, e.textContent]))"
IDS = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].innerText)"
CELL = "document.querySelectorAll('tbody tr')[{}].cells[{}]?.innerText"
SHOWN = "document.querySelector('#shown')?.innerText"


async def test_overview_counts_rollouts_by_state(page: Page, serve: Serve) -> None:
    server = await serve()
    for number in range(3):
        await finished(server, {"n": number}, reward=0.5, mode="train")
    await failed(server, "bad", "no answer\nsecond line")
    await server.enqueue_rollout("later")
    await server.update_worker("worker-7")

    await page.goto(f"{server.endpoint}/dashboard")
    await page.until_text("Mean reward, last 3\n0.5")

    counts = await page.ask(COUNTS)
    assert {name: count for name, count in counts.items() if count != "0"} == {
        "succeeded": "3",
        "failed": "1",
        "queuing": "1",
    }
    text = await page.ask("document.querySelector('main').innerText")
    assert "ValueError: no answer" in text
    assert "second line" not in text
    assert "worker-7" in text
    assert "4 / min" in text


async def test_latest_errors_are_those_that_happened_last(page: Page, serve: Serve) -> None:
    times = itertools.count(1_700_000_000.0)
    server = await serve(InMemoryLightningStore(clock=lambda: next(times)))
    retried = await server.start_rollout("again", config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    slow, quick = await server.start_rollout("slow"), await server.start_rollout("quick")
    for rollout in (quick, retried, slow):  # they fail in another order than they started in
        await server.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")

    await page.goto(f"{server.endpoint}/dashboard")
    await page.until("document.querySelectorAll('.errors li').length === 3")

    named = await page.ask("[...document.querySelectorAll('.errors a')].map(link => link.innerText)")
    assert named == [slow.rollout_id, retried.rollout_id, quick.rollout_id]


async def test_rollout_that_finishes_meanwhile_appears_without_reload(page: Page, serve: Serve) -> None:
    server = await serve()
    rollout = await server.start_rollout("while you watch")
    await page.goto(f"{server.endpoint}/dashboard#/rollouts")
    await page.until_text("preparing", "tbody")
    await page.ask("window.isSamePage = true")

    await server.add_span(reward_span(rollout, 0.25))
    await server.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")

    await page.until_text("0.25", "tbody .reward")
    assert "succeeded" in await page.ask("document.querySelector('tbody').innerText")
    assert await page.ask("window.isSamePage")


async def test_table_is_filtered_and_paged_by_the_server(page: Page, serve: Serve) -> None:
    server = await serve()
    modes: dict[str, list[str]] = {"train": [], "val": []}
    for number in range(130):
        mode: Any = "val" if 40 <= number < 52 else "train"
        modes[mode].append((await server.enqueue_rollout(number, mode=mode)).rollout_id)
    await finished(server, "the only one")
    await page.goto(f"{server.endpoint}/dashboard#/rollouts")

    await page.until(f"{SHOWN} === '1 to 50 of 131'")
    await page.click("[data-key=Older]")
    await page.until(f"{SHOWN} === '51 to 100 of 131'")
    await page.choose("#filter-mode", "val")
    await page.until(f"{SHOWN} === '1 to 12 of 12'")
    assert sorted(await page.ask(IDS)) == sorted(modes["val"])
    await page.choose("#filter-mode", "train")
    await page.until(f"{SHOWN} === '1 to 50 of 118'")
    await page.click("[data-key=Oldest]")
    await page.until(f"{SHOWN} === '101 to 118 of 118'")
    assert sorted(await page.ask(IDS)) == sorted(modes["train"][:18])
    await page.choose("#filter-mode", "")
    await page.choose("#filter-status", "succeeded")
    await page.until(f"{SHOWN} === '1 to 1 of 1'")
    await page.choose("#filter-status", "")
    await page.click("details summary")
    await page.fill("#filter-id", modes["train"][3])
    await page.until(f"{SHOWN} === '1 to 1 of 1' && {IDS}[0] === '{modes['train'][3]}'")
    await page.ask("history.back()")
    await page.until(f"{SHOWN} === '1 to 50 of 131'")


async def test_table_is_sorted_by_the_agent_the_run_and_the_error_too(page: Page, serve: Serve) -> None:
    server = await serve()
    first = await finished(server, {"agent": "beta"}, metadata={"run_id": "run-a"})
    second = await finished(server, {"agent": "alpha"}, metadata={"run_id": "run-b"})
    third = await failed(server, "broken", "no answer")
    ids = [one.rollout_id for one in (first, second, third)]
    await page.goto(f"{server.endpoint}/dashboard#/rollouts?sort=agent")

    await page.until(f"{IDS}[0] === '{ids[0]}' && {CELL.format(0, 10)} === 'beta'")
    await page.choose("#filter-order", "asc")
    await page.until(f"{IDS}.join() === '{ids[2]},{ids[1]},{ids[0]}'")  # what has no agent comes first
    await page.choose("#filter-order", "")
    await page.choose("#filter-sort", "run_id")
    await page.until(f"{IDS}[0] === '{ids[1]}' && {CELL.format(0, 10)} === 'run-b'")
    await page.choose("#filter-sort", "error")
    await page.until(f"{IDS}[0] === '{ids[2]}'")
    await page.click("[data-key='sort reward']")
    await page.until("document.querySelector('#filter-sort').value === 'reward'")


async def test_a_run_whose_rollouts_name_no_step_shows_them_all(page: Page, serve: Serve) -> None:
    server = await serve()
    run = await server.start_run("own", config={"settings": {"algorithm": {"algorithm_func": "mine.best_of_n"}}})
    await server.add_metrics(run.run_id, 0, {"reward/mean": 0.5})
    for reward in (0.0, 1.0):
        await finished(server, "the same", reward, metadata={"run_id": run.run_id})

    await page.goto(f"{server.endpoint}/dashboard#/runs/{run.run_id}")
    await page.until("document.querySelectorAll('.reward-dot').length === 2")

    assert await page.ask("document.querySelectorAll('.reward-dot')[0].closest('tbody').rows.length") == 1
    assert await page.ask("document.querySelector('.stepper')") is None
    assert "best_of_n" in await page.ask("document.querySelector('.figures').innerText")


async def trace(store: LightningStore) -> AttemptedRollout:
    """A rollout with two model calls, one of them also seen by the proxy, a tool between them, and a reward."""
    rollout = await store.start_rollout({"question": "What is 3*4?"})
    asked = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "What is 3*4?"}
    call = {"role": "assistant", "tool_calls.0.name": "calculator", "tool_calls.0.arguments": '{"e": "3*4"}'}
    about = {"gen_ai.response.model": "tiny", "gen_ai.usage.prompt_tokens": 9, "gen_ai.usage.completion_tokens": 7}
    first = {**asked, **about, "gen_ai.response.id": "one", **{f"gen_ai.completion.0.{k}": v for k, v in call.items()}}
    second = {
        **asked,
        **about,
        "gen_ai.response.id": "two",
        **{f"gen_ai.prompt.1.{name}": value for name, value in call.items()},
        "gen_ai.prompt.2.role": "tool",
        "gen_ai.prompt.2.content": "12",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "It is twelve.",
    }
    times = {"start_time": 100.0, "end_time": 104.0}
    root = span_of(rollout, "agent", {}, span_id="a" * 16, parent_id=None, **times)
    below = {"parent_id": "a" * 16}
    spans = [
        root,
        span_of(rollout, "openai.chat.completion", first, span_id="b" * 16, start_time=100.0, end_time=101.0, **below),
        span_of(rollout, "litellm_request", first, parent_id="b" * 16, start_time=100.1, end_time=100.9),
        span_of(rollout, "openai.chat.completion", second, start_time=102.0, end_time=104.0, **below),
        reward_span(rollout, 0.75).model_copy(update={"start_time": 104.0, "end_time": 104.0}),
    ]
    await store.add_many_spans([span.model_copy(update={"sequence_id": n}) for n, span in enumerate(spans, 1)])
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    return rollout


async def test_rollout_shows_its_span_tree_and_conversation(page: Page, serve: Serve) -> None:
    server = await serve()
    rollout = await trace(server)

    await page.goto(f"{server.endpoint}/dashboard#/rollouts")
    await page.click(f"a[data-key={rollout.rollout_id}]")
    await page.until_text("It is twelve.")

    calls = await page.ask("[...document.querySelectorAll('.call')].map(e => e.innerText.replace(/\\s+(Copy)?/g, ' '))")
    assert len(calls) == 2
    assert "tiny · 9 tokens in, 7 out · 1 s" in calls[0]
    assert 'user What is 3*4? assistant calculator {"e": "3*4"}' in calls[0].replace("  ", " ")
    assert "2 messages as before" in calls[1]
    assert calls[1].replace("  ", " ").strip().endswith("tool 12 assistant It is twelve.")
    indents = "[...document.querySelectorAll('.span .name')].map(e => [e.innerText, e.style.paddingInlineStart])"
    assert await page.ask(indents) == [
        ["agent", "0em"],
        ["Model call · tiny", "1em"],
        ["Model call · tiny", "1em"],
        ["Reward 0.75", "0em"],
    ]
    bars = "[...document.querySelectorAll('.track i')].map(e => [e.style.marginInlineStart, e.style.width])"
    assert (await page.ask(bars))[2] == ["50%", "50%"]
    assert await page.ask("document.querySelector('#reward').innerText") == "0.75"
    await page.click("details.span:nth-of-type(2) summary")
    await page.until_text("gen_ai.usage.prompt_tokens", "details.span:nth-of-type(2) .attributes")


async def test_every_attempt_can_be_looked_at_with_its_error(page: Page, serve: Serve) -> None:
    server = await serve()
    first = await failed(server, "twice", "the first one broke")
    second = await server.start_attempt(first.rollout_id)
    await server.add_span(span_of(second, "of the second", {}))

    await page.goto(f"{server.endpoint}/dashboard#/rollouts/{first.rollout_id}")
    await page.until_text("of the second", ".spans")
    assert "ValueError: the first one broke" in await page.ask("document.querySelector('.attempts').innerText")
    await page.click(f"button[data-key={first.attempt.attempt_id}]")

    await page.until_text("No span was recorded.")


async def test_run_shows_its_configuration_summary_and_curves(page: Page, serve: Serve) -> None:
    server = await serve()
    run = await server.start_run("nightly", config={"algorithm": "somewhere.GRPO", "batch": 16})
    for step in range(5):
        await server.add_metrics(run.run_id, step, {"reward/mean": step / 4, "reward/max": 1 + step, "steady": 3})
    await page.goto(f"{server.endpoint}/dashboard#/runs")

    await page.click(f"a[data-key={run.run_id}]")
    await page.until("document.querySelectorAll('polyline').length === 1")
    await server.add_metrics(run.run_id, 5, {"reward/mean": 0.625, "reward/max": 9})
    await page.until_text("train 0.625", ".charts")
    await page.click("details.panel summary")
    await page.until("document.querySelectorAll('polyline').length === 2")
    await server.finish_run(run.run_id, summary={"best": 0.875})

    await page.until_text("0.875")
    text = await page.ask("document.querySelector('main').innerText")
    assert "somewhere.GRPO" in text
    assert "Always the same: steady 3." in text


async def test_hostile_texts_are_shown_and_not_run(page: Page, serve: Serve) -> None:
    server = await serve()
    hostile = "<img src=x onerror='window.wasRun = true'><script>window.wasRun = true</script>"
    rollout = await server.start_rollout({"agent": hostile, "q": hostile}, metadata={"note": hostile})
    await server.add_span(span_of(rollout, hostile, {hostile: hostile, "gen_ai.prompt.0.content": hostile}))
    noted = {"error": {"type": hostile, "message": hostile, "traceback": hostile}}
    await server.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed", metadata=noted)
    run = await server.start_run(hostile, config={hostile: hostile})
    await server.add_metrics(run.run_id, 1, {hostile: 1.0})
    await server.update_worker(hostile, {"host": hostile, "running_attempts": [[rollout.rollout_id, 7], hostile]})
    for text in (hostile, f"{hostile}!"):
        resources = await server.add_resources({hostile: PromptTemplate(template=text, engine="f-string")})

    views = ("", f"rollouts/{rollout.rollout_id}", "runs", f"runs/{run.run_id}", "resources", "workers", "rollouts")
    for view in (*views, f"resources/{resources.resources_id}"):
        await page.goto(f"{server.endpoint}/dashboard#/{view}")
        await page.until_text("<img src=x onerror=")
    await page.goto(f"{server.endpoint}/dashboard#/rollouts/{rollout.rollout_id}")
    await page.click("details.span summary")
    await page.until_text("<img src=x", "details.span .attributes")

    assert await page.ask(
        "window.wasRun === undefined && document.querySelectorAll('main img, main script').length === 0"
    )


async def test_views_are_reached_with_the_keyboard(page: Page, serve: Serve) -> None:
    server = await serve()
    await page.goto(f"{server.endpoint}/dashboard")
    await page.until_text("Rollouts by state".upper())

    for _ in range(4):  # the skip link, Overview, Runs, Rollouts
        await page.press("Tab")
    await page.press("Enter")

    await page.until("document.querySelector('h1').innerText === 'Rollouts'")
    await page.until_text("No rollout is like that.")


async def test_spans_that_the_store_dropped_are_told(page: Page, serve: Serve) -> None:
    store = InMemoryLightningStore(
        eviction_memory_threshold=2, safe_memory_threshold=1, span_size_estimator=lambda _: 1
    )
    server = await serve(store)
    early = await finished(server, "early")
    await finished(server, "later")
    await finished(server, "last")
    with pytest.raises(SpansEvicted) as told:
        await server.query_spans(early.rollout_id)

    await page.goto(f"{server.endpoint}/dashboard#/rollouts/{early.rollout_id}")

    await page.until_text(str(told.value))


OUTPUT = "[...document.querySelectorAll('h2')].find(one => one.textContent === 'Output')?.parentElement"


async def test_a_long_output_is_folded_and_shown_as_text(page: Page, serve: Serve) -> None:
    server = await serve()
    rollout, other = await server.start_rollout("x" * 300_000), await finished(server, "a")
    text = "<img src=x onerror='window.isHacked = true'>\n" + "x" * 5000 + "\nlast line"
    await server.finish_attempt(rollout.rollout_id, rollout.attempt.attempt_id, "succeeded", output=text)

    await page.goto(f"{server.endpoint}/dashboard#/rollouts/{rollout.rollout_id}")
    await page.until_text("onerror", "main")
    assert "and 100,000 more letters" in await page.ask("document.querySelector('main').innerText")  # of the input
    folded = await page.ask(f"{OUTPUT}.innerText")
    await page.ask(f"{OUTPUT}.querySelector('summary').click()")
    await page.until_text("last line", "main")

    assert "last line" not in folded
    assert await page.ask("document.querySelectorAll('main img').length") == 0
    await page.goto(f"{server.endpoint}/dashboard#/rollouts/{other.rollout_id}")
    await page.until(f"{OUTPUT} === undefined")


async def test_a_run_leads_with_its_verdict_and_so_does_the_overview(page: Page, serve: Serve) -> None:
    server = await serve()
    finding = {
        "name": "all_wrong",
        "sentence": "No answer was ever right.",
        "advice": "<b>Easier</b> tasks.",
        "figures": {},
    }
    verdict = {"outcome": "no gain", "sentence": "Nothing was gained.", "gain": None, "findings": [finding]}
    run = await server.start_run("nightly")
    for step in range(4):
        await server.add_metrics(run.run_id, step, {"reward/mean": 0.1 * step, "validation/reward": 0.5})
    await server.finish_run(run.run_id, summary={"verdict": verdict, "best": 0.25})

    await page.goto(f"{server.endpoint}/dashboard#/")
    await page.until_text("Nothing was gained.")
    await page.until("document.querySelectorAll('polyline').length === 2")
    await page.click(f"a[data-key={run.run_id}]")

    await page.until_text("No answer was ever right. <b>Easier</b> tasks.", ".findings")
    assert await page.ask("document.querySelector('.verdict').className") == "verdict warn"
    odd = await server.start_run("odd")
    await server.finish_run(odd.run_id, summary={"verdict": {"sentence": 7, "findings": "none"}, "best": 0.625})
    await page.goto(f"{server.endpoint}/dashboard#/runs/{odd.run_id}")
    await page.until_text("0.625")
    assert await page.ask("document.querySelector('.verdict')") is None  # it only looks like one
