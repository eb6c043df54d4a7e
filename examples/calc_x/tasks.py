"""The data set: every sum, difference and product of two numbers below 100, with a tenth held out.

Whether a task is held out depends on the task alone, so no run ever trains on one that another run is tested on.
"""

import random
from typing import Final

OPERATIONS: Final = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
HIGHEST: Final = 99
HELD_OUT_EVERY: Final = 10


def is_held_out(a: int, operator: str, b: int) -> bool:
    return (7 * a + 13 * b + 3 * "+-*".index(operator)) % HELD_OUT_EVERY == 0


def tasks(count: int, *, held_out: bool, seed: int = 0) -> list[dict[str, str]]:
    """So many different tasks, of the part that is trained on or of the one that is not."""
    chosen = [
        {"question": f"{a}{operator}{b}?", "answer": str(compute(a, b))}
        for operator, compute in OPERATIONS.items()
        for a in range(HIGHEST + 1)
        for b in range(HIGHEST + 1)
        if is_held_out(a, operator, b) is held_out
    ]
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


def conversations(count: int, *, questions: int, held_out: bool, seed: int = 0) -> list[dict[str, list[str]]]:
    """So many tasks of several questions each; no question is in two of them."""
    single = tasks(count * questions, held_out=held_out, seed=seed)
    groups = [single[start : start + questions] for start in range(0, len(single) - questions + 1, questions)]
    return [{f"{name}s": [task[name] for task in group] for name in ("question", "answer")} for group in groups]
