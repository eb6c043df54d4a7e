"""A small world for APO and GEPA: agents rewarded for the words of the prompt, and models that add words."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.apo.apo import APO
from agentlightning.algorithm.gepa import GEPA
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.types import PromptTemplate, Span

SEED = PromptTemplate(template="Answer {question}.", engine="f-string")
WORDS = ("please", "exactly", "briefly", "kindly")
"""What makes the agents better, each by a quarter."""
_FIRST_FENCED = re.compile(r"```\n(.*?)\n```", re.DOTALL)
Judge = Callable[[dict[str, str], Any], float | None]
"""The reward of a task with these prompts; None leaves the rollout unfinished."""
Usage = Callable[[Any], dict[str, Any]]
"""What the model call of an agent says of its tokens, by the task."""


def share_of_words(prompts: dict[str, str], task: Any) -> float:
    """Right on as many of four tasks as words are said."""
    said = sum(word in " ".join(prompts.values()) for word in WORDS)
    return float(task % len(WORDS) < said)


class Optimiser:
    """Answers as OpenAI's client does: critiques name a word that is missing, edits add it to the prompt."""

    def __init__(self, *, edit: Callable[[str, str], str | None] | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.running = 0
        self.most_running = 0
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._edit = edit or (lambda prompt, word: f"{prompt} Do it {word}.")

    async def _create(self, **asked: Any) -> Any:
        self.calls.append(asked)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            content = self.answer(json.loads(asked["messages"][0]["content"]))
        finally:
            self.running -= 1
        usage = SimpleNamespace(prompt_tokens=100, completion_tokens=10)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=content))], usage=usage)

    def answer(self, context: dict[str, Any]) -> str | None:
        prompt = context["prompt_template"]
        if "critique" in context:
            return self._edit(prompt, context["critique"])
        return next((word for word in WORDS if word not in prompt), WORDS[0])


def rendered(template: Any, *, context: Any, format: str) -> dict[str, Any]:
    """What stands in for poml: the context itself as the only message."""
    shown = {**context, "experiments": len(context.get("experiments", ()))}
    return {"messages": [{"role": "user", "content": json.dumps(shown)}]}


@asynccontextmanager
async def agents(
    store: LightningStore, judge: Judge = share_of_words, count: int = 4, usage: Usage | None = None
) -> AsyncIterator[list[str]]:
    """Workers that run every rollout of a store; yields the ids of those they ran."""
    done: list[str] = []

    async def work(worker_id: str) -> None:
        while True:
            claimed = await store.dequeue_rollout(worker_id, wait=5.0)
            if claimed is None:
                continue
            done.append(claimed.rollout_id)
            update = await store.get_resources_by_id(claimed.resources_id or "")
            assert update is not None
            prompts = {name: one.template for name, one in update.resources.items() if isinstance(one, PromptTemplate)}
            ids: dict[str, Any] = {
                "rollout_id": claimed.rollout_id,
                "attempt_id": claimed.attempt.attempt_id,
                "sequence_id": 1,
            }
            try:
                reward = judge(prompts, claimed.input)
            except ValueError as error:
                told = {"error": {"type": "ValueError", "message": str(error), "traceback": f"Traceback: {error}"}}
                await store.update_attempt(
                    claimed.rollout_id, claimed.attempt.attempt_id, status="failed", metadata=told
                )
                continue
            if reward is None:
                continue
            if usage is not None:
                call = {**ids, "sequence_id": 2}
                await store.add_span(Span.from_attributes(attributes=usage(claimed.input), name="model call", **call))
            span = Span.from_attributes(attributes={"reward": reward}, name="agentlightning.reward", **ids)
            await store.add_span(span)
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")

    workers = [asyncio.create_task(work(f"agent-{number}")) for number in range(count)]
    try:
        yield done
    finally:
        # A worker that is woken at the same moment may not notice that it is cancelled, on Python before 3.12.
        while any(not worker.done() for worker in workers):
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers, timeout=0.05)
        for worker in workers:
            if not worker.cancelled():
                worker.result()


def apo_in(
    store: LightningStore, client: Any, *, prompts: dict[str, PromptTemplate] | None = None, **options: Any
) -> Any:
    """An APO with what a trainer would give it, and small settings."""
    small = {"gradient_batch_size": 2, "val_batch_size": 8, "beam_width": 2, "branch_factor": 2, "beam_rounds": 4}
    made: APO[int] = APO(client, **{**small, **options})
    made.set_store(store)
    made.set_adapter(TraceToMessages())
    made.set_initial_resources({"prompt": SEED} if prompts is None else dict(prompts))
    return made


async def optimised(client: Any, *, judge: Judge = share_of_words, tasks: int = 80, **options: Any) -> Any:
    """A run from its begin to its end, over a store of its own; the tasks are numbers."""
    store = options.pop("store", None) or InMemoryLightningStore()
    random.seed(options.pop("seed", 1))
    usage = options.pop("usage", None)
    apo = apo_in(store, client, seed=options.pop("search_seed", None), **options)
    async with agents(store, judge, usage=usage):
        await apo.run(list(range(40)), list(range(tasks)))
    return apo


# ---------------------------------------------------------------------- GEPA


class Writer:
    """Adds the first word that is missing; remembers what it was asked."""

    def __init__(self, edit: Callable[[str, str], str] | None = None) -> None:
        self.asked: list[str] = []
        self._edit = edit or (lambda prompt, word: f"{prompt} Do it {word}.")

    def __call__(self, question: str) -> str:
        self.asked.append(question)
        found = _FIRST_FENCED.search(question)
        assert found is not None
        word = next((word for word in WORDS if word not in found[1]), WORDS[0])
        return f"Here it is:\n```\n{self._edit(found[1], word)}\n```"


def gepa_in(
    store: LightningStore, model: Any, *, prompts: dict[str, PromptTemplate] | None = None, **options: Any
) -> GEPA:
    """A GEPA with what a trainer would give it."""
    made = GEPA(model, **options)
    made.set_store(store)
    made.set_initial_resources({"prompt": SEED} if prompts is None else dict(prompts))
    return made


async def evolved(
    model: Any, *, judge: Judge = share_of_words, n_train: int = 40, n_val: int = 60, **options: Any
) -> GEPA:
    """A run from its begin to its end, over a store of its own; the tasks are numbers."""
    store, usage = options.pop("store", None) or InMemoryLightningStore(), options.pop("usage", None)
    gepa = gepa_in(store, model, **options)
    async with agents(store, judge, usage=usage):
        await gepa.run(list(range(n_train)), list(range(n_val)))
    return gepa
