"""The first hour with APO: the obvious program runs as it is pasted, and says how far it is."""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.apo import APO
from tests import warm_python
from tests.stub_model.script import Request, Script
from tests.stub_model.server import running

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "optimise-a-prompt.md"
ADVICE = "Answer with the number alone."
MODELS = ("gpt-4.1-nano", "gpt-5-mini", "gpt-4.1-mini")
SMALL: dict[str, Any] = {
    "gradient_batch_size": 2,
    "val_batch_size": 4,
    "beam_width": 1,
    "branch_factor": 2,
    "beam_rounds": 1,
    "seed": 1,
}
TASKS = [{"question": f"What is {number} times 2?", "expected": str(2 * number)} for number in range(40)]


def calculate(request: Request) -> str:
    """A model that calculates in sentences unless it is told otherwise, and an optimiser that tells it so."""
    if "<critique>" in request.text:
        prompt = request.text.partition("<prompt_template>\n")[2].partition("\n</prompt_template>")[0]
        return prompt if ADVICE in prompt else f"{prompt} {ADVICE}"
    if "<prompt_template>" in request.text:
        return f"- {ADVICE}"
    first, second = map(int, re.findall(r"(\d+) times (\d+)", request.text)[0])
    return str(first * second) if ADVICE in request.text else f"It is {first * second}."


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment leads OpenAI's clients to a stub model."""
    with running(Script(calculate), models=MODELS) as served:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{served.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        yield


@agl.prompt_rollout
def calculator(task: dict[str, str], prompt_template: agl.PromptTemplate) -> float:
    """Needs no model: it is right if its prompt asks for the number."""
    return float(ADVICE in prompt_template.format(question=task["question"]))


class CustomAdapter(agl.TraceAdapter[int]):
    def adapt(self, source: Any, /) -> int:
        return len(source)


def optimised(**options: Any) -> APO[Any]:
    """An APO after a run with a Trainer."""
    apo: APO[Any] = APO(**SMALL)
    trainer = agl.Trainer(
        algorithm=apo,
        strategy=agl.SharedMemoryExecutionStrategy(n_runners=2, main_thread="algorithm"),
        initial_resources={"prompt": agl.PromptTemplate(template="Answer: {question}", engine="f-string")},
        progress="off",
        **options,
    )
    trainer.fit(calculator, train_dataset=TASKS, val_dataset=TASKS)
    return apo


@pytest.mark.claim(378)
def test_apo_chooses_its_adapter_by_itself_and_names_one_that_it_does_not_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="agentlightning")

    apo = optimised(adapter=CustomAdapter())

    assert ADVICE in apo.get_best_prompt().template
    assert caplog.text.count("and not the CustomAdapter it was given") == 1


@pytest.mark.claim(378)
def test_apo_takes_a_store_and_an_adapter_without_a_trainer() -> None:
    store = agl.InMemoryLightningStore()
    algorithm: APO[Any] = APO()
    algorithm.set_store(store)
    algorithm.set_adapter(CustomAdapter())

    assert isinstance(algorithm.get_adapter(), agl.TraceToMessages)
    assert algorithm.get_store() is store


def test_at_info_every_candidate_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="agentlightning")

    apo = optimised()

    lines = [record.getMessage() for record in caplog.records]
    told = [line for line in lines if line.startswith("Candidate ")]
    assert re.fullmatch(r"Candidate v0 \(the seed\) scores 0\.000 on 40 tasks, \d+\.\d s\.", told[0])
    assert re.fullmatch(r"Candidate v1 \(from v0\) scores 1\.000 on 4 tasks, \d+\.\d s\.", told[-1])
    assert sorted(line.split()[1] for line in told) == [one.version for one in apo.candidates]
    assert "TraceToMessages" not in caplog.text  # of an adapter that nobody gave


def test_every_candidate_is_a_point_of_the_trainings_curves() -> None:
    store = agl.InMemoryLightningStore()

    apo = optimised(store=store)

    async def points() -> list[Any]:
        (run,) = [one for one in await store.query_runs() if one.name != "apo"]
        return [point for point in await store.query_metrics(run.run_id) if "apo/candidate" in point.values]

    seed, *tried = asyncio.run(points())
    assert (seed.step, seed.values["apo/candidate"], seed.values["apo/candidate_tasks"]) == (0, 0.0, 40.0)
    numbers = {int(one.version[1:]) for one in apo.candidates if one.fate not in ("seed", "rejected")}
    assert {(point.step, point.values["apo/candidate"]) for point in tried} == {(1, number) for number in numbers}
    assert tried[0].values["apo/candidate_parent"] == 0.0
    assert tried[0].values["apo/candidate_score"] == 1.0


@pytest.mark.slow
def test_the_pages_program_runs_as_pasted_at_the_default_sizes_within_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SERVER_PORT", "0")  # other tests use the default
    program = tmp_path / "paste.py"
    program.write_text(PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```\n")[0])

    done = warm_python.run([sys.executable, str(program)], timeout=110)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Answer: {{question}} {ADVICE}"
    assert "Candidate v1 (from v0)" in done.stderr
