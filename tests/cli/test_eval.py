"""`agl eval`: a mean with its interval, of a model of ours, an endpoint, or a prompt."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli import main
from tests.e2e.server_process import left_behind
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running

AGENT = '''
"""An agent for these tests: right where the model repeats the task."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0)


def solve(task):
    if task == "broken":
        raise ConnectionError("the tool is down")
    return ask(task, task)


def prompted(task, prompt_template):
    return ask(prompt_template.format(task=task), task)


def ask(question, task):
    reply = client.chat.completions.create(model="any", messages=[{"role": "user", "content": question}], max_tokens=8)
    return float(task in (reply.choices[0].message.content or ""))


def generous(task):
    return 5.0


def failing(task):
    raise ConnectionError("the tool is down")
'''


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "agent_of_eval.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    assert left_behind() == []


@pytest.fixture
def model() -> Iterator[StubModel]:
    with running(
        Script(lambda request: request.text if "seven" not in request.text else "no"), models=("m",)
    ) as served:
        yield served


def evaluated(capsys: pytest.CaptureFixture[str], tasks: list[Any], *options: str) -> Any:
    Path("tasks.jsonl").write_text("\n\n".join(json.dumps(task) for task in tasks))
    code = main(["eval", *options, "--data", "tasks.jsonl"])
    told = capsys.readouterr()
    if "--json" not in options:
        return code, told.out + told.err
    assert code == 0, told.err
    return json.loads(told.out)


def test_endpoint_is_scored_as_a_run_and_failures_count_as_the_worst(
    model: StubModel, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = ["one", "two", "seven", "four", "broken"]
    given = [model.url, "--model", "m", "--agent", "agent_of_eval:solve", "--json", "--store", "kept.db"]

    told = evaluated(capsys, tasks, *given, "--temperature", "0.5")

    assert (told["mean"], told["n"], told["failed"], told["failed_reward"]) == (0.6, 5, 1, 0.0)
    assert told["low"] < 0.6 < told["high"]
    assert told["errors"] == {"ConnectionError: the tool is down": 1}
    assert {request.body["temperature"] for request in model.requests} == {0.5}
    name, status, figures = asyncio.run(kept())
    assert (name, status) == ("eval", "succeeded")
    assert figures == {
        "validation/reward": 0.6,
        "validation/low": told["low"],
        "validation/high": told["high"],
        "validation/failed": 1.0,
    }


async def kept() -> Any:
    """The only run of the store, with its figures."""
    async with agl.SqliteLightningStore("kept.db") as store:
        (run,) = await store.query_runs()
        (point,) = await store.query_metrics(run.run_id)
        return run.name, run.status, point.values


@pytest.mark.parametrize(
    ("option", "code", "words"),
    [
        ("skip", 0, "reward 1.000, 95 % interval 0.207 to 1.000, n = 1\n1 failed and are left out, "),
        ("-1", 0, "reward 0.000, 95 % interval"),
        ("all of them", 1, "agl eval: None of 1 rollouts gave a reward; most often: ConnectionError: the tool is down"),
    ],
)
def test_it_can_be_said_what_failures_count_unless_there_is_nothing_else(
    model: StubModel, capsys: pytest.CaptureFixture[str], option: str, code: int, words: str
) -> None:
    given = [model.url, "--model", "m", "--agent", "agent_of_eval:solve"]
    given += [f"--failed={option}"] if code == 0 else []

    ended, told = evaluated(capsys, ["one", "broken"] if code == 0 else ["broken"], *given)

    assert (ended, "Traceback" in told) == (code, False)
    assert words in told


def test_prompt_is_scored_in_words(model: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    Path("prompt.txt").write_text("Please repeat: {task}")
    given = [model.url, "--model", "m", "--agent", "agent_of_eval:prompted", "--prompt", "prompt.txt", "--n", "2"]

    code, told = evaluated(capsys, ["one", "two", "three"], *given)

    assert code == 0
    assert "reward 1.000, 95 % interval" in told
    assert "n = 2" in told
    assert sorted(request.text for request in model.requests) == ["Please repeat: one", "Please repeat: two"]


def test_rewards_of_one_size_beyond_one_have_no_interval(model: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    given = [model.url, "--model", "m", "--agent", "agent_of_eval:generous"]

    code, told = evaluated(capsys, ["one", "two"], *given)

    assert code == 0
    assert "reward 5.000, no interval, because rewards are all the same, n = 2" in told


@pytest.mark.slow
def test_model_of_our_own_and_its_checkpoint_are_served_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the engine needs torch")
    from agentlightning.algorithm.grpo import Checkpoints
    from agentlightning.engine.checkpoint import load

    silent = {name: tensor * 0 for name, tensor in load("tiny")[0].state().items()}
    Checkpoints("run/tiny").save(1, model_state=silent, learner_state={}, progress={"model": "tiny"})

    told_of = {}
    for name in ("tiny", "run"):
        tasks = [f"say {number}" for number in (71, 38, 90)]
        told_of[name] = evaluated(capsys, tasks, name, "--agent", "agent_of_eval:solve", "--json")

    assert (told_of["tiny"]["n"], told_of["run"]["n"]) == (3, 3)
    assert told_of["run"]["mean"] == 0.0
