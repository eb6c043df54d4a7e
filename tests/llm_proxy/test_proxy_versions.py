"""The version of the weights that the model list names, stamped on calls as they are sent."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from agentlightning.adapter import TraceToTrajectory
from tests.llm_proxy.openai_suite import USER
from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.llm_proxy.recorded import body_of, replayed
from tests.stub_model.raw import PATIENCE_SECONDS, Connection, until, whole
from tests.stub_model.script import Handler, Request
from tests.stub_model.server import StubModel, serving

ANSWER = replayed("chat_ids_logprobs")
VERSION = "agentlightning.weights_version"


def held(gate: threading.Event, act: Handler) -> Handler:
    """The act, once the gate is open."""

    async def later(request: Request, connection: Connection) -> None:
        assert await asyncio.to_thread(gate.wait, PATIENCE_SECONDS)
        await act(request, connection)

    return later


def served(server: StubModel, version: int | None, *, name: str = MODEL, **params: Any) -> Any:
    listed = entry(server.url, model_of=f"hosted_vllm/{name}", **params)
    return {**listed, "model_info": {} if version is None else {"version": version}}


def ask(door: Proxied) -> str:
    return str(door.openai().chat.completions.create(model=MODEL, messages=USER).choices[0].message.content)


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def in_line(door: Proxied) -> int:
    return sum(backend["waiting"] for backend in door.proxy.status()["backends"])


def test_answers_of_a_server_that_reports_no_version_get_that_of_the_list() -> None:
    with serving(ANSWER) as server, proxied(served(server, 3)) as door:
        ask(door)
        (sequence,) = TraceToTrajectory().adapt(door.spans()).sequences

    assert [call.weights_version for call in sequence.calls] == ["3"]
    assert set(sequence.weights_versions) == {None, "3"}


def test_version_that_the_server_reports_comes_first() -> None:
    reporting = whole(body_of("chat_ids_logprobs", weights_version=7))
    with serving(reporting) as server, proxied(served(server, 3)) as door:
        ask(door)
        call = door.only_call()

    assert call.get(VERSION) == 7


def test_call_is_stamped_with_the_version_at_which_it_was_sent(callers: ThreadPoolExecutor) -> None:
    gate = threading.Event()
    with ExitStack() as life:
        life.callback(gate.set)
        server = life.enter_context(serving(held(gate, ANSWER), ANSWER))
        door = life.enter_context(proxied(served(server, 1, max_parallel_requests=1)))
        sent: Future[str] = callers.submit(ask, door)
        until(lambda: len(server.requests) == 1)
        queued = callers.submit(ask, door)
        until(lambda: in_line(door) == 1)

        door.proxy.update_model_list([served(server, 2, name="policy-v2", max_parallel_requests=1)])
        gate.set()

        assert {sent.result(PATIENCE_SECONDS), queued.result(PATIENCE_SECONDS)} == {"3 + 4 = 7"}
        calls = door.calls()
    assert [call.get(VERSION) for call in calls] == ["1", "2"]
    assert [asked.body["model"] for asked in server.requests] == [MODEL, "policy-v2"]
    assert server.connections == 1


def test_backend_that_refuses_additional_fields_is_still_known_after_a_new_version() -> None:
    refusing = whole(b'{"error": {"message": "Unrecognized request argument: return_token_ids"}}', 400)
    plain = whole(b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}}]}')
    with serving(refusing, plain) as server, proxied(served(server, 1)) as door:
        ask(door)
        door.proxy.update_model_list([served(server, 2)])
        ask(door)

    assert ["return_token_ids" in asked.body for asked in server.requests] == [True, False, False]
