"""What APO and GEPA promise alike, run over both, with agents and a model of a small world."""

import asyncio
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm.prompts.budget import OptimisationBudget
from agentlightning.algorithm.prompts.results import Lineage
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer import Trainer
from agentlightning.types import PromptTemplate
from tests.algorithm.prompts.world import (
    SEED,
    WORDS,
    Judge,
    Optimiser,
    Writer,
    agents,
    apo_in,
    gepa_in,
    share_of_words,
)
from tests.simulated_model.optimiser import NONSENSE

pytestmark = pytest.mark.usefixtures("quick_poml")

Edit = Callable[[str, str], str]


class Kind:
    """One of the algorithms, with a model that writes as `edit` says and tasks that are numbers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model: Any = None

    def made(self, store: InMemoryLightningStore, edit: Edit | None = None, **options: Any) -> Any:
        self.model = Optimiser(edit=edit) if self.name == "apo" else Writer(edit)
        model = options.pop("model", self.model)
        return (apo_in if self.name == "apo" else gepa_in)(store, model, **options)

    async def run(
        self,
        edit: Edit | None = None,
        *,
        judge: Judge = share_of_words,
        store: InMemoryLightningStore | None = None,
        tasks: int = 60,
        **options: Any,
    ) -> Any:
        store = store or InMemoryLightningStore()
        algorithm = self.made(store, edit, seed=1, **options)
        async with agents(store, judge):
            await algorithm.run(range(40), range(tasks))
        return algorithm

    @property
    def calls(self) -> int:
        """Calls of the model so far."""
        return len(self.model.calls if self.name == "apo" else self.model.asked)


@pytest.fixture(params=["apo", "gepa"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


# ---------------------------------------------------------------------- what is found


async def test_the_best_prompt_is_published_written_and_explained_by_its_lineage(kind: Kind, tmp_path: Path) -> None:
    store, output = InMemoryLightningStore(), tmp_path / "new" / "best.json"
    trainer_run = await store.start_run("training")
    algorithm = kind.made(store, output=output, seed=1)
    algorithm.set_run_id(trainer_run.run_id)
    algorithm.set_adapter(TracerTraceToTriplet())  # the Trainer's default, which gives no conversations
    async with agents(store):
        await algorithm.run(range(40), range(80))

    best, line = algorithm.get_best_prompts()["prompt"], algorithm.lineage()
    (run,), latest = await store.query_runs(name=kind.name), await store.get_latest_resources()
    written = json.loads(output.read_text(encoding="utf-8"))
    assert all(word in best.template for word in WORDS[:3])
    assert algorithm.result.gain.low > 0
    assert algorithm.result.best_score > algorithm.result.seed_score == 0.0
    assert algorithm.result.best_estimate.mean == algorithm.result.best_score
    assert written["seed_estimate"].keys() >= {"mean", "low", "high", "n"}
    assert written["best_estimate"]["n"] == algorithm.result.seed_estimate.n > 1
    assert algorithm.result.counts.get("traces that could not be read", 0) == 0
    told, result = str(algorithm.result), algorithm.result
    assert f"Validation score: {result.seed_estimate} -> {result.best_estimate}\n" in told
    assert f"from {result.gain.n} pairs" in told
    assert {f"-{SEED.template}", f"+{best.template}"} <= set(told.splitlines())
    assert latest is not None
    assert (latest.resources_id, latest.resources) == (f"{kind.name}-best", {"prompt": best})
    assert PromptTemplate(**written["prompts"]["prompt"]) == best
    assert written["gain"]["low"] > 0
    assert [path.name for path in output.parent.iterdir()] == ["best.json"]
    assert (line[0].fate, line[0].template, line[-1].fate) == ("seed", SEED.template, "promoted")
    assert [one.parent for one in line] == [None, *(one.version for one in line[:-1])]
    assert all(one.scores for one in line[1:])
    assert (run.status, run.metadata) == ("succeeded", {"trainer_run_id": trainer_run.run_id})
    assert list(Lineage.of_run(run)) == list(algorithm.candidates)
    assert run.summary["challenges"][-1]["verdict"] in ("better", "not better")
    for run_id in (run.run_id, trainer_run.run_id):
        points = await store.query_metrics(run_id, names=[f"{kind.name}/best_score"])
        assert points[-1].values[f"{kind.name}/best_score"] > 0.5
    sent = [one.metadata or {} for one in await store.query_rollouts()]
    assert {one["run_id"] for one in sent} == {trainer_run.run_id}
    assert {one["step"] + 1 for one in sent} == {point.step for point in points}
    assert len({one["group"] for one in sent}) == len(sent)


def test_who_stops_a_run_is_told_how_it_goes_on(kind: Kind) -> None:
    store = InMemoryLightningStore()

    with_file, without = (kind.made(store, state_file=path).resume_hint() for path in ("here.state", None))

    assert with_file == "Stopped; the same script goes on from 'here.state'."
    assert without == "Stopped; the same script begins anew; with state_file='…' it keeps what it finds."


@pytest.mark.parametrize("tasks", [60, 80], ids=["same tasks", "more tasks"])
async def test_best_file_is_never_replaced_by_a_worse_result(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture, tasks: int
) -> None:
    output = tmp_path / "best.json"
    await kind.run(output=output)
    best = output.read_bytes()

    await kind.run(lambda text, answer: text, output=output, tasks=tasks)  # which finds nothing

    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]
    assert output.read_bytes() == best
    assert f"'{output}' stays as an earlier run left it" in caplog.text


@pytest.mark.parametrize("former", ["of other tasks", "worse", "no result"])
async def test_former_best_file_stays_beside_the_new_one(kind: Kind, tmp_path: Path, former: str) -> None:
    output = tmp_path / "best.json"
    await kind.run(output=output, tasks=80 if former == "of other tasks" else 60)
    if former == "worse":
        output.write_text(json.dumps({**json.loads(output.read_text()), "best_score": 0.1}))
    elif former == "no result":
        output.write_text("[1, 2]")
    before = output.read_bytes()

    algorithm = await kind.run(output=output)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-1.json", "best.json"]
    assert (tmp_path / "best-1.json").read_bytes() == before
    assert json.loads(output.read_text())["best_score"] == algorithm.result.best_score


async def test_several_prompts_are_optimised_in_one_run(kind: Kind) -> None:
    greeting = PromptTemplate(template="Greet {name}.", engine="f-string")

    def judge(prompts: dict[str, str], task: Any) -> float:
        """Half of the tasks need a word in one prompt, half in the other."""
        return float("please" in prompts["prompt" if task % 2 else "greeting"])

    size = {"gradient_batch_size": 8} if kind.name == "apo" else {"minibatch_size": 8}
    algorithm = await kind.run(judge=judge, prompts={"prompt": SEED, "greeting": greeting}, tasks=80, **size)

    best = algorithm.get_best_prompts()
    assert list(best) == ["prompt", "greeting"]
    assert all("please" in prompt.template for prompt in best.values())
    assert {one.resource_name for one in algorithm.lineage()[1:]} == {"prompt", "greeting"}
    assert algorithm.result.diff().count("(best)") == 2


async def test_prompts_that_cannot_replace_the_seed_are_rejected_with_the_reason(kind: Kind) -> None:
    unfit = {
        "Answer.": "it drops the placeholders question",
        "Answer {question} to {whom}.": "it has new placeholders 'whom'",
        "Answer {question}: {question.__class__}": "it has code that the seed does not have: {question.__class__}",
        NONSENSE: "it drops the placeholders question",
    }
    edits = iter([*unfit, "Answer {question"])

    algorithm = await kind.run(lambda prompt, word: next(edits, f"{prompt} Do it {word}."))

    reasons = {one.template: one.reason for one in algorithm.candidates if one.fate == "rejected"}
    assert "does not parse" in reasons.pop("Answer {question")
    assert {text: reason for text, reason in reasons.items() if text in unfit} == unfit
    assert algorithm.result.counts["candidates that were rejected"] >= 5
    assert algorithm.result.is_improved


async def test_a_poml_prompt_is_refused_where_runners_would_refuse_its_candidates(kind: Kind) -> None:
    store, trainer = InMemoryLightningStore(), Trainer(strategy="shm", progress="off")
    prompt = PromptTemplate(template="<p>Answer {{ question }}.</p>", engine="poml")
    algorithm = kind.made(store, prompts={"prompt": prompt})
    algorithm.set_trainer(trainer)

    with pytest.raises(ConfigurationError, match=r"Prompt 'prompt' is a POML template.*allow_poml=True"):
        await algorithm.run([1, 2], [3, 4])

    assert (kind.calls, len(await store.query_rollouts())) == (0, 0)


async def test_prompts_that_are_only_lucky_do_not_replace_the_seed(kind: Kind) -> None:
    def noise(prompts: dict[str, str], task: Any) -> float:
        """A coin for each prompt and task, whatever the prompt says."""
        return float(zlib.crc32(f"{prompts['prompt']} {task}".encode()) % 2)

    algorithm = await kind.run(judge=noise)

    assert algorithm.get_best_prompts() == {"prompt": SEED}
    assert all(one.verdict != "better" for one in algorithm.result.challenges)


async def test_candidates_are_compared_on_tasks_that_did_not_choose_them(kind: Kind) -> None:
    store = InMemoryLightningStore()
    options = {"beam_rounds": 1, "run_initial_validation": False} if kind.name == "apo" else {}
    await kind.run(store=store, **options)

    used: dict[str, list[Any]] = {}
    for rollout in await store.query_rollouts():
        if rollout.mode == "val":
            used.setdefault(rollout.resources_id or "", []).append(rollout.input)
    assert all(len(tasks) == len(set(tasks)) for tasks in used.values())


async def test_without_a_comparison_the_higher_mean_wins(kind: Kind) -> None:
    algorithm = await kind.run(alpha=None, tasks=16)
    assert all(word in algorithm.get_best_prompts()["prompt"].template for word in WORDS[:3])
    assert algorithm.result.is_improved


# ---------------------------------------------------------------------- budgets


@pytest.mark.parametrize("rollouts", [84, 150])
async def test_a_budget_of_rollouts_is_kept_to_the_last_one(kind: Kind, rollouts: int) -> None:
    store = InMemoryLightningStore()

    algorithm = await kind.run(store=store, budget=OptimisationBudget(rollouts=rollouts))

    assert len(await store.query_rollouts()) == algorithm.result.spent["rollouts"] <= rollouts
    assert "budget" in algorithm.result.stopped
    if kind.name == "gepa":
        assert algorithm.result.challenges, "enough is kept for the comparison"


@pytest.mark.parametrize("calls", [2, 6])
async def test_a_budget_of_model_calls_is_kept_to_the_last_one(kind: Kind, calls: int) -> None:
    algorithm = await kind.run(budget=OptimisationBudget(model_calls=calls))
    assert kind.calls == algorithm.result.spent["model_calls"] <= calls
    assert algorithm.result.stopped is not None


# ---------------------------------------------------------------------- what goes wrong


async def test_when_all_rollouts_fail_the_run_stops_with_the_first_traceback(kind: Kind) -> None:
    store = InMemoryLightningStore()

    def judge(prompts: dict[str, str], task: Any) -> float:
        raise ValueError("the oven is cold")

    with pytest.raises(TrainingError, match=r"(?s)rollouts failed.*Traceback: the oven is cold"):
        await kind.run(judge=judge, store=store)

    (run,) = await store.query_runs(name=kind.name)
    assert run.status == "failed"
    assert "the oven is cold" in run.summary["error"]


async def test_late_rollouts_are_cancelled_and_counted(kind: Kind) -> None:
    store = InMemoryLightningStore()
    options = {"beam_rounds": 0} if kind.name == "apo" else {"iterations": 1, "front_size": 30}

    algorithm = await kind.run(
        store=store, judge=lambda prompts, task: 1.0 if task else None, rollout_batch_timeout=1.0, **options
    )

    late = [rollout for rollout in await store.query_rollouts() if rollout.status == "cancelled"]
    assert algorithm.result.counts.get("rollouts that were late", 0) == len(late)
    assert {rollout.input for rollout in late} <= {0}


async def test_rollouts_that_nobody_runs_end_the_run(kind: Kind) -> None:
    store = InMemoryLightningStore()
    algorithm = kind.made(store, rollout_batch_timeout=0.05)

    with pytest.raises(TrainingError, match="No rollout was finished after 0 s; are there runners"):
        await algorithm.run(range(40), range(60))

    assert {rollout.status for rollout in await store.query_rollouts()} == {"cancelled"}


async def test_a_cancelled_run_is_noted_as_stopped_and_withdraws_its_rollouts(kind: Kind) -> None:
    store = InMemoryLightningStore()
    running = asyncio.create_task(kind.made(store).run(range(40), range(60)))
    await asyncio.wait_for(store.dequeue_rollout("somebody", wait=30), 30)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running

    (run,) = await store.query_runs(name=kind.name)
    assert run.status == "stopped"
    assert {rollout.status for rollout in await store.query_rollouts()} == {"cancelled"}


async def test_a_model_that_never_answers_ends_the_run_with_its_error(kind: Kind) -> None:
    def edit(prompt: str, word: str) -> str:
        raise denied

    denied = RuntimeError("no such key")
    denied.status_code = 401  # type: ignore[attr-defined] # as OpenAI's errors have it

    with pytest.raises(TrainingError, match="no such key"):
        await kind.run(edit)


async def test_without_a_model_the_environment_is_asked(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match=f"{kind.name.upper()} has no model to ask.*OPENAI_API_KEY"):
        await kind.run(model=None)


# ---------------------------------------------------------------------- going on


async def test_a_finished_run_costs_nothing_a_second_time(kind: Kind, tmp_path: Path) -> None:
    first, store = await kind.run(state_file=tmp_path / "state"), InMemoryLightningStore()

    again = await kind.run(store=store, state_file=tmp_path / "state")

    assert (kind.calls, len(await store.query_rollouts())) == (0, 0)
    assert again.get_best_prompts() == first.get_best_prompts()
    assert (again.result.gain, again.result.spent) == (first.result.gain, first.result.spent)
    assert list(again.candidates) == list(first.candidates)


async def test_the_state_of_another_run_is_refused(kind: Kind, tmp_path: Path) -> None:
    size = "val_batch_size" if kind.name == "apo" else "minibatch_size"
    options = {"beam_rounds": 1} if kind.name == "apo" else {"iterations": 1}
    await kind.run(state_file=tmp_path / "state", **options)

    with pytest.raises(ConfigurationError, match=f"another run, with other {size}"):
        await kind.run(state_file=tmp_path / "state", **options, **{size: 9})
