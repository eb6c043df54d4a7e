"""A small world for GEPA: the agents of APO's, and a reflecting model as a function that adds a word to the prompt."""

import re
from collections.abc import Callable
from typing import Any

from agentlightning.algorithm.gepa import GEPA
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.types import PromptTemplate
from tests.algorithm.apo.world import SEED, WORDS, Judge, agents, share_of_words

_FIRST_FENCED = re.compile(r"```\n(.*?)\n```", re.DOTALL)


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
