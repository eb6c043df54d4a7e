"""A calculator agent: it asks a model, runs the tool that the model calls, and says whether the answer was right.

An ordinary program for the `openai` package. Nothing in it knows that it is being trained.
"""

import json
import os
import re
from typing import Any

from openai import OpenAI

MOST_TURNS = 3
MOST_TOKENS = 16
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out an expression such as 37+58.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)


def solve(task: dict[str, str]) -> float:
    """Work on one task, `{"question": "37+58?", "answer": "95"}`; 1.0 if the answer is right, else 0.0."""
    return solve_all({"questions": [task["question"]], "answers": [task["answer"]]})


def solve_all(task: dict[str, list[str]]) -> float:
    """Work on several questions in one conversation; the share of them that was answered right."""
    messages: list[Any] = []
    right = 0
    for question, expected in zip(task["questions"], task["answers"], strict=True):
        messages.append({"role": "user", "content": question})
        right += answer(messages).strip() == expected
    return right / len(task["questions"])


def answer(messages: list[Any]) -> str:
    """What the agent answers to the last message; nothing, if it is still calling the tool after three turns.

    Everything that is said on the way is added to the messages.
    """
    for _ in range(MOST_TURNS):
        completion = client.chat.completions.create(
            model=os.environ.get("CALC_MODEL", "tiny"), messages=messages, tools=[CALCULATOR], max_tokens=MOST_TOKENS
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        messages.extend(
            {"role": "tool", "tool_call_id": call.id, "content": calculated(call.function.arguments)}
            for call in message.tool_calls
        )
    return ""


def calculated(arguments: str) -> str:
    """What the tool gives back; `error` for anything that is not an expression of two numbers."""
    try:
        expression = json.loads(arguments)["expression"]
        left, operator, right = re.fullmatch(r"(\d{1,2})([-+*])(\d{1,2})", expression).groups()  # type: ignore[union-attr]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "error"
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[operator])
