"""New prompts from a model that reflects on examples, which are checked before they cost a rollout.

An example is what a rollout shows: its task, its conversations, and what became of it.

A text that does not parse, drops a placeholder, or brings in new ones or code is rejected, with the reason, and the
model is asked once more. Answers are kept in the journal by the order of the questions.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.adapter import TraceToMessages
from agentlightning.adapter.messages import OpenAIMessages
from agentlightning.algorithm.prompts.evaluation import RunState
from agentlightning.algorithm.prompts.model import OptimiserFailed
from agentlightning.algorithm.prompts.results import Candidate
from agentlightning.algorithm.prompts.templates import placeholders_of, why_unfit
from agentlightning.algorithm.utils import gathered
from agentlightning.emitter import find_reward_spans, get_message_value, get_rewards_from_span
from agentlightning.semconv import AGL_EXCEPTION
from agentlightning.types import PromptTemplate, Span
from agentlightning.utils.json_values import JsonMapping

logger = logging.getLogger(__name__)

PromptTexts = Mapping[str, str]
"""The prompts of a candidate by the names of their resources."""
ReflectiveRecord = dict[str, str]
"""One example of a reflection prompt: texts by their headings."""
Examples = Mapping[str, Sequence[JsonMapping]]
ReflectionJob = tuple[dict[str, str], Examples, list[str]]
"""The prompts of a parent, examples for each prompt that is to change, and the names of these."""

MOST_CHARACTERS: Final = 12_000
"""Of one text; of a longer one the middle is left out."""
_KEEP_PLACEHOLDERS: Final = """

The instructions are a template, whose placeholders are filled in for each task. Keep all of these, written exactly \
so, and add no others: {placeholders}"""
_KEEP_SYNTAX: Final = {
    "f-string": "\n\nAny other brace must be doubled.",
    "jinja": "\n\nAdd no expressions and no statements.",
    "poml": "\n\nKeep the template valid POML, and add no expressions.",
}


def digest_of(texts: PromptTexts) -> str:
    """A short name for a set of prompts, the same for the same texts."""
    text = json.dumps(dict(texts), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Proposer:
    """Proposes candidates, and writes each of them down."""

    ask: Callable[[str], Awaitable[str | None]]
    seeds: Mapping[str, PromptTemplate]
    state: RunState
    render: Callable[[str, Sequence[JsonMapping], str], Any]
    """Makes the question of a prompt, examples, and what is to be said beside them."""
    extract: Callable[[str], str]
    """Finds the new prompt in an answer."""
    version_of: dict[str, str] = field(default_factory=dict)
    """Of the candidates that can be run, by digest."""
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _failures: int = 0

    async def propose(self, jobs: Sequence[ReflectionJob]) -> list[dict[str, str]]:
        """New texts for each job by name, none where there are none. OptimiserFailed if the model is given up."""
        numbered = [(next(self._numbers), job) for job in jobs]
        works = [self._answers(number, *job) for number, job in numbered]
        answered = await gathered(works, limit=len(works))
        # Versions are given in the order of the jobs, not in that of the answers.
        return [self._admitted(job[0], answers) for (_, job), answers in zip(numbered, answered, strict=True)]

    async def _answers(
        self, number: int, parent: PromptTexts, examples: Examples, names: Sequence[str]
    ) -> dict[str, list[str]]:
        """The texts that the model wrote for each name; the last one can be used, or none can."""
        written: dict[str, list[str]] = {}
        for name in names:
            step = f"reflection {number} {name}"
            kept = self.state.journal.get(step)
            if kept is None:
                kept = await self._written(parent[name], name, examples.get(name, ()))
                self.state.journal.put(step, kept)
            written[name] = list(kept)
        return written

    async def _written(self, text: str, name: str, examples: Sequence[JsonMapping]) -> list[str]:
        question = self.render(text, examples, _beside(self.seeds[name]))
        written: list[str] = []
        while len(written) < 2 and (not written or self._why_unfit(name, written[-1], text) is not None):
            try:
                answer = await self.ask(question)
            except OptimiserFailed as failed:
                self.state.counts["calls that failed"] += 1
                self._failures += 1
                logger.warning("No new prompt '%s': %s", name, failed)
                if self._failures >= 3:
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
                reason, known = self._why_unfit(name, text, parent[name]), self.version_of.get(digest)
                # A candidate of the pool is not needed twice; one that a minibatch turned down may try another.
                if reason is None and known is not None and self.state.lineage[known].fate != "dropped":
                    reason = f"it is the same as {known}"
                if reason is None:
                    admitted[name] = text
                    if digest not in self.version_of:
                        self.version_of[digest] = self._noted(parent, name, text).version
                    break
                candidate = self._noted(parent, name, text)
                candidate.fate, candidate.reason = "rejected", reason
                self.state.counts["candidates that were rejected"] += 1
                logger.info("Candidate %s (from %s) is rejected: %s.", candidate.version, candidate.parent, reason)
        return admitted

    def _noted(self, parent: PromptTexts, name: str, text: str) -> Candidate:
        version = f"v{len(self.state.lineage)}"
        parent_version = self.version_of[digest_of(parent)]
        candidate = Candidate(version, name, text, parent=parent_version, round=self.state.round)
        self.state.lineage.add(candidate)
        return candidate


def _beside(seed: PromptTemplate) -> str:
    """What the question says about the template."""
    names = sorted(placeholders_of(seed))
    if not names:
        return _KEEP_SYNTAX[seed.engine]
    written = [f"{{{name}}}" if seed.engine == "f-string" else f"{{{{ {name} }}}}" for name in names]
    return _KEEP_PLACEHOLDERS.format(placeholders=", ".join(written)) + _KEEP_SYNTAX[seed.engine]


# ---------------------------------------------------------------------- examples


def reflective_record(
    task: object, spans: Sequence[Span], *, reward: str, error: str | None, adapter: TraceToMessages
) -> ReflectiveRecord:
    """The example that a rollout makes.

    Args:
        reward: What to say of its reward.
        error: Why the rollout failed; None if it did not.
    """
    rewarded = find_reward_spans(spans)
    parts = get_rewards_from_span(rewarded[-1]) if rewarded else []
    further = [f"Reward for '{part.name}': {part.value:g}" for part in parts] if len(parts) > 1 else []
    notes = [reward, *further, *_remarks(spans)]
    try:
        conversations = "\n\n".join(_whole_conversations(adapter.adapt(list(spans))))
    except ValueError as unreadable:
        conversations = ""
        notes.append(f"The trace could not be read: {unreadable}")
    if error is not None:
        notes.append(f"The rollout failed; {error}")
    return {
        "Inputs": _shortened(_as_text(task)),
        "Generated Outputs": _shortened(conversations) or "(no model call was recorded)",
        "Feedback": _shortened("\n".join(notes)),
    }


def _remarks(spans: Sequence[Span]) -> list[str]:
    """What the agent, or whoever judged it, emitted as messages and exceptions."""
    remarks = []
    for span in spans:
        message = get_message_value(span)
        if message:
            remarks.append(message)
        if span.name == AGL_EXCEPTION:
            remarks.append(
                ": ".join(
                    str(span.attributes[key])
                    for key in ("exception.type", "exception.message")
                    if key in span.attributes
                )
            )
    return remarks


def _whole_conversations(calls: Sequence[OpenAIMessages]) -> Iterator[str]:
    """As texts, without those that a later call goes on with: its prompt holds them."""
    for number, call in enumerate(calls):
        said = call["messages"]
        prompt = list(said[:-1])
        later = (one["messages"] for one in calls[number + 1 :])
        if not any(len(one) > len(said) and list(one[: len(prompt)]) == prompt for one in later):
            yield "\n\n".join(f"[{message.get('role', 'unknown')}]\n{_content_of(message)}" for message in said)


def _content_of(message: JsonMapping) -> str:
    content = message.get("content")
    parts = [] if content is None else [_as_text(content)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(f"calls the tool {function.get('name')} with {function.get('arguments')}")
    return "\n".join(parts)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
