"""How the shipped weights came to be: general skills, never a solved task, the same bits from the same seed."""

import json
import re
from random import Random

import pytest
import torch

from agentlightning.engine.codec import Message
from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.engine.tiny.files import load_tiny
from agentlightning.engine.tiny.model import TinyModel, TinyShape
from agentlightning.engine.tiny.tokenizer import decode
from scripts.make_tiny_model import CALCULATOR, Pretraining, batch_of, calculate, conversation, pretrain

pytestmark = pytest.mark.usefixtures("one_thread")

CODEC = TinyChatCodec()
SMALL = TinyShape(width=16, layers=1, heads=2, max_length=128)
MOST_TURNS = 3
MOST_TOKENS = 16
HELD_OUT = 256
BASE_REWARD_LIMIT = 0.05


def test_no_conversation_shows_a_solved_task() -> None:
    rng = Random(1)

    questions = 0
    for messages in (conversation(rng) for _ in range(30_000)):
        asked = re.fullmatch(r"(\d+[-+*]\d+)\?", next(m["content"] for m in messages if m["role"] == "user"))
        if asked:
            questions += 1
            spoken = [m["content"] for m in messages if m["role"] == "assistant"]
            assert calculate(asked[1]) not in spoken

    assert questions > 10_000


def test_only_the_assistants_words_are_learned() -> None:
    batch = batch_of(64, Random(2))

    for ids, length, spoken in zip(batch.ids, batch.lengths, batch.spoken, strict=True):
        learned = CODEC.token_text(int(ids[spoken][-1]))
        assert learned == "<end>"
        assert not spoken[length:].any()
        assert not re.search(r"say|run|read|\?", decode(ids[spoken].tolist()))


def test_same_seed_gives_the_same_weights() -> None:
    first, again, other = (pretrain(Pretraining(seed=seed, steps=3), SMALL).state() for seed in (1, 1, 2))

    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert not torch.equal(first["embedding"], other["embedding"])


@pytest.fixture(scope="module")
def shipped() -> TinyModel:
    return load_tiny()


def say(
    model: TinyModel, conversations: list[list[Message]], temperature: float, noise: torch.Generator
) -> list[Message]:
    """The model's next message in each conversation."""
    prompts = [CODEC.render(messages, [CALCULATOR]) for messages in conversations]
    lengths, rows = torch.tensor([len(prompt) for prompt in prompts]), len(prompts)
    longest = int(lengths.max())
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    sampled = torch.zeros(rows, MOST_TOKENS, dtype=torch.long)
    with torch.inference_mode():
        cache = model.new_cache(rows, longest + MOST_TOKENS)
        logits = model.prefill(ids, lengths, cache, torch.arange(rows))
        for step in range(MOST_TOKENS):
            gumbel = -torch.empty_like(logits).exponential_(generator=noise).log()
            sampled[:, step] = (logits + temperature * gumbel).argmax(-1)
            logits = model.decode(sampled[:, step], lengths + step, cache, rows)
    return [CODEC.parse(until_end(row, model), [CALCULATOR]).as_message() for row in sampled.tolist()]


def until_end(tokens: list[int], model: TinyModel) -> list[int]:
    ends = [index for index, token in enumerate(tokens) if token in model.end_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def share_solved(model: TinyModel, expressions: list[str], temperature: float) -> float:
    """How many sums the agent of the calculator task gets right: it calls the tool, reads the result, answers."""
    noise = torch.Generator().manual_seed(5)
    talks: list[list[Message]] = [[{"role": "user", "content": f"{expression}?"}] for expression in expressions]
    for _ in range(MOST_TURNS):
        open_talks = [talk for talk in talks if talk[-1]["role"] != "assistant"]
        if not open_talks:
            break
        for talk, message in zip(open_talks, say(model, open_talks, temperature, noise), strict=True):
            talk.append(message)
            talk += [use_calculator(call) for call in message.get("tool_calls", [])]
    solved = [talk[-1].get("content") == calculate(sum_) for talk, sum_ in zip(talks, expressions, strict=True)]
    return sum(solved) / len(solved)


def use_calculator(call: Message) -> Message:
    expression = json.loads(call["function"]["arguments"])["expression"]
    is_sum = re.fullmatch(r"\d{1,3}[-+*]\d{1,3}", expression)
    return {"role": "tool", "tool_call_id": call["id"], "content": calculate(expression) if is_sum else "error"}


def held_out() -> list[str]:
    rng = Random(99)
    return [f"{rng.randint(0, 99)}{rng.choice('+-*')}{rng.randint(0, 99)}" for _ in range(HELD_OUT)]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_shipped_model_cannot_solve_the_task(shipped: TinyModel, temperature: float) -> None:
    assert share_solved(shipped, held_out(), temperature) <= BASE_REWARD_LIMIT


def test_shipped_model_copies_on_command(shipped: TinyModel) -> None:
    texts = ["3917", "42", "-805", "37+58", "9*90", "6"]

    answers = say(shipped, [[{"role": "user", "content": f"say {text}"}] for text in texts], 0.0, torch.Generator())

    assert [answer["content"] for answer in answers] == texts


def test_shipped_model_calls_the_tool_on_command(shipped: TinyModel) -> None:
    sums = ["37+58", "4*12", "80-3", "7+7"]

    answers = say(shipped, [[{"role": "user", "content": f"run {text}"}] for text in sums], 0.0, torch.Generator())

    called = [json.loads(answer["tool_calls"][0]["function"]["arguments"])["expression"] for answer in answers]
    assert called == sums
