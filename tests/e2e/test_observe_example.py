"""The example of an agent that is watched, run as a user runs it; then its store is opened and looked into."""

import re
import sys
from pathlib import Path

import pytest

from agentlightning.adapter import TraceToMessages, TraceToTrajectory
from agentlightning.store import SqliteLightningStore
from tests import warm_python

FOLDER = Path(__file__).parents[2] / "examples" / "observe_openai"


def run_example(*arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(FOLDER / "observe.py"), *arguments]
    done = warm_python.run(command, check=True, timeout=60)
    assert "Exception ignored" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The store the example left behind, and what it printed."""
    path = tmp_path_factory.mktemp("observe") / "shop.db"
    return path, run_example("--store", str(path))


def test_it_prints_what_its_description_promises(watched: tuple[Path, str]) -> None:
    (promised,) = re.findall(r"```text\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert watched[1] == promised


async def test_every_attempt_is_one_sequence_with_its_reward(watched: tuple[Path, str]) -> None:
    async with SqliteLightningStore(watched[0]) as store:
        rollouts = await store.query_rollouts(sort_by="start_time")
        trajectories = [
            TraceToTrajectory().adapt(list(await store.query_spans(rollout.rollout_id))) for rollout in rollouts
        ]

    assert [len(trajectory.sequences) for trajectory in trajectories] == [1, 1, 1]
    assert [trajectory.final_reward for trajectory in trajectories] == [1.0, 1.0, 0.0]


async def test_the_conversations_are_as_the_agent_had_them(watched: tuple[Path, str]) -> None:
    async with SqliteLightningStore(watched[0]) as store:
        first = (await store.query_rollouts(sort_by="start_time"))[0]
        conversations = TraceToMessages().adapt(list(await store.query_spans(first.rollout_id)))

    asked, answered = conversations
    assert [call["function"]["name"] for call in asked["messages"][-1]["tool_calls"]] == ["price", "price"]
    assert [message["role"] for message in answered["messages"]][-3:] == ["tool", "tool", "assistant"]
    assert answered["messages"][-1]["content"] == "It costs 12."


def test_the_agent_does_not_know_that_it_is_watched() -> None:
    assert "import agentlightning" not in (FOLDER / "shop_agent.py").read_text(encoding="utf-8")
