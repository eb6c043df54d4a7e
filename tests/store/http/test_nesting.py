"""Bodies that are nested deeply: refused in words, before anything is stored."""

import logging
from typing import Any

import aiohttp

from agentlightning.store import LightningStoreServer
from agentlightning.utils.json_values import MOST_LEVELS

BODIES = {
    "/v1/agl/rollouts": '{"input": %s}',
    "/v1/agl/queues/rollouts/enqueue-one": '{"input": %s}',
    "/v1/agl/resources": '{"resources": {"p": %s}}',
    "/v1/agl/runs": '{"config": {"a": %s}}',
    "/v1/agl/workers/w": '{"heartbeat_stats": {"a": %s}}',
    "/v1/agl/spans": '{"rollout_id": "r", "attempt_id": "a", "sequence_id": 1, "name": "s", "attributes": {"a": %s}}',
}


def nested(levels: int, *, has_siblings: bool = False) -> str:
    return ("[[]," if has_siblings else "[") * levels + "1" + "]" * levels


async def test_a_body_nested_too_deeply_is_refused_in_words(
    server: LightningStoreServer, session: aiohttp.ClientSession, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        for path, body in BODIES.items():
            for value in (nested(MOST_LEVELS + 1), nested(900), nested(300, has_siblings=True)):
                async with session.post(server.endpoint + path, data=body % value) as response:
                    told = await response.json()

                assert (response.status, told["error_type"]) == (400, "InvalidValue"), path
                assert "more than 200 levels deep" in told["detail"], path
    assert caplog.records == []


async def test_a_long_number_in_a_deep_body_is_no_other_matter(
    server: LightningStoreServer, session: aiohttp.ClientSession, caplog: Any
) -> None:
    body = BODIES["/v1/agl/rollouts"] % nested(990).replace("1", "1234567890123456789")
    async with session.post(f"{server.endpoint}/v1/agl/rollouts", data=body) as response:
        assert (response.status, (await response.json())["error_type"]) == (400, "InvalidValue")
    assert caplog.records == []


async def test_a_live_call_that_is_nested_too_deeply_fails_alone(server: LightningStoreServer) -> None:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.endpoint}/v1/agl/live") as channel:
        arguments = BODIES["/v1/agl/queues/rollouts/enqueue-one"] % nested(300)
        await channel.send_str('[{"id": 1, "op": "enqueue_rollout", "args": ' + arguments + "}]")
        refused = await channel.receive_json(timeout=30)
        await channel.send_str('{"id": 2, "op": "statistics"}')
        served = await channel.receive_json(timeout=30)

    assert (refused[0]["error"]["error_type"], "result" in served[0]) == ("InvalidValue", True)


async def test_a_live_call_that_is_nested_deeply_and_too_large_fails_alone(serve: Any) -> None:
    server = await serve(max_request_bytes=20_000)
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.endpoint}/v1/agl/live") as channel:
        arguments = '{"input": [' + nested(300) + ', "' + "x" * 30_000 + '"]}'
        await channel.send_str('{"id": 1, "op": "enqueue_rollout", "args": ' + arguments + "}")
        refused = await channel.receive_json(timeout=30)

    assert refused[0]["error"]["error_type"] == "InvalidValue"


async def test_what_is_nested_less_deeply_can_be_read_again(serve: Any, session: aiohttp.ClientSession) -> None:
    server = await serve()
    body = BODIES["/v1/agl/rollouts"] % nested(MOST_LEVELS - 1)  # and the object around it

    async with session.post(f"{server.endpoint}/v1/agl/rollouts", data=body) as response:
        assert response.status == 201
    async with session.get(f"{server.endpoint}/v1/agl/rollouts") as response:
        assert response.status == 200


async def test_the_limit_of_a_live_call_counts_its_arguments_alone(server: LightningStoreServer) -> None:
    told = []
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.endpoint}/v1/agl/live") as channel:
        for levels in (MOST_LEVELS - 1, MOST_LEVELS):  # and the object around it
            arguments = BODIES["/v1/agl/queues/rollouts/enqueue-one"] % nested(levels)
            await channel.send_str('[{"id": 1, "op": "enqueue_rollout", "args": ' + arguments + "}]")
            told += await channel.receive_json(timeout=30)

    assert ["error" in message for message in told] == [False, True]


async def test_a_span_of_brackets_alone_counts_with_what_is_around_it(
    server: LightningStoreServer, session: aiohttp.ClientSession
) -> None:
    body = '{"a": ' + nested(MOST_LEVELS - 1) + "}"
    async with session.post(f"{server.endpoint}/v1/agl/spans", data=body) as response:
        assert "more than 200 levels deep" in (await response.json())["detail"]
