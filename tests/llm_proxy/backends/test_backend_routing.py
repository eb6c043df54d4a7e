"""Which backend a call goes to."""

from collections import Counter

import pytest

from agentlightning.llm_proxy.backends import BackendPool, UnknownModel, VersionNotServed
from tests.llm_proxy.backends.conftest import MakePool, Serve
from tests.llm_proxy.backends.fake_clock import request_for
from tests.stub_model.server import StubModel

WHOS = [f"rollout-{number}" for number in range(100)]


async def homes_of(pool: BackendPool, whos: list[str]) -> dict[str, str]:
    """Where the call of each rollout was answered."""
    homes = {}
    for who in whos:
        async with await pool.send(request_for(who=who)) as answer:
            homes[who] = answer.backend.base_url
    return homes


async def test_any_stretch_of_calls_keeps_close_to_the_weights(serve: Serve, make_pool: MakePool) -> None:
    light, heavy = await serve(), await serve()
    pool = make_pool(light.entry(weight=1), heavy.entry(weight=3))

    for sent in range(1, 25):
        async with await pool.send(request_for()) as answer:
            await answer.read()
        assert abs(len(heavy.requests) - 0.75 * sent) <= 1


async def test_calls_of_nobody_go_where_least_is_going_on(serve: Serve, make_pool: MakePool) -> None:
    pool = make_pool(await serve(), await serve())

    first = await pool.send(request_for())
    others = [await pool.send(request_for()) for _ in range(3)]

    assert Counter(answer.backend.name for answer in [first, *others]).most_common()[0][1] == 2
    await others[0].close()
    again = await pool.send(request_for())
    assert again.backend.name == others[0].backend.name
    for answer in (first, *others[1:], again):
        await answer.close()


async def test_rollout_stays_with_its_backend(serve: Serve, make_pool: MakePool) -> None:
    pool = make_pool(*[await serve() for _ in range(4)])

    first = await homes_of(pool, WHOS)

    assert await homes_of(pool, list(reversed(WHOS))) == first
    assert all(8 <= count <= 45 for count in Counter(first.values()).values())


async def test_weights_rule_where_rollouts_live(serve: Serve, make_pool: MakePool) -> None:
    light, heavy = await serve(), await serve()
    pool = make_pool(light.entry(weight=1), heavy.entry(weight=4))

    await homes_of(pool, WHOS)

    assert 62 <= len(heavy.requests) <= 97


async def test_only_rollouts_of_a_backend_that_dies_move(serve: Serve, make_pool: MakePool) -> None:
    servers: list[StubModel] = [await serve() for _ in range(4)]
    pool = make_pool(*servers)
    before = await homes_of(pool, WHOS)

    await servers[0].stop()
    during = await homes_of(pool, WHOS)

    stayed = {who for who in WHOS if before[who] != servers[0].openai_url}
    assert {who: during[who] for who in stayed} == {who: before[who] for who in stayed}
    assert len({during[who] for who in WHOS if who not in stayed}) == 3
    assert len([entry for entry in pool.describe() if entry["breaker"] == "open"]) == 1


async def test_unknown_model_lists_those_there_are(make_pool: MakePool, serve: Serve) -> None:
    server = await serve()
    pool = make_pool(server.entry("a"), server.entry("b"), server.entry("a"))

    with pytest.raises(UnknownModel, match=r"'c'.* 'a', 'b'") as caught:
        await pool.send(request_for("c"))

    assert caught.value.http_status == 404
    assert pool.models() == ["a", "b"]


async def test_pattern_serves_what_has_no_name_of_its_own(make_pool: MakePool, serve: Serve) -> None:
    server = await serve()
    entries = [server.entry("*"), server.entry("openai/*"), server.entry("openai/special")]
    for entry in entries[:2]:
        entry["litellm_params"]["model"] = "hosted_vllm/*"
    pool = make_pool(*entries)

    seen = {}
    for asked in ("other", "openai/gpt", "openai/special"):
        async with await pool.send(request_for(asked)) as answer:
            seen[asked] = (answer.backend.model_name, answer.backend.model)

    assert seen == {
        "other": ("*", "other"),
        "openai/gpt": ("openai/*", "gpt"),
        "openai/special": ("openai/special", "up"),
    }


async def test_pinned_call_is_served_by_its_version_alone(make_pool: MakePool, serve: Serve) -> None:
    server = await serve()
    pool = make_pool(*({**server.entry(), "resources_id": version} for version in ("v1", "v2")))

    served = {}
    for pin in ("v1", "v2", None):
        async with await pool.send(request_for(resources_id=pin)) as answer:
            served[pin] = answer.backend.resources_id

    assert served == {"v1": "v1", "v2": "v2", None: "v2"}
    with pytest.raises(VersionNotServed, match=r"'m' is not served for resources 'v3'; .*'v1', 'v2'") as caught:
        await pool.send(request_for(resources_id="v3"))
    assert caught.value.http_status == 409


async def test_calls_without_a_pin_may_go_to_backends_of_no_version(make_pool: MakePool, serve: Serve) -> None:
    old, latest, free = await serve(), await serve(), await serve()
    pool = make_pool({**old.entry(), "resources_id": "v1"}, {**latest.entry(), "resources_id": "v2"}, free)

    await homes_of(pool, WHOS[:40])

    assert old.requests == []
    assert latest.requests
    assert free.requests


async def test_pin_means_nothing_where_no_backend_has_a_version(make_pool: MakePool, serve: Serve) -> None:
    pool = make_pool(await serve())

    async with await pool.send(request_for(resources_id="v3")) as answer:
        assert answer.status == 200
