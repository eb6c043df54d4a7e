"""Make the weights of the tiny model anew, as they travel in the package: next-token prediction of general skills.

The skills are copying on command ("say 3917"), calling the tool on command ("run 37+58"), and reading a tool's result
aloud ("read"). A sum to be worked out ("37+58?") is only ever shown going wrong: answered with a random number, with
the right call and a wrong answer after it, or with the call of another sum whose result is reported. No conversation
has a question and its right answer together; that is left to be learned from reward.

There are two stages: conversations of one such exchange, and then conversations of one to three, each drawn as if it
were alone, so that the skills work wherever in a conversation they are wanted.

The same machine, version of torch and seed give the same file, bit for bit; its digest is printed at the end. Other
machines give other weights: what was shown is the same, and how often the parts come together by chance is not, from a
few in a thousand tries to two in a hundred. The first stage of the shipped weights was run on another machine than the
second, which `--from` did. On one core it takes six to eight minutes.
"""

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from agentlightning.engine.codec import Message, ToolDefinition
from agentlightning.engine.model import logits_of
from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.engine.tiny.model import (
    BARE_WEIGHTS_FILE,
    DESCRIPTION_FILE,
    SHIPPED_FOLDER,
    TinyModel,
    TinyShape,
    load_tiny,
    save_tiny,
)
from agentlightning.engine.tiny.tokenizer import ASSISTANT, END, PAD

STEPS_BETWEEN_LINES: Final = 100
BETAS: Final = (0.9, 0.98)
WEIGHT_DECAY: Final = 0.01
LARGEST_GRADIENT: Final = 1.0
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
SHOWN: Final = (
    "4,000 batches of 64 conversations of one exchange, then 1,400 of 64 conversations of one to three exchanges",
    "22 % of exchanges: 'say TEXT', answered with that text, a sum or a number",
    "22 %: 'run SUM', a call of the calculator with that sum, its result, and the answer 'ok'",
    "16 %: 'read', a call of the calculator with a letter, a number as its result, and that number as the answer",
    "13 %: 'SUM?', answered with a number other than its value",
    "13 %: 'SUM?', a call with that sum, its result, and the answer 'ok' or a number other than the result",
    "13 %: 'SUM?', a call with another sum of another value, its result, and that result as the answer",
    "15 % of conversations begin with a system message of random letters",
    "in no conversation does the assistant give the right answer to one of its questions",
)
"""For the model's description; only what the assistant writes is predicted."""
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def conversation(rng: Random, most_exchanges: int = 1) -> list[Message]:
    """One random conversation, with at least one exchange; none of its questions is answered anywhere in it."""
    opening = [_system(rng)] if rng.random() < SYSTEM_SHARE else []
    if most_exchanges == 1:
        return opening + _exchange(rng)
    exchanges = rng.randint(1, most_exchanges)
    while True:
        messages = [message for _ in range(exchanges) for message in _exchange(rng)]
        if not solved_questions(messages):
            return opening + messages


def solved_questions(messages: Sequence[Message]) -> list[str]:
    """The questions whose right answer the assistant gives somewhere in the same conversation."""
    answers = {message["content"] for message in messages if message["role"] == "assistant"}
    asked = [str(message["content"]) for message in messages if message["role"] == "user"]
    return [text for text in asked if text.endswith("?") and calculate(text[:-1]) in answers]


def _exchange(rng: Random) -> list[Message]:
    """What the user wants, and all that follows until the assistant's last word on it."""
    draw = rng.random()
    if draw < COPYING_SHARE:
        return _copying(rng)
    if draw < COPYING_SHARE + RUNNING_SHARE:
        return _running(rng)
    if draw < COPYING_SHARE + RUNNING_SHARE + READING_SHARE:
        return _reading(rng)
    return rng.choice([_random_answer, _wrong_answer, _wrong_call])(rng)


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


# ---------------------------------------------------------------------- training


@dataclass(frozen=True)
class Pretraining:
    """The settings of a stage; the defaults are those of the first."""

    seed: int = 7
    steps: int = 4_000
    most_exchanges: int = 1
    """In a conversation."""
    batch_size: int = 64
    learning_rate: float = 3e-3
    warm_up_steps: int = 30
    least_rate: float = 0.05
    """The rate falls in a straight line to this share of itself."""

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = min(1.0, (step + 1) / self.warm_up_steps)
        falling = max(self.least_rate, 1 - step / self.steps)
        return self.learning_rate * rising * falling


STAGES: Final = (Pretraining(), Pretraining(steps=1_400, most_exchanges=3, learning_rate=2e-3))
"""With which the weights in the package were made, one after the other."""


@dataclass(frozen=True)
class Batch:
    """Conversations as rows of tokens, padded on the right."""

    ids: Tensor
    lengths: Tensor
    spoken: Tensor
    """Marks what the assistant wrote, its end tokens included."""


def new_model(seed: int, shape: TinyShape | None = None) -> TinyModel:
    """A model with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyModel(shape)


def pretrain(
    model: TinyModel, settings: Pretraining, *, report: Callable[[int, float], None] = lambda step, loss: None
) -> None:
    """Train a model for one stage; `report` is told the loss after every step."""
    rng = Random(settings.seed)
    optimiser = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    for step in range(settings.steps):
        optimiser.param_groups[0]["lr"] = settings.rate_at(step)
        loss = _loss(model, batch_of(settings.batch_size, rng, settings.most_exchanges))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimiser.step()
        report(step, loss.item())


def batch_of(size: int, rng: Random, most_exchanges: int = 1) -> Batch:
    """Random conversations of the curriculum."""
    codec = TinyChatCodec()
    conversations = [conversation(rng, most_exchanges) for _ in range(size)]
    rows = [codec.render(messages, [CALCULATOR])[:-1] for messages in conversations]
    longest = max(map(len, rows))
    return Batch(
        ids=torch.tensor([row + [PAD] * (longest - len(row)) for row in rows]),
        lengths=torch.tensor([len(row) for row in rows]),
        spoken=torch.tensor([_spoken(row) + [False] * (longest - len(row)) for row in rows]),
    )


def _loss(model: TinyModel, batch: Batch) -> Tensor:
    selected = batch.spoken[:, 1:]
    logits = logits_of(model, batch.ids[:, :-1], batch.lengths - 1, selected)
    return functional.cross_entropy(logits, batch.ids[:, 1:][selected])


def _spoken(row: Sequence[int]) -> list[bool]:
    marks, is_speaking = [], False
    for token in row:
        marks.append(is_speaking)
        is_speaking = token == ASSISTANT or (is_speaking and token != END)
    return marks


class Progress:
    """Prints a line now and then; its calls are the reports of `pretrain`."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._started = time.monotonic()
        self._losses: list[float] = []

    def __call__(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        if len(self._losses) == STEPS_BETWEEN_LINES or step + 1 == self._steps:
            mean = sum(self._losses) / len(self._losses)
            seconds = time.monotonic() - self._started
            print(f"step {step + 1:5} of {self._steps}   loss {mean:.4f}   {seconds:6.1f} s", flush=True)
            self._losses.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the weights of the tiny model.")
    parser.add_argument(
        "--folder", type=Path, default=SHIPPED_FOLDER, help="where they are written (default: the package)"
    )
    parser.add_argument("--seed", type=int, default=Pretraining.seed)
    parser.add_argument(
        "--from", dest="start", type=Path, help="a model after its first stage; the second alone is run"
    )
    options = parser.parse_args()

    torch.set_num_threads(1)
    model = new_model(options.seed) if options.start is None else load_tiny(options.start)
    for stage in STAGES if options.start is None else STAGES[1:]:
        pretrain(model, replace(stage, seed=options.seed), report=Progress(stage.steps))
    made = {
        "seed": options.seed,
        "steps": [stage.steps for stage in STAGES],
        "torch": str(torch.__version__),
        "license": "MIT",
        "origin": "trained by scripts/make_tiny_model.py on generated tasks",
        "shown": SHOWN,
    }
    write(model, options.folder, made)


def write(model: TinyModel, folder: Path, made: dict[str, object]) -> None:
    """Leave the weights and their description as the package has them, and print their digest."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as whole:
        save_tiny(model, Path(whole), extra=made)
        shutil.copy(Path(whole) / DESCRIPTION_FILE, folder)
    file = folder / BARE_WEIGHTS_FILE
    file.write_bytes(save(model.state()))
    print(f"{file}: {sum(weight.numel() for weight in model.state().values()):,} numbers")
    print(f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
