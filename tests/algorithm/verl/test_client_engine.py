"""verl's client as an engine: token in, token out, for rollouts that are under way."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.algorithm.verl.client_engine import AttributedApp, ClientEngine, Sessions
from agentlightning.engine.sampling import Generation, Sampling
from agentlightning.errors import EngineError, InvalidRequest, NotAllowed

END = 9
TRAINING = {"temperature": 1.0, "top_p": 0.9, "top_k": -1}


class Client:
    """Gives what it is told to, when it is let."""

    def __init__(self, **output: Any) -> None:
        self.asked: list[tuple[str, list[int], dict[str, Any]]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._output = {"token_ids": [5, END], "log_probs": [-1.0, -2.0], "stop_reason": "completed", **output}
        self._output.setdefault("extra_fields", {"min_global_steps": 3, "max_global_steps": 4})

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append((request_id, prompt_ids, dict(sampling_params)))
        sampling_params.clear()  # as verl's servers take entries out of it
        await self.may_answer.wait()
        if isinstance(error := self._output.get("error"), Exception):
            raise error
        return SimpleNamespace(**self._output)


def engine_over(client: Client, sessions: Sessions) -> ClientEngine:
    return ClientEngine(client, sessions, name="m", end_ids=frozenset({END}), max_length=10, max_new_tokens=6)


async def called(
    engine: ClientEngine, prompt: list[int], *, rollout: str = "ro-1", attempt: str = "at-1", **options: Any
) -> Generation:
    """A call as the server makes it: within a request that names the rollout and the attempt."""
    on_token = options.pop("on_token", None)
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(engine.submit(prompt, Sampling(**{"max_new_tokens": 4, **options}), on_token=on_token))

    headers = [(b"x-rollout-id", rollout.encode()), (b"x-attempt-id", attempt.encode())]
    await AttributedApp(app)({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]
    return await asyncio.wait_for(asyncio.wrap_future(found[0]), 10)


@pytest.fixture
def sessions() -> Sessions:
    found = Sessions()
    found.open("ro-1", TRAINING)
    return found


async def test_ids_go_in_and_come_out_with_log_probabilities_and_versions(sessions: Sessions) -> None:
    client = Client()

    answer = await called(engine_over(client, sessions), [1, 2])

    assert client.asked == [("at-1", [1, 2], {**TRAINING, "max_tokens": 4, "logprobs": True})]
    assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([5, END], [-1.0, -2.0], "stop")
    assert (answer.weights_version, answer.last_weights_version) == (3, 4)


async def test_every_call_gets_a_dictionary_of_its_own_and_the_samplings_of_the_training(sessions: Sessions) -> None:
    client = Client()
    engine = engine_over(client, sessions)

    await called(engine, [1], temperature=0.0, seed=1)
    await called(engine, [1], top_p=0.1)

    assert [parameters for _, _, parameters in client.asked] == [{**TRAINING, "max_tokens": 4, "logprobs": True}] * 2


async def test_an_answer_is_as_long_as_there_is_room(sessions: Sessions) -> None:
    client = Client()
    await called(engine_over(client, sessions), [1] * 8, max_new_tokens=100)
    await called(engine_over(client, sessions), [1], max_new_tokens=100)
    assert [parameters["max_tokens"] for _, _, parameters in client.asked] == [2, 6]


async def test_a_prompt_without_room_for_an_answer_is_refused(sessions: Sessions) -> None:
    with pytest.raises(InvalidRequest, match="10 tokens"):
        await called(engine_over(Client(), sessions), [1] * 10)


async def test_an_answer_that_was_cut_says_so(sessions: Sessions) -> None:
    client = Client(token_ids=[5, 6, 7, 8], log_probs=[-1.0] * 4)
    assert (await called(engine_over(client, sessions), [1])).finish_reason == "length"


async def test_what_follows_a_stop_string_is_cut(sessions: Sessions) -> None:
    client = Client(token_ids=[5, 6, 7], log_probs=[-1.0, -2.0, -3.0])
    answer = await called(engine_over(client, sessions), [1], on_token=lambda token_id, _: token_id == 6)
    assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([5, 6], [-1.0, -2.0], "stop")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"log_probs": None}, "calculate_log_probs"),
        ({"token_ids": [], "log_probs": []}, "0 tokens"),
        ({"stop_reason": "aborted"}, "broke the answer off"),
        ({"error": RuntimeError("no servers")}, "RuntimeError: no servers"),
    ],
    ids=["no log-probabilities", "nothing", "aborted", "raised"],
)
async def test_what_goes_wrong_at_verls_servers_is_told_to_the_caller(
    sessions: Sessions, output: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        await called(engine_over(Client(**output), sessions), [1])


class TestSessions:
    @pytest.mark.parametrize("rollout", ["ro-2", ""], ids=["unknown", "none"])
    async def test_a_call_of_no_rollout_under_way_is_refused(self, sessions: Sessions, rollout: str) -> None:
        with pytest.raises(NotAllowed, match="rollouts that run"):
            await called(engine_over(Client(), sessions), [1], rollout=rollout)

    async def test_an_attempt_that_another_has_replaced_is_refused(self, sessions: Sessions) -> None:
        engine = engine_over(Client(), sessions)
        await called(engine, [1], attempt="at-1")
        await called(engine, [1], attempt="at-2")

        with pytest.raises(NotAllowed, match="'at-1' of rollout 'ro-1' is over"):
            await called(engine, [1], attempt="at-1")

    async def test_closing_waits_for_what_is_being_sampled(self, sessions: Sessions) -> None:
        client = Client()
        client.may_answer.clear()
        calling = asyncio.create_task(called(engine_over(client, sessions), [1]))
        while not client.asked:
            await asyncio.sleep(0)
        closing = asyncio.create_task(sessions.close(["ro-1"], 30.0))
        for _ in range(5):
            await asyncio.sleep(0)

        assert not closing.done()
        client.may_answer.set()
        await closing
        assert (await calling).token_ids == [5, END]
