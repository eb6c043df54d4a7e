"""What the benchmarks train on: arithmetic with a calculator, and a text whose letters are counted.

The calculator is a line of text, for small models know no tool calls. Counting letters gives different rewards to
nearly all answers, of a random model too, so that no step has nothing to learn from: it is for measuring time.
"""

import random
import re
from collections.abc import Callable
from typing import Any

Task = dict[str, str]
Message = dict[str, str]

RESULT = "The result is {}."
EXAMPLE: list[Message] = [
    {"role": "system", "content": "You use a calculator. Write CALC and the expression, then ANSWER and the result."},
    {"role": "user", "content": "What is 3+4?"},
    {"role": "assistant", "content": "CALC 3+4"},
    {"role": "user", "content": RESULT.format(7)},
    {"role": "assistant", "content": "ANSWER 7"},
]
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
TURNS = 3
CALCULATOR_TOKENS = 24
WORDS = "river stone cloud engine paper window garden silver winter music number forest letter orange travel simple"
NO_ADDRESS = "http://127.0.0.1:9/v1"
"""Where the agents' client points; a training redirects its calls."""


def tasks(count: int, seed: int) -> list[Task]:
    """Questions of arithmetic with their expressions and answers."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        a, b, operator = chance.randint(0, 99), chance.randint(0, 99), chance.choice("+-*")
        expression = f"{a}{operator}{b}"
        answer = str(OPERATIONS[operator](a, b))
        made.append({"question": f"What is {expression}?", "expression": expression, "answer": answer})
    return made


class CalculatorAgent:
    """Up to three turns. The right answer is worth 1, the right call alone 0.2."""

    def __init__(self, model: str) -> None:
        self.model, self.client = model, _client()

    def __call__(self, task: Task) -> float:
        messages: list[Any] = [*EXAMPLE, {"role": "user", "content": task["question"]}]
        reward = 0.0
        for _ in range(TURNS):
            completion = self.client.chat.completions.create(
                model=self.model, messages=messages, max_tokens=CALCULATOR_TOKENS
            )
            text = completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            if (answer := re.match(r"\s*ANSWER\s+(-?\d+)\s*$", text)) is not None:
                return 1.0 if answer[1] == task["answer"] else reward
            call = re.match(r"\s*CALC\s+(\d{1,2})\s*([-+*])\s*(\d{1,2})\s*$", text)
            if call is None:
                return reward
            if "".join(call.groups()) == task["expression"]:
                reward = 0.2
            result = OPERATIONS[call[2]](int(call[1]), int(call[3]))
            messages.append({"role": "user", "content": RESULT.format(result)})
        return reward


class LettersAgent:
    """One call, and the reward of its text."""

    def __init__(self, model: str, max_tokens: int) -> None:
        self.model, self.max_tokens, self.client = model, max_tokens, _client()

    def __call__(self, task: Task) -> float:
        completion = self.client.chat.completions.create(
            model=self.model, messages=letters_messages(task), max_tokens=self.max_tokens
        )
        return letters_reward(completion.choices[0].message.content or "")


def letters_messages(task: Task) -> list[Any]:
    """The one turn of `LettersAgent`."""
    words = random.Random(task["expression"]).choices(WORDS.split(), k=12)
    return [{"role": "user", "content": f"{task['question']} Write about {' '.join(words)}"}]


def letters_reward(text: str) -> float:
    """The share of the alphabet's first half among all characters."""
    return sum("a" <= one <= "m" for one in text.lower()) / max(len(text), 1)


def _client() -> Any:
    from openai import OpenAI

    return OpenAI(base_url=NO_ADDRESS, api_key="none", max_retries=4)
