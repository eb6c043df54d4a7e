"""Claims over the network: the answer holds a token for the claimed attempt alone, and nothing keeps that token."""

import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import NotAllowed
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
)
from agentlightning.store.claims import Claim
from agentlightning.store.http.tokens import ATTEMPT_TOKEN_SECONDS, Scope, describe_token, sign_token, verify_token
from agentlightning.types import Span
from tests.store.http.conftest import Connect, Serve

MASTER = "the-master-token-of-this-server"
every_transport = pytest.mark.parametrize("transport", ["http", "ws"])


def runner_token() -> str:
    return sign_token(MASTER, Scope("runner"), expires_at=None)


def scope_of(claim: Claim) -> Scope:
    return Scope("attempt", claim.rollout.rollout_id, claim.rollout.attempt.attempt_id)


async def claim_of(client: LightningStore, server: LightningStoreServer) -> Claim:
    await server.enqueue_rollout("task")
    (claim,) = await client.claim_rollouts(worker_id="w")
    return claim


async def claim_of_a_finished(client: LightningStoreClient, server: LightningStoreServer) -> Claim:
    claim = await claim_of(client, server)
    await server.enqueue_rollout("the next")
    ids = claim.rollout.rollout_id, claim.rollout.attempt.attempt_id
    following = await client.finish_and_claim(*ids, "succeeded")
    assert following is not None
    return following


@every_transport
@pytest.mark.parametrize("claiming", [claim_of, claim_of_a_finished], ids=["claimed", "claimed with a finish"])
async def test_a_claim_carries_a_token_of_its_attempt(
    serve: Serve, connect: Connect, transport: str, claiming: Any
) -> None:
    server = await serve(token=MASTER)
    claim = await claiming(connect(server.endpoint, token=runner_token(), transport=transport), server)

    assert claim.token is not None
    assert verify_token(MASTER, claim.token, time.time()) == scope_of(claim)
    expires_at = describe_token(claim.token).expires_at
    assert expires_at is not None
    assert abs(expires_at - time.time() - ATTEMPT_TOKEN_SECONDS) < 600


async def test_the_token_of_a_claim_writes_its_spans_and_reads_nothing(serve: Serve, connect: Connect) -> None:
    server = await serve(token=MASTER)
    runner = connect(server.endpoint, token=runner_token())
    claim, other = [await claim_of(runner, server) for _ in range(2)]
    program = connect(server.endpoint, token=claim.token)

    own, foreign = [
        Span.from_attributes(
            attributes={}, rollout_id=found.rollout.rollout_id, attempt_id=found.rollout.attempt.attempt_id
        )
        for found in (claim, other)
    ]
    assert await program.add_span(own) is not None
    for forbidden in (program.add_span(foreign), program.get_latest_resources(), program.query_resources()):
        with pytest.raises(NotAllowed):
            await forbidden


async def test_without_a_token_there_is_none_in_claims(serve: Serve, connect: Connect) -> None:
    server, guarded = await serve(), await serve(token=MASTER)
    claims = [await claim_of(connect(server.endpoint), server), await claim_of(guarded, guarded)]
    assert [claim.token for claim in claims] == [None, None]


async def test_a_repeated_claim_is_signed_again_and_its_token_is_not_kept(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    server = await serve(store, token=MASTER)
    client = connect(server.endpoint, token=runner_token())
    await server.enqueue_rollout("task")

    first, again = [await client.claim_rollouts(worker_id="w", claim_id="0:1") for _ in range(2)]
    await store.close()

    assert first[0].rollout == again[0].rollout
    assert again[0].token is not None
    assert verify_token(MASTER, again[0].token, time.time()) == scope_of(first[0])
    for path in tmp_path.iterdir():
        assert b"agl1." not in path.read_bytes(), path


async def test_a_claim_id_gives_nothing_to_another_token(serve: Serve, connect: Connect) -> None:
    server = await serve(token=MASTER)
    for n in range(2):
        await server.enqueue_rollout(n)
    thief = sign_token(MASTER, Scope("runner"), expires_at=time.time() + 600)

    (claimed,) = await connect(server.endpoint, token=runner_token()).claim_rollouts(worker_id="w", claim_id="0:1")
    (other,) = await connect(server.endpoint, token=thief).claim_rollouts(worker_id="w", claim_id="0:1")

    assert (claimed.rollout.input, other.rollout.input) == (0, 1)


async def test_counters_of_slots_count_behind_a_token_too(serve: Serve, connect: Connect) -> None:
    server = await serve(token=MASTER)
    client = connect(server.endpoint, token=runner_token())
    for n in range(2):
        await server.enqueue_rollout(n)

    claims = [await client.dequeue_rollout("w", claim_id=f"0:{counter}") for counter in (9, 10, 10, 9)]

    assert [claim and claim.input for claim in claims] == [0, 1, 1, None]


async def test_a_runners_token_gives_up_what_was_claimed_with_it_alone(serve: Serve, connect: Connect) -> None:
    server = await serve(token=MASTER)
    own, foreign, master = [
        connect(server.endpoint, token=token)
        for token in (runner_token(), sign_token(MASTER, Scope("runner"), expires_at=time.time() + 600), MASTER)
    ]
    for n in range(4):
        await server.enqueue_rollout(n)
    claims = [await client.dequeue_rollout("w") for client in (own, foreign, master, own)]
    ids = [claim.rollout_id for claim in claims if claim is not None]

    assert list(await own.mark_worker_lost("w", "it died", claimed_with="")) == [ids[3]]  # the last of its slot
    assert list(await own.mark_worker_lost("w", "it died")) == []
    assert list(await foreign.mark_worker_lost("v", "it died")) == []
    assert (await server.get_worker_by_id("w")).status == "unknown"  # type: ignore[union-attr]
    assert list(await foreign.mark_worker_lost("w", "it died")) == [ids[1]]
    assert list(await master.mark_worker_lost("w", "it died")) == [ids[0], ids[2]]


async def test_all_that_a_worker_of_one_token_has_claimed_is_given_up_with_it(serve: Serve, connect: Connect) -> None:
    server = await serve(token=MASTER)
    client = connect(server.endpoint, token=runner_token())
    ids = [(await server.enqueue_rollout(n)).rollout_id for n in range(4)]

    first, *_ = await client.claim_rollouts(worker_id="w", limit=3, claim_id="0:1")
    await client.finish_and_claim(ids[0], first.rollout.attempt.attempt_id, "succeeded", worker_id="w", claim_id="0:2")

    assert list(await client.mark_worker_lost("w", "it stopped")) == ids[1:]


async def test_a_server_before_another_gives_no_token_of_the_other(serve: Serve, connect: Connect) -> None:
    behind = await serve(token=MASTER)
    await behind.enqueue_rollout("task")
    before = await serve(connect(behind.endpoint, token=runner_token()))

    (claim,) = await connect(before.endpoint).claim_rollouts(worker_id="w")

    assert claim.token is None


class OneLongId(LightningStore):
    """A store of somebody else's, whose ids no token can hold."""

    async def claim_rollouts(self, **_: Any) -> list[Claim]:
        claimed = await InMemoryLightningStore().start_rollout("task")
        attempt = claimed.attempt.model_copy(update={"rollout_id": "r" * 5000})
        return [Claim(claimed.model_copy(update={"rollout_id": attempt.rollout_id, "attempt": attempt}))]


async def test_ids_too_long_for_a_token_do_not_stop_a_claim(serve: Serve, connect: Connect) -> None:
    server = await serve(OneLongId(), token=MASTER)
    (claim,) = await connect(server.endpoint, token=runner_token()).claim_rollouts()
    assert claim.token is None


async def test_neither_repr_nor_pickle_of_a_claim_holds_its_secrets() -> None:
    rollout = await InMemoryLightningStore().start_rollout("task")
    claim = Claim(rollout, token="agl1.secret", proxy_keys={"agl-proxyref-1": "agl-attempt-secret"})

    copy = pickle.loads(pickle.dumps(claim))

    assert (copy, copy.token, dict(copy.proxy_keys)) == (claim, None, {})
    assert "secret" not in repr(claim)
    assert b"secret" not in pickle.dumps(claim)
