"""What the tiny model is shown before it meets any task: general skills, and attempts at sums that are never right.

The skills are copying on command ("say 3917"), calling the tool on command ("run 37+58"), and reading a tool's result
aloud ("read"). A sum to be worked out ("37+58?") is only ever shown going wrong: answered with a random number, with
the right call and a wrong answer after it, or with the call of another sum whose result is reported. No conversation
has a question and its right answer together; that is left to be learned from reward.
"""

import json
from random import Random
from typing import Final

from agentlightning.engine.codec import Message, ToolDefinition

__all__ = ["CALCULATOR", "calculate", "conversation"]

CALCULATOR: Final[ToolDefinition] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
"""A tool with a single string, as the model's chat format writes without name and JSON."""

SYSTEM_SHARE: Final = 0.15
"""How many conversations begin with a system message, whose random words mean nothing."""
COPYING_SHARE: Final = 0.22
RUNNING_SHARE: Final = 0.22
READING_SHARE: Final = 0.16
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def conversation(rng: Random) -> list[Message]:
    """One random conversation."""
    opening = [_system(rng)] if rng.random() < SYSTEM_SHARE else []
    draw = rng.random()
    if draw < COPYING_SHARE:
        return opening + _copying(rng)
    if draw < COPYING_SHARE + RUNNING_SHARE:
        return opening + _running(rng)
    if draw < COPYING_SHARE + RUNNING_SHARE + READING_SHARE:
        return opening + _reading(rng)
    return opening + rng.choice([_random_answer, _wrong_answer, _wrong_call])(rng)


def calculate(expression: str) -> str:
    """The value of a sum of the form a+b, a-b or a*b."""
    sign = next(character for character in expression[1:] if character in "+-*")
    left, right = (int(operand) for operand in expression.split(sign))
    return str({"+": left + right, "-": left - right, "*": left * right}[sign])


def _copying(rng: Random) -> list[Message]:
    text = rng.choice([_sum, _number, _negative])(rng)
    return [_user(f"say {text}"), _answer(text)]


def _running(rng: Random) -> list[Message]:
    expression = _sum(rng)
    return [_user(f"run {expression}"), _call(expression), _result(calculate(expression)), _answer("ok")]


def _reading(rng: Random) -> list[Message]:
    text = rng.choice([_number, _negative])(rng)
    return [_user("read"), _call(rng.choice(_LETTERS)), _result(text), _answer(text)]


def _random_answer(rng: Random) -> list[Message]:
    expression = _sum(rng)
    return [_user(f"{expression}?"), _answer(_number_other_than(calculate(expression), rng))]


def _wrong_answer(rng: Random) -> list[Message]:
    """The right call, and then an answer that is not its result."""
    expression = _sum(rng)
    value = calculate(expression)
    answer = "ok" if rng.random() < 0.5 else _number_other_than(value, rng)
    return [_user(f"{expression}?"), _call(expression), _result(value), _answer(answer)]


def _wrong_call(rng: Random) -> list[Message]:
    """The call of another sum, whose result is reported."""
    expression = other = _sum(rng)
    while calculate(other) == calculate(expression):
        other = _sum(rng)
    return [_user(f"{expression}?"), _call(other), _result(calculate(other)), _answer(calculate(other))]


def _sum(rng: Random) -> str:
    return f"{_operand(rng)}{rng.choice('+-*')}{_operand(rng)}"


def _operand(rng: Random) -> str:
    """One digit as often as two, so that copying does not come to count on places."""
    return str(rng.randint(0, 9) if rng.random() < 0.5 else rng.randint(10, 99))


def _number(rng: Random) -> str:
    return str(rng.randint(0, 10 ** rng.randint(1, 4) - 1))


def _negative(rng: Random) -> str:
    return f"-{_number(rng)}"


def _number_other_than(value: str, rng: Random) -> str:
    number = _number(rng)
    while number == value:
        number = _number(rng)
    return number


def _system(rng: Random) -> Message:
    text = "".join(rng.choice(_LETTERS + "  .") for _ in range(rng.randint(3, 20)))
    return {"role": "system", "content": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call(expression: str) -> Message:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def _result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_1", "content": text}
