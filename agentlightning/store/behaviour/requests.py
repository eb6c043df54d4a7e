"""What the store does with the answers it keeps for requests that may come again."""

from collections.abc import Sequence
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour.claims import return_claims
from agentlightning.store.claims import Claim
from agentlightning.store.operations import operations_of
from agentlightning.store.request_ids import check_request_id
from agentlightning.store.transaction import Answer, Transaction
from agentlightning.types import AttemptedRollout

__all__ = ["CLAIMS", "abandon_request", "claimed_ids", "forget_requests"]

CLAIMS = ("dequeue_rollout", "dequeue_many_rollouts", "claim_rollouts", "finish_and_claim")
"""Operations that give out rollouts."""
ABANDONED = Answer("abandon_request", b"null")
"""Kept in the place of an answer, so that a request which arrives after it was abandoned claims nothing."""


def abandon_request(tx: Transaction, now: float, request_id: str) -> bool:
    check_request_id(request_id)
    answer = tx.get_answer(request_id, now)
    if answer is not None and answer.operation not in CLAIMS:
        return False
    tx.put_answer(request_id, ABANDONED, now)
    if answer is None:
        return False
    found = operations_of(LightningStore)[answer.operation].decode_result(answer.body)
    ids = claimed_ids(found)
    return_claims(tx, now, ids)
    return bool(ids)


def claimed_ids(answer: Any) -> list[tuple[str, str]]:
    """Ids of rollout and attempt of what one of `CLAIMS` gave out."""
    given = answer if isinstance(answer, list) else [answer] if answer is not None else []
    rollouts: list[AttemptedRollout] = [claim.rollout if isinstance(claim, Claim) else claim for claim in given]
    return [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in rollouts]


def forget_requests(tx: Transaction, now: float, request_ids: Sequence[str]) -> None:
    tx.drop_answers(request_ids)
