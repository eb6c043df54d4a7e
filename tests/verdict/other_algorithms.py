"""Real runs of algorithms that compare no groups: SFT, APO, GEPA, `Trainer.dev`, `agl eval`, and plain functions.

Agents call the tiny model, a simulated one, or none; optimisers of prompts are simulated, dead, or talk nonsense.
"""

import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import openai

import agentlightning as agl
from agentlightning.algorithm.apo import apo as apo_module
from agentlightning.algorithm.apo.apo import APO
from agentlightning.algorithm.gepa import GEPA
from agentlightning.algorithm.grpo import LearnerSettings
from agentlightning.algorithm.sft import SFT, Acceptance, FittingSettings
from agentlightning.cli import main as command_line
from agentlightning.cli.why import judged
from agentlightning.errors import AgentLightningError
from tests.algorithm.prompts.climbing import climb, evolve
from tests.algorithm.prompts.world import SEED, WORDS, Optimiser, Writer, rendered
from tests.simulated_model.server import MODEL, SimulatedModel
from tests.verdict.real_run import RealRun
from tests.verdict.seeded import interrupted

BEAM: Final[Mapping[str, Any]] = {
    "gradient_batch_size": 2,
    "val_batch_size": 4,
    "beam_width": 1,
    "branch_factor": 1,
    "beam_rounds": 4,
    "seed": 1,  # without one, each round draws in three cases of ten tasks that no candidate solves
}
EXPRESSIONS: Final = [f"{first}+{second}?" for first in range(11, 19) for second in range(21, 29)]


@dataclass(frozen=True)
class Made(RealRun):
    """A run that a function makes; it returns the store."""

    finding: str | None
    make: Callable[[], agl.LightningStore]

    def judged(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
            found, _ = asyncio.run(judged(self.make(), None))
        return found


def fitted(
    algorithm: Any,
    agent: Any,
    train: Any,
    val: Any = None,
    *,
    dev: bool = False,
    store: agl.LightningStore | None = None,
    stop_after: int | None = None,
    **options: Any,
) -> agl.LightningStore:
    """The store after a `fit` or a `dev`, with everything in this process; the verdict says why one failed.

    Args:
        stop_after: Rollouts after which somebody stops the run.
    """
    store = agl.InMemoryLightningStore() if store is None else store
    strategy = agl.SharedMemoryExecutionStrategy(n_runners=4, main_thread="algorithm")
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy=strategy, progress="off", **options)
    if stop_after is not None:
        agent.rollout = interrupted(agent.rollout, stop_after, trainer.stop)
    with contextlib.suppress(AgentLightningError, openai.OpenAIError):
        trainer.dev(agent, train) if dev else trainer.fit(agent, train, val)
    return store


# ---------------------------------------------------------------------- SFT


class Asking(agl.LitAgent[str]):
    """Asks the tiny model; the shorter its answer, the better."""

    def rollout(self, task: str, resources: Any, rollout: Any) -> float:
        if not task:
            raise ValueError("there is no question")
        llm = resources["main_llm"].with_attempted_rollout(rollout)
        messages: Any = [{"role": "user", "content": task}]
        with openai.OpenAI(api_key=llm.api_key or "x", base_url=llm.endpoint, max_retries=0) as client:
            reply = client.chat.completions.create(model=llm.model, messages=messages, max_tokens=24)
        return 1 / (1 + len(reply.choices[0].message.content or ""))


def tuned(
    tasks: Any = EXPRESSIONS, val: Any = None, *, rate: float = 5e-4, stop_after: int | None = None, **options: Any
) -> agl.LightningStore:
    """The best of a few tries at each task, learned for a few epochs."""
    settings: dict[str, Any] = {"best_of": 4, "fitting": FittingSettings(epochs=6, batch_size=8)}
    algorithm = SFT("tiny", **{**settings, "learning": LearnerSettings(learning_rate=rate), **options})
    return fitted(algorithm, Asking(), tasks, val, stop_after=stop_after)


def tuned_without_ids() -> agl.LightningStore:
    """What another model has answered cannot be learned from: its tokens are not known."""
    with SimulatedModel() as model, openai.OpenAI(base_url=model.url, api_key="any") as client:

        @agl.rollout
        def agent(task: str) -> float:
            messages: Any = [{"role": "user", "content": task}]
            return float(bool(client.chat.completions.create(model=MODEL, messages=messages).choices))

        store = fitted(None, agent, EXPRESSIONS[:8], dev=True, tracer=agl.OtelTracer())
    return fitted(SFT("tiny"), agent, None, store=store)


def adapted() -> agl.LightningStore:
    """GRPO with adapters of low rank, on a small random Llama that learns to say a word."""
    from tests.algorithm.grpo.test_hf_loop import LORA, NOWHERE, trained
    from tests.engine.small_llama import save_small_llama, word_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="agl-verdicts-"))
    base = save_small_llama(folder / "llama", word_tokenizer(), initializer_range=0.1)
    with openai.OpenAI(api_key="none", base_url=NOWHERE, max_retries=0) as client:
        _, trainer = trained(base, folder, client, lora=LORA, learning=LearnerSettings(learning_rate=2e-2, threads=1))
    return trainer.store


# ---------------------------------------------------------------------- prompts


class Words(agl.LitAgent[int]):
    """Right on as many of four tasks as the prompt has words; an unknown task is an error."""

    def rollout(self, task: int, resources: Any, rollout: Any) -> float:
        said = sum(word in resources["prompt"].template for word in WORDS)
        return float({number: number % len(WORDS) for number in range(200)}[task] < said)


class Slow(Words):
    """Takes long enough to be stopped in time."""

    def rollout(self, task: int, resources: Any, rollout: Any) -> float:
        time.sleep(0.02)
        return super().rollout(task, resources, rollout)


class Content(Words):
    """The same reward for every prompt."""

    reward = 1.0

    def rollout(self, task: int, resources: Any, rollout: Any) -> float:
        return self.reward


class Indifferent(Content):
    reward = 0.5


class Dead:
    """An optimiser whose server is down."""

    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **request: Any) -> Any:
        raise openai.APIConnectionError(request=SimpleNamespace())  # type: ignore[arg-type] # it is only named


def searched(
    client: Any,
    agent: agl.LitAgent[int] | None = None,
    *,
    val: int = 60,
    offset: int = 0,
    state_file: Path | None = None,
    **options: Any,
) -> agl.LightningStore:
    """The prompt of the small world, searched by APO."""
    tasks, held_out = [number + offset for number in range(40)], [number + offset for number in range(val)]
    options["initial_resources"] = {"prompt": SEED}
    with patch.object(apo_module.poml, "poml", rendered):
        return fitted(APO(client, **BEAM, state_file=state_file), agent or Words(), tasks, held_out, **options)


def resumed() -> agl.LightningStore:
    """APO that is stopped, and then goes on in the same store."""
    state = Path(tempfile.mkdtemp(prefix="agl-verdicts-"), "state")
    store = searched(Optimiser(), Slow(), state_file=state, stop_after=150)
    return searched(Optimiser(), state_file=state, store=store)


def evolved(
    model: Any, agent: agl.LitAgent[int] | None = None, *, val: int = 60, offset: int = 0, **options: Any
) -> agl.LightningStore:
    """The prompt of the small world, evolved by GEPA."""
    tasks, held_out = [number + offset for number in range(40)], [number + offset for number in range(val)]
    options["initial_resources"] = {"prompt": SEED}
    return fitted(GEPA(model, iterations=4), agent or Words(), tasks, held_out, **options)


def dead_model(question: str) -> str:
    raise ConnectionError("nobody answers at http://127.0.0.1:9/v1")


def nonsense(*_: str) -> str:
    return "Bananas ripen faster next to apples."


# ---------------------------------------------------------------------- trials


def sum_is_right(task: dict[str, int]) -> float:
    return float(task["left"] + task["right"] > 5)


async def never_done(task: dict[str, int]) -> float:
    """Works until it is cancelled, so that nothing is over before an algorithm that does not wait."""
    await asyncio.Event().wait()
    return 0.0


SUMS: Final = [{"left": number, "right": 1} for number in range(12)]
BROKEN: Final = [{"left": number} for number in range(12)]


def evaluated(tasks: list[dict[str, int]]) -> agl.LightningStore:
    """The store that `agl eval` leaves; the model is simulated."""
    folder = tempfile.mkdtemp(prefix="agl-verdicts-")
    data, kept = Path(folder, "tasks.jsonl"), Path(folder, "kept.db")
    data.write_text("\n".join(map(json.dumps, tasks)), encoding="utf-8")
    module = types.ModuleType("agent_of_verdicts")
    module.solve = sum_is_right  # type: ignore[attr-defined] # a module made here
    given = ["--model", MODEL, "--agent", "agent_of_verdicts:solve", "--data", str(data), "--store", str(kept)]
    with (
        SimulatedModel() as model,
        patch.dict(os.environ, {"OPENAI_API_KEY": "any"}),
        patch.dict(sys.modules, {module.__name__: module}),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        command_line(["eval", model.url, *given])
    return agl.SqliteLightningStore(str(kept))


# ---------------------------------------------------------------------- plain functions


@agl.algo
async def send_and_wait(*, store: Any, train_dataset: Any) -> None:
    """Sends every task, and waits for it."""
    sent = [(await store.enqueue_rollout(task)).rollout_id for task in train_dataset]
    await store.wait_for_rollouts(rollout_ids=sent, timeout=60)


@agl.algo
async def send(*, store: Any, train_dataset: Any) -> None:
    """Sends every task, and forgets to wait."""
    for task in train_dataset:
        await store.enqueue_rollout(task)


@agl.algo
async def nothing(*, store: Any, train_dataset: Any) -> None:
    """Forgets to send."""


FAULTS: Final[Mapping[str, Made]] = {
    "SFT, calls without token ids": Made(
        None, tuned_without_ids, outcomes=("unknown", "no gain"), words=("token ids",)
    ),
    "SFT, nothing accepted": Made(
        None,
        lambda: tuned(acceptance=Acceptance(min_reward=2.0)),
        outcomes=("unknown", "no gain"),
        words=("low_reward",),
    ),
    "SFT, steps too large": Made("learning_rate_too_high", lambda: tuned(rate=0.3)),
    "SFT, a rate of zero": Made("learning_rate_too_low", lambda: tuned(rate=0.0)),
    "SFT, an agent that raises": Made("failed", lambda: tuned([""] * 8), words=("there is no question",)),
    "APO, an optimiser that is down": Made(
        None, lambda: searched(Dead()), outcomes=("unknown", "no gain"), words=("The run failed", "APIConnectionError")
    ),
    "APO, an optimiser that talks nonsense": Made(
        None, lambda: searched(Optimiser(edit=nonsense)), outcomes=("no gain",), words=("were rejected",)
    ),
    "APO, too few validation tasks": Made(
        None, lambda: searched(Optimiser(), val=4), outcomes=("no gain",), words=("validation tasks would decide it",)
    ),
    "APO, an agent that raises": Made(
        "failed", lambda: searched(Optimiser(), offset=1000), words=("KeyError: 10",), unsaid=("Traceback",)
    ),
    "APO, a seed that is always right": Made("all_right", lambda: searched(Optimiser(), Content())),
    "APO, a reward for anything": Made("constant_reward", lambda: searched(Optimiser(), Indifferent())),
    "GEPA, an optimiser that is down": Made(
        None, lambda: evolved(dead_model), outcomes=("unknown", "no gain"), words=("nobody answers",)
    ),
    "GEPA, an optimiser that talks nonsense": Made(
        None, lambda: evolved(Writer(edit=nonsense)), outcomes=("no gain",), words=("were rejected",)
    ),
    "GEPA, too few validation tasks": Made(
        None, lambda: evolved(Writer(), val=6), outcomes=("unknown",), words=("3 validation tasks are left to compare",)
    ),
    "GEPA, an agent that raises": Made(
        "failed", lambda: evolved(Writer(), offset=1000), words=("KeyError: 10",), unsaid=("Traceback",)
    ),
    "dev, all tasks raise": Made(
        "failed", lambda: fitted(None, sum_is_right, BROKEN, dev=True), words=("12 of 12", "KeyError: 'right'")
    ),
    "dev, one of four tasks raises": Made(
        "failed", lambda: fitted(None, sum_is_right, [*SUMS[:3], BROKEN[0]], dev=True), words=("1 of 4", "KeyError")
    ),
    "agl eval, all tasks raise": Made(
        "failed", lambda: evaluated(BROKEN), words=("None of 12 rollouts", "KeyError: 'right'")
    ),
    "agl eval, one of four tasks raises": Made(
        "failed", lambda: evaluated([*SUMS[:3], BROKEN[0]]), words=("1 of 4", "KeyError: 'right'")
    ),
    "a function that sends nothing": Made("nothing_ran", lambda: fitted(nothing, sum_is_right, SUMS)),
    "a function that does not wait": Made("nothing_ran", lambda: fitted(send, never_done, SUMS)),
    "a function whose agent raises": Made(
        "failed", lambda: fitted(send_and_wait, sum_is_right, BROKEN), words=("KeyError: 'right'",)
    ),
}
HEALTHY: Final[Mapping[str, Made]] = {
    "SFT, validated": Made(None, lambda: tuned(val=EXPRESSIONS, rate=1e-3, best_of=8)),
    "SFT, not validated": Made(
        None,
        lambda: tuned(rate=1e-3, best_of=8),
        outcomes=("unknown",),
        words=("loss on held-out rollouts fell",),
    ),
    "SFT, stopped": Made(None, lambda: tuned(stop_after=40), outcomes=("unknown",), words=("The reward is",)),
    "GRPO with LoRA": Made(None, adapted),
    "APO, stopped": Made(
        None,
        lambda: searched(Optimiser(), Slow(), stop_after=150),
        outcomes=("gained", "unknown", "no gain"),
    ),
    "APO, stopped and resumed": Made(None, resumed),
    "APO, stopped at once": Made(
        None, lambda: searched(Optimiser(), Slow(), stop_after=10), outcomes=("unknown",), words=("of 0 candidates",)
    ),
    "GEPA, stopped": Made(
        None,
        lambda: evolved(Writer(), Slow(), stop_after=60),
        outcomes=("gained", "unknown", "no gain"),
    ),
    "APO on the simulated model": Made(None, lambda: climb(1).store),
    "GEPA on the simulated model": Made(None, lambda: evolve(1).store),
    "APO in the small world": Made(None, lambda: searched(Optimiser())),
    "GEPA in the small world": Made(None, lambda: evolved(Writer())),
    "dev": Made(
        None,
        lambda: fitted(None, sum_is_right, SUMS, dev=True),
        outcomes=("unknown",),
        words=("The reward is 0.583",),
    ),
    "agl eval": Made(None, lambda: evaluated(SUMS), outcomes=("unknown",), words=("The reward is 0.583",)),
    "a function that sends and waits": Made(
        None,
        lambda: fitted(send_and_wait, sum_is_right, SUMS),
        outcomes=("unknown",),
        words=("The reward is 0.583",),
    ),
}
