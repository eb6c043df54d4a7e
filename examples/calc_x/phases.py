"""How far the agent comes with a question, read off its conversation; in this order it learns.

calls the tool → with the right expression → passes the tool's result on → is right
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

PHASES: Final = ("calls_tool", "right_expression", "uses_result", "solved")


@dataclass(frozen=True)
class Outcome:
    """What became of one question."""

    question: str
    calls_tool: bool
    right_expression: bool
    uses_result: bool
    """Whether the answer is what the tool returned last."""
    solved: bool
    text: str
    """The conversation that followed the question, in one line."""

    @property
    def kind(self) -> str:
        if self.solved:
            return "solved"
        if not self.calls_tool:
            return "a guess"
        return "result not used" if self.right_expression else "a wrong call"


def outcomes(messages: Sequence[Mapping[str, Any]], task: Mapping[str, Sequence[str]]) -> list[Outcome]:
    """One for each question of a task; a conversation that broke off has nothing for the last ones."""
    starts = [place for place, message in enumerate(messages) if message["role"] == "user"]
    parts = [messages[start + 1 : end] for start, end in zip(starts, [*starts[1:], len(messages)], strict=True)]
    parts += [[]] * (len(task["questions"]) - len(parts))
    return [_outcome(*one) for one in zip(task["questions"], task["answers"], parts, strict=True)]


def shares(found: Sequence[Outcome]) -> dict[str, float]:
    """The share of questions that reached each phase; `uses_result` is the share of those with the right expression."""
    figures = {phase: sum(getattr(one, phase) for one in found) / max(1, len(found)) for phase in PHASES}
    right = [one for one in found if one.right_expression]
    return {**figures, "uses_result": sum(one.uses_result for one in right) / max(1, len(right))}


def _outcome(question: str, expected: str, messages: Sequence[Mapping[str, Any]]) -> Outcome:
    expressions, results, texts = [], [], []
    for message in messages:
        if message["role"] == "tool":
            results.append(str(message["content"]))
            texts.append(f"→ {results[-1]}")
            continue
        for call in message.get("tool_calls") or ():
            expressions.append(_expression(call["function"]["arguments"]))
            texts.append(f"calculator({expressions[-1]})")
        if message.get("content"):
            texts.append(f"says {message['content']}")
    last = messages[-1] if messages else {}
    answer = str(last.get("content") or "").strip() if last.get("role") == "assistant" else ""
    return Outcome(
        question=question,
        calls_tool=bool(expressions),
        right_expression=question.removesuffix("?") in expressions,
        uses_result=bool(results) and answer == results[-1],
        solved=not last.get("tool_calls") and answer == expected,
        text=" ".join(texts) or "says nothing",
    )


def _expression(arguments: str) -> str:
    """What the tool was called with; all of it where that is not as the tool's schema wants it."""
    try:
        return str(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return arguments
