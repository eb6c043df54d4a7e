"""The engine: what it samples is what the model says, whoever else is served; what fails, fails for one caller."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from agentlightning.engine.sampling import Sampling  # noqa: E402
from agentlightning.engine.scheduler import InferenceEngine  # noqa: E402
from agentlightning.engine.tiny.model import TinyModel, TinyShape  # noqa: E402
from agentlightning.errors import EngineError, InvalidRequest  # noqa: E402
from tests.engine.scripted import PATIENCE_SECONDS, trained_logprobs  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = TinyShape(max_length=96)


def a_model(seed: int = 0, kind: type[TinyModel] = TinyModel) -> TinyModel:
    torch.manual_seed(seed)
    model = kind(SHAPE)
    with torch.no_grad():
        model.embedding *= 6  # so that some tokens are likelier than others
    return model


def a_prompt(number: int) -> list[int]:
    source = random.Random(number)
    return [source.randrange(SHAPE.vocab_size) for _ in range(source.randrange(1, 30))]


@pytest.fixture
def model() -> TinyModel:
    return a_model()


@pytest.fixture
def engine(model: TinyModel) -> Iterator[InferenceEngine]:
    with InferenceEngine(model, max_sequences=8) as engine:
        yield engine


def in_turn(seed: int, *, end: int = 24) -> Sampling:
    return Sampling(max_new_tokens=1 + seed % end, seed=seed)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_training_forward(engine: InferenceEngine, temperature: float) -> None:
    prompts = [a_prompt(number) for number in range(16)]

    futures = [
        engine.submit(prompt, Sampling(max_new_tokens=1 + number % 20, temperature=temperature, top_logprobs=1))
        for number, prompt in enumerate(prompts)
    ]

    for prompt, future in zip(prompts, futures, strict=True):
        generation = future.result(PATIENCE_SECONDS)
        expected = trained_logprobs(engine.model, prompt, generation.token_ids, temperature or 1.0)
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)
        assert generation.prompt_tokens == len(prompt)
        if temperature == 0:
            assert [next(iter(top)) for top in generation.top_logprobs or ()] == generation.token_ids


def test_a_seed_gives_the_same_tokens_whoever_else_is_served(engine: InferenceEngine) -> None:
    alone = engine.submit(a_prompt(1), Sampling(max_new_tokens=20, seed=7)).result(PATIENCE_SECONDS)

    others = [engine.submit(a_prompt(number), in_turn(number)) for number in range(30)]
    again = engine.submit(a_prompt(1), Sampling(max_new_tokens=20, seed=7))
    different = engine.submit(a_prompt(1), Sampling(max_new_tokens=20, seed=8))

    wait(others, PATIENCE_SECONDS)
    assert again.result(PATIENCE_SECONDS).token_ids == alone.token_ids
    assert different.result(PATIENCE_SECONDS).token_ids != alone.token_ids


def test_tokens_are_drawn_as_often_as_they_are_likely(engine: InferenceEngine) -> None:
    prompt, draws = a_prompt(5), 1000
    futures = [engine.submit(prompt, Sampling(max_new_tokens=1, seed=seed)) for seed in range(draws)]

    counts = Counter(future.result(PATIENCE_SECONDS).token_ids[0] for future in futures)

    for token, count in counts.most_common(5):
        [logprob] = trained_logprobs(engine.model, prompt, [token])
        likely = torch.tensor(logprob).exp().item()
        assert count / draws == pytest.approx(likely, abs=4 * (likely / draws) ** 0.5)


def test_top_k_and_top_p_leave_only_the_likeliest(engine: InferenceEngine) -> None:
    prompt = a_prompt(5)
    ranked = engine.submit(prompt, Sampling(max_new_tokens=1, top_logprobs=10)).result(PATIENCE_SECONDS)
    assert ranked.top_logprobs is not None
    likeliest = list(ranked.top_logprobs[0])

    def drawn(**wishes: Any) -> set[int]:
        futures = [engine.submit(prompt, Sampling(max_new_tokens=1, seed=seed, **wishes)) for seed in range(60)]
        return {future.result(PATIENCE_SECONDS).token_ids[0] for future in futures}

    assert drawn(top_k=3) == set(likeliest[:3])
    assert drawn(top_p=1e-6) == {likeliest[0]}
    shares = torch.tensor(list(ranked.top_logprobs[0].values())).exp().cumsum(0).tolist()
    assert drawn(top_p=(shares[1] + shares[2]) / 2) == set(likeliest[:3])


def test_end_tokens_end_and_are_kept_but_not_before_the_least_number(engine: InferenceEngine) -> None:
    everything = frozenset(range(SHAPE.vocab_size)) - {20, 21}

    first = engine.submit(a_prompt(1), Sampling(stop_ids=everything, seed=1)).result(PATIENCE_SECONDS)
    later = engine.submit(a_prompt(1), Sampling(stop_ids=everything, seed=1, min_new_tokens=4)).result(PATIENCE_SECONDS)

    assert first.finish_reason == "stop"
    assert first.token_ids[-1] in everything
    assert set(later.token_ids[:4]) <= {20, 21}
    assert later.logprobs == pytest.approx(
        trained_logprobs(engine.model, a_prompt(1), later.token_ids),
        abs=1e-4,
    )


@pytest.mark.parametrize("length", [0, 1, SHAPE.max_length + 1, 1_000_000])
def test_a_context_that_the_model_does_not_have_is_refused(length: int) -> None:
    with pytest.raises(EngineError, match=f"max_length is {length}; model 'tiny' takes 2 to 96 tokens"):
        InferenceEngine(TinyModel(SHAPE), max_length=length)


def test_an_answer_ends_where_the_context_does(engine: InferenceEngine) -> None:
    prompt = [20] * (SHAPE.max_length - 3)

    generation = engine.submit(prompt, Sampling(max_new_tokens=50, min_new_tokens=50)).result(PATIENCE_SECONDS)

    assert (len(generation.token_ids), generation.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], Sampling(), "empty"),
        ([20] * SHAPE.max_length, Sampling(), "context of 96 tokens"),
        ([SHAPE.vocab_size], Sampling(), "outside the vocabulary"),
        ([-1], Sampling(), "outside the vocabulary"),
        ([20], Sampling(stop_ids=frozenset([10**9]), min_new_tokens=1), "stop token 1000000000 is outside"),
        ([20], Sampling(stop_ids=frozenset([-1]), min_new_tokens=1), "stop token -1 is outside"),
    ],
    ids=["empty", "too long", "unknown id", "negative id", "unknown stop", "negative stop"],
)
def test_what_cannot_be_done_is_said_to_its_caller_alone(
    engine: InferenceEngine, prompt: list[int], sampling: Sampling, words: str
) -> None:
    other = engine.submit(a_prompt(1), Sampling(max_new_tokens=5))

    with pytest.raises(InvalidRequest, match=words):
        engine.submit(prompt, sampling)

    assert other.result(PATIENCE_SECONDS).token_ids


def test_a_cancelled_request_ends_at_the_next_step_and_keeps_what_it_has(engine: InferenceEngine) -> None:
    begun, is_cancelled = threading.Event(), threading.Event()

    def hold(*_: object) -> None:  # the first round, until the request is cancelled
        begun.set()
        assert is_cancelled.wait(PATIENCE_SECONDS)

    future = engine.submit([20], Sampling(max_new_tokens=90, min_new_tokens=90), on_token=hold)
    assert begun.wait(PATIENCE_SECONDS)

    future.cancel()
    is_cancelled.set()

    generation = future.result(PATIENCE_SECONDS)
    assert generation.finish_reason == "cancelled"
    assert len(generation.token_ids) == len(generation.logprobs) == 2  # behind the prompt, and of the round's step
    assert engine.statistics()["running"] == 0
    assert future.cancel() is False


def test_a_listener_sees_every_token_and_may_end_the_sampling(engine: InferenceEngine) -> None:
    seen: list[tuple[int, float]] = []

    def take(token_id: int, logprob: float) -> bool:
        seen.append((token_id, logprob))
        return len(seen) == 3

    generation = engine.submit([20], Sampling(max_new_tokens=30, min_new_tokens=30), on_token=take).result(
        PATIENCE_SECONDS
    )

    assert generation.finish_reason == "stop"
    assert seen == list(zip(generation.token_ids, generation.logprobs, strict=True))
    assert len(seen) == 3


def test_a_listener_that_fails_fails_its_own_request_only(engine: InferenceEngine) -> None:
    def fail(token_id: int, logprob: float) -> None:
        raise KeyError(token_id)

    failing = engine.submit([20], Sampling(max_new_tokens=5), on_token=fail)
    other = engine.submit([20], Sampling(max_new_tokens=5))

    with pytest.raises(EngineError, match="KeyError"):
        failing.result(PATIENCE_SECONDS)
    assert other.result(PATIENCE_SECONDS).token_ids


def test_many_requests_with_random_cancellations_leave_no_slot_occupied(engine: InferenceEngine) -> None:
    source = random.Random(0)
    futures = []
    for number in range(100):
        futures.append(engine.submit(a_prompt(number), in_turn(number)))
        if source.random() < 0.3:
            source.choice(futures).cancel()

    finished = [future.result(PATIENCE_SECONDS) for future in futures]

    statistics = engine.statistics()
    assert (statistics["running"], statistics["waiting"], statistics["failed"]) == (0, 0, 0)
    assert "cancelled" in [generation.finish_reason for generation in finished]
    for number, generation in enumerate(finished[::5]):
        expected = trained_logprobs(engine.model, a_prompt(5 * number), generation.token_ids)
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)


def test_new_weights_are_sampled_from_at_the_next_step_while_a_request_runs(engine: InferenceEngine) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def hold(token_id: int, logprob: float) -> None:
        begun.set()
        assert may_go_on.wait(PATIENCE_SECONDS)

    spanning = engine.submit([20], Sampling(max_new_tokens=8, min_new_tokens=8), on_token=hold)
    assert begun.wait(PATIENCE_SECONDS)
    other_model = a_model(seed=1)
    taken = engine.load_weights(5, {name: tensor.clone() for name, tensor in other_model.state().items()})
    may_go_on.set()

    generation = spanning.result(PATIENCE_SECONDS)
    after = engine.submit([20, 21], Sampling(max_new_tokens=8)).result(PATIENCE_SECONDS)

    assert taken.result(PATIENCE_SECONDS) is None
    assert (generation.weights_version, generation.last_weights_version) == (0, 5)
    assert (after.weights_version, after.last_weights_version) == (5, None)
    assert after.logprobs == pytest.approx(trained_logprobs(other_model, [20, 21], after.token_ids), abs=1e-4)


class FaultyModel(TinyModel):
    """Cannot read one token."""

    def prefill(self, ids: Any, lengths: Any, cache: Any, slots: Any, starts: Any = None) -> Any:
        if (ids == 77).any():
            raise torch.OutOfMemoryError("no room for this prompt")
        return super().prefill(ids, lengths, cache, slots)


def test_a_prompt_that_cannot_be_read_does_not_disturb_those_that_run() -> None:
    with InferenceEngine(a_model(kind=FaultyModel), max_sequences=4) as engine:
        begun = threading.Event()
        running = engine.submit([20], Sampling(max_new_tokens=90, min_new_tokens=90), on_token=lambda *_: begun.set())
        assert begun.wait(PATIENCE_SECONDS)

        with pytest.raises(EngineError, match="no room"):
            engine.submit([77], Sampling()).result(PATIENCE_SECONDS)

        assert len(running.result(PATIENCE_SECONDS).token_ids) == 90


def test_what_is_no_number_in_the_cache_reaches_nobody_who_comes_later(model: TinyModel) -> None:
    good = model.state()
    with InferenceEngine(model, max_sequences=1) as engine:
        with torch.no_grad():
            model.blocks[0].attention_in *= float("nan")
        with pytest.raises(EngineError, match="NaN"):
            engine.submit([20] * 30, Sampling()).result(PATIENCE_SECONDS)
        engine.load_weights(1, good).result(PATIENCE_SECONDS)

        generation = engine.submit([20], Sampling(max_new_tokens=5, min_new_tokens=5)).result(PATIENCE_SECONDS)

    assert len(generation.token_ids) == 5


def test_closing_tells_those_who_wait(model: TinyModel) -> None:
    engine = InferenceEngine(model)
    waiting = engine.submit([20], Sampling())
    weights = engine.load_weights(1, model.state())

    engine.close()

    for future in (waiting, weights):
        with pytest.raises(EngineError, match="closed"):
            future.result(0)
    with pytest.raises(EngineError, match="closed"):
        engine.submit([20], Sampling())
