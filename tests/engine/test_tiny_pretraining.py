"""How the shipped weights came to be: general skills, never a solved task, the same bits from the same seed."""

import json
import re
from dataclasses import replace
from random import Random

import pytest
import torch

from agentlightning.engine.codec import Message
from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.engine.tiny.model import DESCRIPTION_FILE, SHIPPED_FOLDER, TinyModel, TinyShape, load_tiny
from agentlightning.engine.tiny.tokenizer import decode
from scripts.make_tiny_model import (
    CALCULATOR,
    SHOWN,
    STAGES,
    Pretraining,
    batch_of,
    calculate,
    conversation,
    new_model,
    pretrain,
    solved_questions,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CODEC = TinyChatCodec()
SMALL = TinyShape(width=16, layers=1, heads=2, max_length=256)
MOST_TURNS = 3
MOST_TOKENS = 16
HELD_OUT = 128
BASE_REWARD_LIMIT = 0.05


@pytest.mark.parametrize("stage", STAGES, ids=["one-exchange", "one-to-three-exchanges"])
def test_no_conversation_shows_a_solved_task(stage: Pretraining) -> None:
    rng = Random(1)

    questions = exchanges = 0
    for messages in (conversation(rng, stage.most_exchanges) for _ in range(4_000)):
        asked = [message["content"] for message in messages if message["role"] == "user"]
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        sums = [text[:-1] for text in asked if re.fullmatch(r"\d+[-+*]\d+\?", text)]
        assert not {calculate(one) for one in sums} & set(said)
        questions += len(sums)
        exchanges = max(exchanges, len(asked))

    assert questions > 1_400
    assert exchanges == stage.most_exchanges


def test_an_answer_to_another_question_of_the_conversation_counts_as_solved() -> None:
    said = [("user", "2+3?"), ("assistant", "9"), ("user", "say 5"), ("assistant", "5")]

    assert solved_questions([{"role": role, "content": text} for role, text in said]) == ["2+3?"]


def test_the_description_says_what_the_model_was_shown_and_under_which_licence() -> None:
    described = json.loads((SHIPPED_FOLDER / DESCRIPTION_FILE).read_text(encoding="utf-8"))["extra"]

    assert described["license"] == "MIT"
    assert described["shown"] == list(SHOWN)
    assert described["steps"] == [stage.steps for stage in STAGES]


@pytest.mark.parametrize("most_exchanges", [1, 3])
def test_only_the_assistants_words_are_learned(most_exchanges: int) -> None:
    batch = batch_of(64, Random(2), most_exchanges)

    for ids, length, spoken in zip(batch.ids, batch.lengths, batch.spoken, strict=True):
        learned = CODEC.token_text(int(ids[spoken][-1]))
        assert learned == "<end>"
        assert not spoken[length:].any()
        assert not re.search(r"say|run|read|\?", decode(ids[spoken].tolist()))


def test_same_seed_gives_the_same_weights() -> None:
    first, again, other = (new_model(seed, SMALL) for seed in (1, 1, 2))
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        for stage in STAGES:
            pretrain(model, replace(stage, seed=seed, steps=1))

    assert all(torch.equal(weight, again.state()[name]) for name, weight in first.state().items())
    assert not torch.equal(first.embedding, other.embedding)


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


def share_solved(model: TinyModel, questions: list[list[str]], temperature: float) -> list[float]:
    """How many sums the agent of the calculator task gets right, by their place in the conversation."""
    noise = torch.Generator().manual_seed(5)
    talks: list[list[Message]] = [[] for _ in questions]
    shares = []
    for asked in zip(*questions, strict=True):
        for talk, one in zip(talks, asked, strict=True):
            talk.append({"role": "user", "content": f"{one}?"})
        for _ in range(MOST_TURNS):
            open_talks = [talk for talk in talks if talk[-1]["role"] != "assistant"]
            if not open_talks:
                break
            for talk, message in zip(open_talks, say(model, open_talks, temperature, noise), strict=True):
                talk.append(message)
                talk += [use_calculator(call) for call in message.get("tool_calls", [])]
        solved = [talk[-1].get("content") == calculate(one) for talk, one in zip(talks, asked, strict=True)]
        shares.append(sum(solved) / len(solved))
    return shares


def use_calculator(call: Message) -> Message:
    expression = json.loads(call["function"]["arguments"])["expression"]
    is_sum = re.fullmatch(r"\d{1,3}[-+*]\d{1,3}", expression)
    return {"role": "tool", "tool_call_id": call["id"], "content": calculate(expression) if is_sum else "error"}


def sums(count: int, each: int) -> list[list[str]]:
    rng = Random(99)
    draw = (f"{rng.randint(0, 99)}{rng.choice('+-*')}{rng.randint(0, 99)}" for _ in range(count * each))
    return [list(one) for one in zip(*[draw] * each, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_shipped_model_cannot_solve_the_task_with_any_of_three_questions(
    shipped: TinyModel, temperature: float
) -> None:
    assert max(share_solved(shipped, sums(HELD_OUT, 3), temperature)) <= BASE_REWARD_LIMIT


def test_shipped_model_calls_the_tool_for_a_third_question_as_for_the_first(shipped: TinyModel) -> None:
    talks: list[list[Message]] = []
    for first, second, third in sums(HELD_OUT, 3):
        pairs = [{"role": "user", "content": f"{first}?"}, {"role": "assistant", "content": "7"}]
        pairs += [{"role": "user", "content": f"say {second}"}, {"role": "assistant", "content": second}]
        talks.append([*pairs, {"role": "user", "content": f"{third}?"}])

    replies = say(shipped, talks, 1.0, torch.Generator().manual_seed(5))

    called = [[use_calculator(call) for call in reply.get("tool_calls", [])] for reply in replies]
    right = [
        bool(one) and one[0]["content"] == calculate(talk[-1]["content"][:-1])
        for one, talk in zip(called, talks, strict=True)
    ]
    assert sum(right) / len(right) > 0.15


def test_shipped_model_copies_and_calls_the_tool_on_command(shipped: TinyModel) -> None:
    said, ran = ["3917", "42", "-805", "37+58", "9*90", "6"], ["37+58", "4*12", "80-3", "7+7"]
    commands = [*(f"say {text}" for text in said), *(f"run {text}" for text in ran)]

    answers = say(shipped, [[{"role": "user", "content": text}] for text in commands], 0.0, torch.Generator())

    calls = [answer["tool_calls"][0]["function"] for answer in answers[len(said) :]]
    assert [answer["content"] for answer in answers[: len(said)]] == said
    assert [json.loads(call["arguments"])["expression"] for call in calls] == ran
