"""Real runs of algorithms that train no weights: their verdicts, as `fit` writes them and `agl why` reads them."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.algorithm.apo.apo import APO
from agentlightning.cli.why import judged
from agentlightning.errors import AgentLightningError
from tests.algorithm.prompts.conftest import quick_poml as quick_poml
from tests.algorithm.prompts.world import SEED, WORDS, Optimiser

pytestmark = pytest.mark.usefixtures("quick_poml")
SETTINGS: dict[str, Any] = {"gradient_batch_size": 2, "val_batch_size": 4, "beam_width": 1, "branch_factor": 1}


class Words(agl.LitAgent[int]):
    """Right on as many of four tasks as the prompt has words; an unknown task is an error."""

    def rollout(self, task: int, resources: Any, rollout: Any) -> float:
        said = sum(word in resources["prompt"].template for word in WORDS)
        return float({number: number % len(WORDS) for number in range(40)}[task] < said)


class Dead:
    """An optimiser whose server is down."""

    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **request: Any) -> Any:
        raise openai.APIConnectionError(request=SimpleNamespace())  # type: ignore[arg-type] # it is only named


def why(algorithm: Any, tasks: list[int], *, dev: bool = False) -> tuple[str, list[str], Any]:
    """The sentence and the findings of `agl why`, and the verdict in the summary of the trainer's run."""
    store = agl.InMemoryLightningStore()
    resources = {"prompt": SEED}
    trainer = agl.Trainer(
        algorithm=algorithm, store=store, strategy="shm", initial_resources=resources, progress="off", name="fit"
    )
    with contextlib.suppress(AgentLightningError):  # the verdict says why
        trainer.dev(Words(), tasks) if dev else trainer.fit(Words(), tasks, tasks)
    found, _ = asyncio.run(judged(store, None))
    (run,) = asyncio.run(store.query_runs(name="fit"))
    return found["sentence"], [one["name"] for one in found["findings"]], run.summary.get("verdict")


@pytest.mark.parametrize(
    ("algorithm", "tasks", "said", "findings"),
    [
        (lambda: APO(Optimiser(), beam_rounds=4, **SETTINGS), 40, "Gained +", []),
        (
            lambda: APO(Optimiser(edit=lambda prompt, _: f"{prompt} Now."), beam_rounds=1, **SETTINGS),
            20,
            "The seed is",
            None,
        ),
        (
            lambda: APO(Optimiser(edit=lambda *_: "Nothing."), beam_rounds=1, **SETTINGS),
            20,
            "rejected, the first bec",
            None,
        ),
        (
            lambda: APO(Dead(), beam_rounds=1, **SETTINGS),
            20,
            "The run failed: TrainingError: Round 1 made no candida",
            None,
        ),
        (lambda: APO(Optimiser(), beam_rounds=1, **SETTINGS), [77, 78], "rollouts failed", ["failed"]),
    ],
    ids=["gained", "seed kept", "rejected", "dead optimiser", "agent fails"],
)
def test_apo_says_how_the_best_candidate_did(algorithm: Any, tasks: Any, said: str, findings: list[str] | None) -> None:
    sentence, names, written = why(algorithm(), tasks if isinstance(tasks, list) else list(range(tasks)))
    assert said in sentence
    assert written["sentence"] == sentence
    assert "ids_missing" not in names
    assert findings is None or names == findings


@pytest.mark.parametrize(
    ("tasks", "said", "findings"),
    [
        ([0, 1, 2, 3], "The reward is 0.000 [0.000, 0.490] (n=4).", []),
        ([77, 78], "2 of 2 rollouts failed with KeyError: 7", ["failed"]),
    ],
    ids=["healthy", "fails"],
)
def test_a_trial_says_the_reward_or_the_error(tasks: list[int], said: str, findings: list[str]) -> None:
    sentence, names, _ = why(None, tasks, dev=True)
    assert (said in sentence, names) == (True, findings), sentence
