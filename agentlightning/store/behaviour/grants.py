"""Grants: what the store gave out under an id that the caller made, so that a repeated call gives it out again.

What is created bears the id its creator gave it, and needs no more. Work and sequence ids are given out instead: which
of them a call got is kept here for ten minutes, also that it got nothing, so that a late copy takes nothing either.
"""

from collections.abc import Sequence
from typing import Any, Final

from agentlightning.errors import InvalidValue, RequestConflict
from agentlightning.store.claims import Grant, GrantKind
from agentlightning.store.transaction import Transaction

MOST_ID_CHARACTERS: Final = 256


def find_grant(tx: Transaction, kind: GrantKind, grant_id: str, worker_id: str | None = None) -> Grant | None:
    """What was given out under this id to this worker; None if nothing was asked for under it yet."""
    if not 0 < len(grant_id) <= MOST_ID_CHARACTERS:
        raise InvalidValue(
            f"The id '{grant_id[:20]}…' has {len(grant_id)} characters; give one of 1 to {MOST_ID_CHARACTERS}."
        )
    grant = tx.get(Grant, grant_id)
    if grant is not None and (grant.kind, grant.worker_id) != (kind, worker_id):
        raise RequestConflict(f"The id '{grant_id}' was used for something else; give every call an id of its own.")
    return grant


def put_grant(
    tx: Transaction, now: float, kind: GrantKind, grant_id: str, worker_id: str | None, given: Sequence[Any]
) -> None:
    """Note what was given out under an id."""
    tx.put(Grant(grant_id=grant_id, kind=kind, worker_id=worker_id, time=now, given=list(given)))
