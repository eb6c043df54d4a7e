"""What a client sends and what it is told: values, errors, limits, and a token that nobody else may read."""

import asyncio
import dataclasses
import logging
import math
import pickle
import time
from typing import Any

import aiohttp
import pytest
from pydantic import BaseModel

from agentlightning.errors import InvalidToken, InvalidValue, NotFound, PayloadTooLarge, StoreUnavailable
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.http.codec import OperationCodec
from agentlightning.store.http.tokens import Scope, sign_token

TOKEN = "a-secret-nobody-may-read"
both_transports = pytest.mark.parametrize("transport", ["http", "ws"])


# ---------------------------------------------------------------------- values and errors


class Question(BaseModel):
    text: str
    choices: set[int] = {1}


@dataclasses.dataclass
class Task:
    question: Question
    weights: tuple[float, ...] = (0.5,)


@both_transports
async def test_models_and_dataclasses_arrive_as_plain_values(transport: str, serve: Any, connect: Any) -> None:
    client = connect((await serve()).endpoint, transport=transport)
    rollout = await client.start_rollout(Task(Question(text="ü")), metadata={"at": Question(text="b")})
    assert rollout.input == {"question": {"text": "ü", "choices": [1]}, "weights": [0.5]}
    assert rollout.metadata == {"at": {"text": "b", "choices": [1]}}


@both_transports
async def test_value_that_json_would_change_is_refused(transport: str, serve: Any, connect: Any) -> None:
    server = await serve()
    client = connect(server.endpoint, transport=transport)

    for value in (math.nan, math.inf, "\ud800", object(), {1: 2}, 2**70):
        with pytest.raises(InvalidValue):
            await client.enqueue_rollout({"deep": [value]})
    with pytest.raises(InvalidValue, match="surrogate"):
        await client.get_rollout_by_id("\ud800")
    with pytest.raises(NotFound):
        await client.start_attempt("nobody")

    assert await server.query_rollouts() == []


class Failing(InMemoryLightningStore):
    async def get_latest_resources(self) -> Any:
        raise LookupError("nothing there")


@both_transports
async def test_foreign_error_says_what_it_was(transport: str, serve: Any, connect: Any) -> None:
    client = connect((await serve(Failing(), token=TOKEN)).endpoint, transport=transport, token=TOKEN)

    with pytest.raises(aiohttp.ClientResponseError) as raised:
        await client.get_latest_resources()

    error: Any = raised.value
    for told in (error, pickle.loads(pickle.dumps(error))):
        assert (told.status, told.error_type, told.detail) == (400, "LookupError", "nothing there")
    assert TOKEN not in repr(error) + str(error)


# ---------------------------------------------------------------------- limits and tokens


@both_transports
async def test_too_large_request_is_refused_in_our_words(transport: str, serve: Any, connect: Any) -> None:
    client = connect((await serve(max_request_bytes=20_000)).endpoint, transport=transport)
    with pytest.raises(PayloadTooLarge):
        await client.enqueue_rollout("x" * 30_000)
    assert (await client.enqueue_rollout("x" * 10_000)).status == "queuing"


async def test_spans_that_are_too_large_for_a_frame_are_encoded_once(
    serve: Any, connect: Any, make_span: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, sizes = OperationCodec.encode_arguments, list[int]()

    def counted(self: OperationCodec, arguments: Any) -> bytes:
        sizes.append(len(encoded := encode(self, arguments)))
        return encoded

    monkeypatch.setattr(OperationCodec, "encode_arguments", counted)
    server = await serve()
    rollout = await server.start_rollout("a")
    span = make_span(rollout).model_copy(update={"attributes": {"text": "x" * 11_000_000}})

    await connect(server.endpoint).add_many_spans([span])

    assert [size for size in sizes if size > 10_000_000] == [sizes[-1]]
    assert len(await server.query_spans(rollout.rollout_id)) == 1


async def test_small_requests_that_share_a_frame_are_no_large_one(serve: Any, connect: Any) -> None:
    client = connect((await serve(max_request_bytes=20_000)).endpoint, transport="ws", retry_delays=())
    await client.statistics()
    enqueued = await asyncio.gather(*[client.enqueue_rollout("x" * 1000) for _ in range(100)])
    assert len({rollout.rollout_id for rollout in enqueued}) == 100


@both_transports
async def test_expired_token_is_what_the_user_is_told(
    transport: str, serve: Any, connect: Any, eventually: Any
) -> None:
    server, expires_at = await serve(token=TOKEN), time.time() + 0.5
    token = sign_token(TOKEN, Scope("runner"), expires_at=expires_at)
    client = connect(server.endpoint, token=token, transport=transport)
    await client.statistics()

    await eventually(lambda: time.time() > expires_at)

    with pytest.raises(InvalidToken):
        await client.statistics()


@pytest.mark.parametrize("status", [500, 503, 408, 403])
async def test_token_is_in_no_log_and_in_no_representation(
    status: int, scripted: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    address, _ = await scripted(status)
    client = connect(address, token=TOKEN)

    with pytest.raises((aiohttp.ClientResponseError, StoreUnavailable)) as failed:
        await client.statistics()
    await client.dequeue_rollout() if status != 403 else None

    assert TOKEN not in caplog.text
    assert TOKEN not in repr(failed.value) + repr(client) + repr(vars(client))
