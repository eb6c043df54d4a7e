"""`Trainer.dev` runs the agent here, whatever the trainer was built for, and prints what came out."""

import asyncio
import os
import socket
import threading
from typing import Any

import pytest

import agentlightning as agl

HELLO = agl.PromptTemplate(template="Hello {name}", engine="f-string")


def place() -> tuple[int, bool]:
    return os.getpid(), threading.current_thread() is threading.main_thread()


HERE = (os.getpid(), True)


# ---------------------------------------------------------------------- where it runs


def test_dev_runs_a_coroutine_in_the_caller_s_thread() -> None:
    seen: list[Any] = []

    @agl.rollout
    async def agent(task: int) -> float:
        seen.append(place())
        return 1.0

    agl.Trainer(n_runners=4, progress="off").dev(agent, [1, 2])

    assert seen == [HERE, HERE]


def test_dev_ignores_the_role_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", "algorithm")
    seen: list[Any] = []

    agl.Trainer(progress="off").dev(lambda task: seen.append(place()), [1])

    assert seen == [HERE]


def test_dev_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    listening: list[socket.socket] = []
    listen = socket.socket.listen
    monkeypatch.setattr(socket.socket, "listen", lambda one, *args: (listening.append(one), listen(one, *args)))

    agl.Trainer(progress="off").dev(lambda task: 1.0, [1])

    assert listening == []


# ---------------------------------------------------------------------- with which resources


def test_dev_with_an_algorithm_of_one_s_own_sends_the_tasks_with_the_initial_resources() -> None:
    seen: list[str] = []

    @agl.algo
    async def learning(*, store: agl.LightningStore, train_dataset: list[str]) -> None:
        raise AssertionError("it is not run")

    @agl.rollout
    def agent(task: str, prompt_template: agl.PromptTemplate) -> float:
        seen.append(prompt_template.format(name=task))
        return 1.0

    agl.Trainer(algorithm=learning, initial_resources={"hello": HELLO}, progress="off").dev(agent, ["Ada", "Alan"])

    assert seen == ["Hello Ada", "Hello Alan"]


def test_dev_with_apo_runs_the_seed_prompt() -> None:
    seen: list[str] = []

    @agl.rollout
    def agent(task: str, prompt_template: agl.PromptTemplate) -> float:
        seen.append(prompt_template.template)
        return 1.0

    trainer = agl.Trainer(
        algorithm=agl.APO(object()),  # type: ignore[arg-type] # a client that nobody calls
        adapter=agl.TraceToMessages(),
        initial_resources={"prompt": HELLO},
        progress="off",
    )
    trainer.dev(agent, ["Ada"])

    assert seen == ["Hello {name}"]


@pytest.mark.slow
def test_dev_with_grpo_asks_the_model_before_training() -> None:
    pytest.importorskip("torch")
    openai = pytest.importorskip("openai")
    from agentlightning.algorithm.grpo import GRPO

    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)

    def solve(task: str) -> float:
        messages = [{"role": "user", "content": task}]
        answer = client.chat.completions.create(model="any", messages=messages, max_tokens=4)
        return float(answer.usage.completion_tokens > 0)

    trainer = agl.Trainer(algorithm=GRPO("tiny"), strategy={"type": "cs", "server_port": 0}, progress="off")
    trainer.dev(solve, ["What is 1 + 2?"])

    assert [rollout.status for rollout in asyncio.run(trainer.store.query_rollouts())] == ["succeeded"]


# ---------------------------------------------------------------------- what it prints


def half(task: float) -> float:
    if task == 3:
        raise KeyError("nmae")
    return task / 4


def test_dev_prints_a_row_for_each_task_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    agl.Trainer().dev(half, [1.0, 2.0, 3.0, 4.0])

    head, *rows, total = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert head.split() == ["task", "output", "reward", "time", "error"]
    assert [row.split()[:3] for row in rows] == [
        ["1.0", "-", "0.25"],
        ["2.0", "-", "0.5"],
        ["3.0", "-", "-"],
        ["4.0", "-", "1"],
    ]
    assert rows[2].rstrip().endswith("KeyError: 'nmae'")
    assert total == "4 rollouts, mean reward 0.58 of 3, 1 failed"


def test_dev_says_how_to_give_a_reward_if_no_rollout_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    agl.Trainer().dev(lambda task: None, [1])

    *_, total, hint = capsys.readouterr().out.splitlines()
    assert total == "1 rollout, no reward, 0 failed"
    assert hint.startswith("To give a reward, return a number from the agent")


def test_dev_shows_the_traceback_of_a_failure_once(capfd: pytest.CaptureFixture[str]) -> None:
    agl.Trainer().dev(half, [3.0, 4.0, 3.0])

    shown = "".join(capfd.readouterr())
    assert shown.count("Traceback (most recent call last)") == 1
    assert shown.count(", in half") == 1


def test_dev_cuts_cells_to_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    agl.Trainer().dev(lambda task: 1.0, ["a long task " * 20, "\x1b[2Jevil\n" * 9])

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 60
    assert len(shown.splitlines()) == 4


@pytest.mark.parametrize("progress", ["off", None])
def test_dev_is_silent_where_progress_is_off(progress: Any, capfd: pytest.CaptureFixture[str]) -> None:
    agl.Trainer(progress=progress).dev(lambda task: 1.0, [1])

    assert "".join(capfd.readouterr()) == ""
