"""The dashboard in a real browser, over a store that a real training has filled: from the overview to single tokens."""

import pytest

from agentlightning.store import LightningStoreServer
from tests.dashboard.browser import Page
from tests.dashboard.conftest import FAILURE, TRAINING_SECONDS

pytestmark = pytest.mark.timeout(TRAINING_SECONDS + 120)  # the first of them trains

IDS = "[...document.querySelectorAll('#page tbody tr')].map(row => row.cells[0].innerText)"
CELLS = "[...document.querySelectorAll('#page tbody tr')].map(row => row.cells[{}].innerText)"


async def run_ids(server: LightningStoreServer) -> list[str]:
    """The two trainings, the older one first."""
    runs = await server.query_runs(sort_by="start_time")
    return [run.run_id for run in runs if run.name.startswith("groups of")]


async def test_overview_leads_with_the_newest_run_and_its_own_figures(
    page: Page, trained: LightningStoreServer
) -> None:
    await page.goto(f"{trained.endpoint}/dashboard")

    await page.until_text("groups of 2", "main .panel")
    await page.until("document.querySelector('.chart polyline, .chart circle') !== null")
    text = await page.ask("document.querySelector('main .panel').innerText")
    assert "GRPO" in text
    assert "Entropy" in text
    await page.until_text(f"ConnectionError: {FAILURE}", ".errors")


async def test_a_run_leads_to_a_step_a_group_and_a_rollout_in_one_click_each(
    page: Page, trained: LightningStoreServer
) -> None:
    first, _ = await run_ids(trained)
    await page.goto(f"{trained.endpoint}/dashboard#/runs/{first}")
    await page.until_text("Step 3", ".stepper")

    await page.click("[data-key='step Earlier']")
    await page.until_text("Rewards of step 2")
    assert await page.ask("document.querySelectorAll('.bin').length") == 2
    await page.click("[data-key^='group group-']")
    await page.until_text("Worst: 0".upper(), ".siblings")
    shown = await page.ask("document.querySelector('.siblings').innerText")
    assert "BEST: 1" in shown
    assert shown.count("say ") == 2
    await page.click(".reward-dot.good")

    await page.until_text("Conversation".upper())
    assert await page.ask("document.querySelector('#reward').innerText") == "1"
    assert "step=2" in await page.ask("document.querySelector('.figures a[href*=group]').href")


async def test_tokens_are_shown_with_their_probabilities_and_their_fate(
    page: Page, trained: LightningStoreServer
) -> None:
    (_, newest) = await run_ids(trained)
    (rollout,) = await trained.query_rollouts(mode_in=["train"], run_id_in=[newest], reward_min=1, limit=1)
    await page.goto(f"{trained.endpoint}/dashboard#/rollouts/{rollout.rollout_id}")
    await page.until_text("Sampled tokens are trained", ".fate")
    assert "Trained for tiny in run-" in await page.ask("document.querySelector('.fate').innerText")
    assert float(await page.ask(figure("Advantage"))) > 0

    titles = await page.ask("[...document.querySelectorAll('.tokens > .token')].map(one => one.title)")
    assert titles
    assert all("id " in title and "log-probability -" in title and title.endswith("trained") for title in titles)
    await page.click("[data-key^='ids '] summary")
    await page.until("document.querySelectorAll('.tokens .masked').length > 3")
    names = await page.ask("[...document.querySelectorAll('.span .name')].map(one => one.innerText)")
    assert names == ["Model call · tiny", "Reward 1"]


async def test_a_rollout_that_was_dropped_says_why(page: Page, trained: LightningStoreServer) -> None:
    (rollout,) = await trained.query_rollouts(status_in=["failed"])

    await page.goto(f"{trained.endpoint}/dashboard#/rollouts/{rollout.rollout_id}")

    await page.until_text("it did not succeed.", ".fate")
    assert await page.ask(figure("In training")) == "dropped: it did not succeed"
    titles = await page.ask("[...document.querySelectorAll('.tokens > .token')].map(one => one.title)")
    assert titles
    assert all(title.endswith("dropped") for title in titles)


def figure(name: str) -> str:
    """What stands below a name in the head of a page."""
    found = f"[...document.querySelectorAll('.figures dt')].find(one => one.innerText === '{name}')"
    return f"{found}.nextElementSibling.innerText"


@pytest.mark.parametrize("kind", ["apo", "gepa"])
async def test_a_prompt_optimisation_leads_from_a_step_to_a_task_and_a_rollout(
    page: Page, trained: LightningStoreServer, kind: str
) -> None:
    (run,) = await trained.query_runs(name=kind)
    await page.goto(f"{trained.endpoint}/dashboard#/runs/{run.run_id}?step=1")
    await page.until_text("Rewards of step 1")

    several = "[...document.querySelectorAll('tbody tr')].find(row => row.querySelectorAll('.reward-dot').length > 1)"
    await page.until(f"{several} !== undefined")
    await page.ask(f"{several}.querySelector('[data-key^=\"group \"]').click()")
    await page.until("document.querySelectorAll('.siblings .panel').length === 2")
    await page.until("document.querySelectorAll('[data-key^=\"resources \"]').length > 1")  # a prompt each
    await page.click("[data-key='Best sibling']")

    await page.until("document.querySelector('#reward') !== null")
    assert await page.ask(figure("Run")) == run.run_id


async def test_rollouts_are_filtered_and_sorted_by_what_became_of_them(
    page: Page, trained: LightningStoreServer
) -> None:
    first, _ = await run_ids(trained)
    await page.goto(f"{trained.endpoint}/dashboard#/rollouts?run={first}&step=2")
    await page.until("document.querySelector('#shown')?.innerText === '1 to 12 of 12'")

    await page.click("[data-key='sort reward']")
    await page.until("document.querySelector('[aria-sort=descending] [data-key=\"sort reward\"]') !== null")
    await page.until(f"{CELLS.format(4)}[0] === '1'")
    rewards = await page.ask(CELLS.format(4))
    assert rewards == sorted(rewards, key=lambda shown: {"1": 0, "0": 1}.get(shown, 2))
    await page.until(f"{CELLS.format(6)}[0].length > 1")
    await page.fill("#filter-min", "0.5")
    await page.until("document.querySelector('#shown').innerText.endsWith('of 6')")
    await page.goto(f"{trained.endpoint}/dashboard#/rollouts?error=tool&run={first}")
    await page.until_text(f"ConnectionError: {FAILURE}", "tbody")
    assert len(await page.ask(IDS)) == 1
    await page.fill("#filter-text", "no such task")
    await page.until_text("No rollout is like that.")


async def test_runs_are_laid_over_each_other_with_what_differs(page: Page, trained: LightningStoreServer) -> None:
    await page.goto(f"{trained.endpoint}/dashboard#/runs")
    await page.until("document.querySelectorAll('#page [type=checkbox]').length === 4")
    names = "[...document.querySelectorAll('#page tbody tr')].map(row => row.cells[5].innerText)"
    assert await page.ask(names) == ["GRPO", "GRPO", "GEPA", "APO"]

    for number in range(2):
        await page.ask(f"document.querySelectorAll('#page [type=checkbox]')[{number}].click()")
        await page.until(f"document.querySelectorAll('#page :checked').length === {number + 1}")

    await page.until("document.querySelectorAll('.chart .key')[0]?.children.length === 2")
    differing = "[...document.querySelectorAll('.differs')].map(row => row.innerText.replace(/\\s+/g, ' '))"
    assert "settings.algorithm.group_size 2 4" in await page.ask(differing)
    await page.choose("#by", "time")
    await page.until("location.hash.includes('by=time')")
    await page.until("[...document.querySelectorAll('.chart text')].some(one => / s$/.test(one.textContent))")


async def test_resources_are_compared_and_workers_named(page: Page, trained: LightningStoreServer) -> None:
    await page.goto(f"{trained.endpoint}/dashboard#/resources")
    await page.until_text("Answer in 2 words.", "tbody")
    await page.click("tbody tr a")
    await page.until("document.querySelector('#with') !== null")
    others = "[...document.querySelector('#with').options].map(one => one.value).filter(one => one.startsWith('rs-'))"
    await page.choose("#with", await page.ask(f"{others}[1]"))  # the first is what was left when a run ended
    await page.until("document.querySelector('.diff ins')?.innerText === '2'")
    assert await page.ask("document.querySelector('.diff del').innerText") == "4"

    await page.goto(f"{trained.endpoint}/dashboard#/workers")

    await page.until("/waits for work|is away/.test(document.querySelector('tbody')?.innerText)")
