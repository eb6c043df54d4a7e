"""Credentials in answers: a claim gets those of its attempt.

They are added after the store has answered, when an answer is about to be written, so that no store keeps them: an
answer that is given again is signed again.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentlightning.errors import ConfigurationError
from agentlightning.store.claims import Claim
from agentlightning.store.http.tokens import Scope, sign_for_attempt

__all__ = ["AnswerCredentials"]

logger = logging.getLogger(__name__)


class AnswerCredentials:
    """Writes credentials into the answers of one server."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def shown_to(self, scope: Scope, result: Any) -> Any:
        """The result of an operation as the caller is to see it; what the store gave is not changed."""
        if isinstance(result, Claim):
            return await self._claim(result)
        if isinstance(result, Sequence) and result and isinstance(result[0], Claim):
            return [await self._claim(claim) for claim in result]
        return result

    async def _claim(self, claim: Claim) -> Claim:
        return replace(claim, token=self._token_for(claim))

    def _token_for(self, claim: Claim) -> str | None:
        if self._token is None:
            return None
        rollout_id, attempt_id = claim.rollout.rollout_id, claim.rollout.attempt.attempt_id
        try:
            return sign_for_attempt(self._token, rollout_id, attempt_id)
        except ConfigurationError as error:  # such as an id too long; the work itself can be done
            logger.warning("Attempt '%.80s' is given out without a token: %s", attempt_id, type(error).__name__)
            return None
