"""New prompts from a model that reflects on examples: asked as gepa asks, checked before they cost a rollout.

A text that does not parse, drops a placeholder, or brings in new ones or code is rejected, with the reason, and the
model is asked once more. Answers are kept in the journal by the order of the questions.
"""

import asyncio
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentlightning.algorithm.apo.journal import Journal
from agentlightning.algorithm.apo.lineage import Candidate, Lineage
from agentlightning.algorithm.apo.optimiser import Optimiser, OptimiserFailed
from agentlightning.algorithm.apo.placeholders import placeholders_of, why_unfit
from agentlightning.algorithm.gepa.rollouts import PromptTexts, digest_of
from agentlightning.errors import ConfigurationError
from agentlightning.types import PromptTemplate

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["Asking", "Proposer", "ReflectionModel", "asking"]

logger = logging.getLogger(__name__)

ReflectionModel = Callable[[str], "str | None | Awaitable[str | None]"]
"""A model as a function, plain or async: the text that is asked in, the answer out."""
Asking = Callable[[str], Awaitable["str | None"]]
Examples = Mapping[str, Sequence[Mapping[str, Any]]]
ReflectionJob = tuple[dict[str, str], Examples, list[str]]
"""The prompts of a parent, examples for each prompt that is to change, and the names of these."""

ASKED_AT_MOST: Final = 2
"""How often the model is asked for a new text that can be used."""
FAILURES_IN_A_ROW: Final = 3
"""After so many questions without an answer the model is given up."""
_KEEP_PLACEHOLDERS: Final = """

The instructions are a template, whose placeholders are filled in for each task. Keep all of these, written exactly \
so, and add no others: {placeholders}"""
_KEEP_SYNTAX: Final = {
    "f-string": "\n\nAny other brace must be doubled.",
    "jinja": "\n\nAdd no expressions and no statements.",
    "poml": "\n\nKeep the template valid POML, and add no expressions.",
}


def asking(
    model: "AsyncOpenAI | ReflectionModel | None", optimiser: Optimiser, model_name: str, temperature: float
) -> Asking:
    """How a model is asked: over its endpoint, or by a call of a function."""
    if model is None or hasattr(model, "chat"):
        return lambda text: optimiser.ask(model_name, [{"role": "user", "content": text}], temperature)
    if not callable(model):
        raise ConfigurationError(
            f"A reflecting model is a client or a function; this is of type {type(model).__name__}."
        )
    function: ReflectionModel = model

    async def ask(text: str) -> str | None:
        hold = await optimiser.ledger.take_call(model_name)
        try:
            answer = await asyncio.to_thread(function, text)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:  # the user's code; it is recorded, and raised if it goes on
            raise OptimiserFailed(f"The reflecting model failed: {type(error).__name__}: {error}") from error
        finally:
            optimiser.ledger.end_call(hold, None)

    return ask


@dataclass
class Proposer:
    """Proposes candidates, and writes each of them down."""

    ask: Asking
    seeds: Mapping[str, PromptTemplate]
    lineage: Lineage
    journal: Journal
    render: Callable[[str, Sequence[Mapping[str, Any]], str], Any]
    """Makes the question of a prompt, examples, and what is to be said beside them."""
    extract: Callable[[str], str]
    """Finds the new prompt in an answer."""
    counts: Counter[str] = field(default_factory=Counter)
    round: int = 0
    version_of: dict[str, str] = field(default_factory=dict)
    """Of the candidates that can be run, by digest."""
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _failures: int = 0

    async def propose(self, jobs: Sequence[ReflectionJob]) -> list[dict[str, str]]:
        """New texts for each job by name, none where there are none. OptimiserFailed if the model is given up."""
        numbered = [(next(self._numbers), job) for job in jobs]
        works = [asyncio.ensure_future(self._answers(number, *job)) for number, job in numbered]
        try:
            answered = await asyncio.gather(*works)
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
        # Versions are given in the order of the jobs, not in that of the answers.
        return [self._admitted(job[0], answers) for (_, job), answers in zip(numbered, answered, strict=True)]

    async def _answers(
        self, number: int, parent: PromptTexts, examples: Examples, names: Sequence[str]
    ) -> dict[str, list[str]]:
        """The texts that the model wrote for each name; the last one can be used, or none can."""
        written: dict[str, list[str]] = {}
        for name in names:
            step = f"reflection {number} {name}"
            kept = self.journal.get(step)
            if kept is None:
                kept = await self._asked(parent[name], name, examples.get(name, ()))
                self.journal.put(step, kept)
            written[name] = list(kept)
        return written

    async def _asked(self, text: str, name: str, examples: Sequence[Mapping[str, Any]]) -> list[str]:
        question = self.render(text, examples, _beside(self.seeds[name]))
        written: list[str] = []
        while len(written) < ASKED_AT_MOST and (not written or self._why_unfit(name, written[-1], text) is not None):
            try:
                answer = await self.ask(question)
            except OptimiserFailed as failed:
                self.counts["calls that failed"] += 1
                self._failures += 1
                logger.warning("No new prompt '%s': %s", name, failed)
                if self._failures >= FAILURES_IN_A_ROW:
                    raise
                break
            self._failures = 0
            written.append(self.extract(answer or ""))
        return written

    def _why_unfit(self, name: str, text: str, parent_text: str) -> str | None:
        if text == parent_text:
            return "it changes nothing"
        seed = self.seeds[name]
        return why_unfit(seed.model_copy(update={"template": text}), seed)

    def _admitted(self, parent: PromptTexts, answers: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """The texts that can be used; all are noted in the lineage."""
        admitted: dict[str, str] = {}
        for name, texts in answers.items():
            for text in texts:
                digest = digest_of({**parent, **admitted, name: text})
                reason = self._why_unfit(name, text, parent[name]) or self._why_known(digest)
                if reason is None:
                    admitted[name] = text
                    if digest not in self.version_of:
                        self.version_of[digest] = self._noted(parent, name, text).version
                    break
                candidate = self._noted(parent, name, text)
                candidate.fate, candidate.reason = "rejected", reason
                self.counts["candidates that were rejected"] += 1
                logger.info("Candidate %s (from %s) is rejected: %s.", candidate.version, candidate.parent, reason)
        return admitted

    def _why_known(self, digest: str) -> str | None:
        """A candidate of the pool is not needed twice; one that a minibatch turned down may try another minibatch."""
        version = self.version_of.get(digest)
        return None if version is None or self.lineage[version].fate == "dropped" else f"it is the same as {version}"

    def _noted(self, parent: PromptTexts, name: str, text: str) -> Candidate:
        version = f"v{len(self.lineage)}"
        parent_version = self.version_of[digest_of(parent)]
        candidate = Candidate(version, name, text, parent=parent_version, round=self.round)
        self.lineage.add(candidate)
        return candidate


def _beside(seed: PromptTemplate) -> str:
    """What the model is told about the template."""
    names = sorted(placeholders_of(seed))
    if not names:
        return _KEEP_SYNTAX[seed.engine]
    written = [f"{{{name}}}" if seed.engine == "f-string" else f"{{{{ {name} }}}}" for name in names]
    return _KEEP_PLACEHOLDERS.format(placeholders=", ".join(written)) + _KEEP_SYNTAX[seed.engine]
