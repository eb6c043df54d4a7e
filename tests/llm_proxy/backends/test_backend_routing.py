"""Which backend a call goes to."""

from collections import Counter

import pytest

from agentlightning.llm_proxy.backends import BackendUnavailable, Fleet, UnknownModel, VersionNotServed
from tests.llm_proxy.backends.conftest import MakeFleet, Serve
from tests.llm_proxy.backends.turned_clock import ask_for
from tests.stub_model.server import StubModel

WHOS = [f"rollout-{number}" for number in range(200)]


async def homes_of(fleet: Fleet, whos: list[str]) -> dict[str, str]:
    """Where the call of each rollout was answered."""
    homes = {}
    for who in whos:
        async with await fleet.ask(ask_for(who=who)) as answer:
            homes[who] = answer.backend.base_url
    return homes


async def test_calls_of_nobody_are_shared_by_weight(serve: Serve, make_fleet: MakeFleet) -> None:
    servers = [await serve() for _ in range(3)]
    fleet = make_fleet(*(server.entry(weight=weight) for server, weight in zip(servers, (1, 2, 5), strict=True)))

    for _ in range(80):
        async with await fleet.ask(ask_for()) as answer:
            await answer.read()

    assert [len(server.requests) for server in servers] == [10, 20, 50]


async def test_any_stretch_of_calls_keeps_close_to_the_weights(serve: Serve, make_fleet: MakeFleet) -> None:
    light, heavy = await serve(), await serve()
    fleet = make_fleet(light.entry(weight=1), heavy.entry(weight=3))

    for sent in range(1, 25):
        async with await fleet.ask(ask_for()) as answer:
            await answer.read()
        assert abs(len(heavy.requests) - 0.75 * sent) <= 1


async def test_calls_of_nobody_go_where_least_is_going_on(serve: Serve, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(await serve(), await serve())

    first = await fleet.ask(ask_for())
    others = [await fleet.ask(ask_for()) for _ in range(3)]

    assert Counter(answer.backend.name for answer in [first, *others]).most_common()[0][1] == 2
    await others[0].close()
    again = await fleet.ask(ask_for())
    assert again.backend.name == others[0].backend.name
    for answer in (first, *others[1:], again):
        await answer.close()


async def test_rollout_stays_with_its_backend(serve: Serve, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(*[await serve() for _ in range(4)])

    first = await homes_of(fleet, WHOS)

    assert await homes_of(fleet, list(reversed(WHOS))) == first
    assert all(20 <= count <= 80 for count in Counter(first.values()).values())


async def test_weights_rule_where_rollouts_live(serve: Serve, make_fleet: MakeFleet) -> None:
    light, heavy = await serve(), await serve()
    fleet = make_fleet(light.entry(weight=1), heavy.entry(weight=4))

    await homes_of(fleet, WHOS)

    assert 125 <= len(heavy.requests) <= 190


async def test_only_rollouts_of_a_backend_that_dies_move(serve: Serve, make_fleet: MakeFleet) -> None:
    servers: list[StubModel] = [await serve() for _ in range(4)]
    fleet = make_fleet(*servers)
    before = await homes_of(fleet, WHOS)

    await servers[0].stop()
    during = await homes_of(fleet, WHOS)

    stayed = {who for who in WHOS if before[who] != servers[0].openai_url}
    assert {who: during[who] for who in stayed} == {who: before[who] for who in stayed}
    assert len({during[who] for who in WHOS if who not in stayed}) == 3
    assert len([entry for entry in fleet.describe() if entry["breaker"] == "open"]) == 1


async def test_unknown_model_lists_those_there_are(make_fleet: MakeFleet, serve: Serve) -> None:
    server = await serve()
    fleet = make_fleet(server.entry("a"), server.entry("b"), server.entry("a"))

    with pytest.raises(UnknownModel, match=r"'c'.* 'a', 'b'") as caught:
        await fleet.ask(ask_for("c"))

    assert caught.value.status == 404
    assert fleet.models() == ["a", "b"]


async def test_pattern_serves_what_has_no_name_of_its_own(make_fleet: MakeFleet, serve: Serve) -> None:
    server = await serve()
    entries = [server.entry("*"), server.entry("openai/*"), server.entry("openai/special")]
    for entry in entries[:2]:
        entry["litellm_params"]["model"] = "hosted_vllm/*"
    fleet = make_fleet(*entries)

    seen = {}
    for asked in ("other", "openai/gpt", "openai/special"):
        async with await fleet.ask(ask_for(asked)) as answer:
            seen[asked] = (answer.backend.model_name, answer.backend.model)

    assert seen == {
        "other": ("*", "other"),
        "openai/gpt": ("openai/*", "gpt"),
        "openai/special": ("openai/special", "up"),
    }


async def test_pinned_call_is_served_by_its_version_alone(make_fleet: MakeFleet, serve: Serve) -> None:
    server = await serve()
    fleet = make_fleet(*({**server.entry(), "resources_id": version} for version in ("v1", "v2")))

    served = {}
    for pin in ("v1", "v2", None):
        async with await fleet.ask(ask_for(resources_id=pin)) as answer:
            served[pin] = answer.backend.resources_id

    assert served == {"v1": "v1", "v2": "v2", None: "v2"}
    with pytest.raises(VersionNotServed, match=r"'m' is not served for resources 'v3'; .*'v1', 'v2'") as caught:
        await fleet.ask(ask_for(resources_id="v3"))
    assert caught.value.status == 409


async def test_calls_without_a_pin_may_go_to_backends_of_no_version(make_fleet: MakeFleet, serve: Serve) -> None:
    old, latest, free = await serve(), await serve(), await serve()
    fleet = make_fleet({**old.entry(), "resources_id": "v1"}, {**latest.entry(), "resources_id": "v2"}, free)

    await homes_of(fleet, WHOS[:40])

    assert old.requests == []
    assert latest.requests
    assert free.requests


async def test_pin_means_nothing_where_no_backend_has_a_version(make_fleet: MakeFleet, serve: Serve) -> None:
    fleet = make_fleet(await serve())

    async with await fleet.ask(ask_for(resources_id="v3")) as answer:
        assert answer.status == 200


async def test_model_without_any_backend_in_use_fails_fast(make_fleet: MakeFleet, serve: Serve) -> None:
    server = await serve()
    await server.stop()
    fleet = make_fleet(server)
    for _ in range(5):
        with pytest.raises(BackendUnavailable, match="cannot be reached"):
            await fleet.ask(ask_for())

    with pytest.raises(BackendUnavailable, match=r"out of use for another .* cannot be reached") as caught:
        await fleet.ask(ask_for())

    assert caught.value.tries == []
    assert caught.value.status == 503
    assert caught.value.retry_after_seconds == pytest.approx(10, abs=1)
