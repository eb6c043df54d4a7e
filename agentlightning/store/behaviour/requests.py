"""What the store does with the answers it keeps for requests that may come again."""

from collections.abc import Sequence

from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour.rollouts import return_claim
from agentlightning.store.operations import operations_of
from agentlightning.store.transaction import Answer, Transaction

__all__ = ["abandon_request", "forget_requests"]

CLAIMS = ("dequeue_rollout", "dequeue_many_rollouts")
ABANDONED = Answer("abandon_request", b"null")
"""Kept in the place of an answer, so that a request which arrives after it was abandoned claims nothing."""


def abandon_request(tx: Transaction, now: float, request_id: str) -> bool:
    answer = tx.get_answer(request_id, now)
    if answer is not None and answer.operation not in CLAIMS:
        return False
    tx.put_answer(request_id, ABANDONED, now)
    if answer is None:
        return False
    found = operations_of(LightningStore)[answer.operation].decode_result(answer.body)
    claims = found if isinstance(found, list) else [found] if found is not None else []
    for claim in claims:
        return_claim(tx, now, claim)
    return bool(claims)


def forget_requests(tx: Transaction, now: float, request_ids: Sequence[str]) -> None:
    tx.drop_answers(request_ids)
