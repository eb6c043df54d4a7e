"""Credentials in answers: who reads the keys of resources, and which a claim brings to its attempt.

An admin reads everything. A runner reads the keys of models, which its agents need, but in the place of an LLM proxy's
secret a reference, which opens nothing: the answer to a claim brings the attempt's own keys by these references, and a
token for the attempt. Everybody else reads `***`. So do both in runs of stores that have kept secrets of their
configurations.

All this is done after the store has answered, when an answer is about to be written, so that no store keeps what is
made here: an answer that is given again is signed again.
"""

import hmac
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from agentlightning.errors import ConfigurationError
from agentlightning.store.base import LightningStore
from agentlightning.store.claims import Claim, ResourcesVersion
from agentlightning.store.copies import replaced
from agentlightning.store.http.tokens import Scope, sign_for_attempt
from agentlightning.types import LLM, AttemptedRollout, PaginatedResult, ResourcesUpdate, Run
from agentlightning.types.resources import (
    PINNED_RESOURCES,
    PROXY_REFERENCE_PREFIX,
    PROXY_SECRET_PREFIX,
    derive_attempt_key,
)
from agentlightning.utils.secret_names import MASK, masked

logger = logging.getLogger(__name__)

MOST_VERSIONS: Final = 256
"""Versions of resources whose proxies' secrets are remembered."""
_REFERENCE_PURPOSE: Final = b"agentlightning reference to a proxy's secret, format 1\n"
_REFERENCE_BYTES: Final = 12


class AnswerCredentials:
    """Takes keys out of the answers of one server, and puts those of attempts in."""

    def __init__(self, store: LightningStore, token: str | None) -> None:
        self._store = store
        self._token = token
        self._secrets_by_version: OrderedDict[ResourcesVersion, frozenset[str]] = OrderedDict()

    async def shown_to(self, scope: Scope, result: object) -> Any:
        """The result of an operation as the caller is to see it; what the store gave is not changed."""
        if isinstance(result, Claim):
            return await self._claim(result, scope)
        if isinstance(result, ResourcesUpdate):
            return self._resources(result, scope)
        if isinstance(result, Run) and scope.kind != "admin":
            secret = {"config": result.config, "metadata": result.metadata, "summary": result.summary}
            return replaced(result, **masked(secret))
        items = result.items if isinstance(result, PaginatedResult) else result
        if not isinstance(items, Sequence) or not items or not isinstance(items[0], (Claim, ResourcesUpdate, Run)):
            return result
        shown = [await self.shown_to(scope, item) for item in items]
        return replaced(result, items=shown) if isinstance(result, PaginatedResult) else shown

    # ------------------------------------------------------------------ resources

    def _resources(self, update: ResourcesUpdate, scope: Scope) -> ResourcesUpdate:
        if scope.kind == "admin":
            return update
        shown = {name: self._resource(resource, scope) for name, resource in update.resources.items()}
        return replaced(update, resources=shown)

    def _resource(self, resource: object, scope: Scope) -> object:
        if not isinstance(resource, LLM):
            return resource
        if scope.kind == "runner":
            is_secret = resource.api_key is not None and resource.api_key.startswith(PROXY_SECRET_PREFIX)
            return replaced(resource, api_key=self._reference(resource.api_key)) if is_secret else resource
        key = MASK if resource.api_key else resource.api_key
        return replaced(resource, api_key=key, sampling_parameters=masked(resource.sampling_parameters))

    def _reference(self, secret: str | None) -> str:
        """The same for the same secret; made with the master token, or a weak secret could be guessed from it."""
        key, content = (self._token or "").encode(), _REFERENCE_PURPOSE + (secret or "").encode()
        return PROXY_REFERENCE_PREFIX + hmac.digest(key, content, "sha256")[:_REFERENCE_BYTES].hex()

    # ------------------------------------------------------------------ claims

    async def _claim(self, claim: Claim, scope: Scope) -> Claim:
        token = None if self._token is None else _attempt_token(self._token, claim.rollout)
        if scope.kind == "admin":
            return claim if claim.token == token else replace(claim, token=token)
        keys = {**claim.proxy_keys, **await self._proxy_keys(claim)}
        resources = None if claim.resources is None else self._resources(claim.resources, scope)
        return replace(claim, resources=resources, token=token, proxy_keys=keys)

    async def _proxy_keys(self, claim: Claim) -> dict[str, str]:
        """The attempt's keys for all proxies that its resources lead to, by references to the proxies' secrets."""
        secrets = set(await self._secrets_of(claim))
        pins: object = (claim.rollout.metadata or {}).get(PINNED_RESOURCES)
        for pin in pins.values() if isinstance(pins, Mapping) else ():  # of agents; of odd ones their side complains
            secrets |= secrets_in(await self._store.get_resources_by_id(pin)) if isinstance(pin, str) else set()
        ids = claim.rollout.rollout_id, claim.rollout.attempt.attempt_id
        return {self._reference(secret): derive_attempt_key(secret, *ids) for secret in secrets}

    async def _secrets_of(self, claim: Claim) -> frozenset[str]:
        """The proxies' secrets in the resources of a claim, also where it leaves them out because they are known."""
        version, known = claim.version, self._secrets_by_version
        if version is None:
            return frozenset()
        if version in known and claim.resources is None:
            known.move_to_end(version)
            return known[version]
        update = claim.resources or await self._store.get_resources_by_id(version[0])
        secrets = secrets_in(update)
        if update is not None and update.version == version[1]:  # not replaced since the claim
            known[version] = secrets
            while len(known) > MOST_VERSIONS:
                known.popitem(last=False)
        return secrets


def _attempt_token(master: str, rollout: AttemptedRollout) -> str | None:
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    try:
        return sign_for_attempt(master, rollout_id, attempt_id)
    except ConfigurationError as error:  # such as an id too long; the work itself can be done
        logger.warning("Attempt '%.80s' is given out without a token: %s", attempt_id, type(error).__name__)
        return None


def secrets_in(update: ResourcesUpdate | None) -> frozenset[str]:
    """The secrets of LLM proxies in resources."""
    resources = () if update is None else update.resources.values()
    return frozenset(
        key for llm in resources if isinstance(llm, LLM) and (key := llm.api_key or "").startswith(PROXY_SECRET_PREFIX)
    )
