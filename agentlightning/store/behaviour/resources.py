"""What the store does with resources."""

import logging

from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import InvalidValue, RequestConflict
from agentlightning.store.behaviour.rollouts import LATEST_RESOURCES, latest_resources_id
from agentlightning.store.selection import Selection
from agentlightning.store.transaction import Setting, Transaction
from agentlightning.types import NamedResources, PaginatedResult, ResourcesUpdate
from agentlightning.utils.id import resources_id as new_resources_id

logger = logging.getLogger(__name__)

RESOURCES_FIELDS = frozenset(ResourcesUpdate.model_fields) - {"resources"}
"""Fields a query may filter and sort by."""

_RESOURCES: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)


def add_resources(
    tx: Transaction, now: float, resources: NamedResources, *, resources_id: str | None = None
) -> ResourcesUpdate:
    existing = None if resources_id is None else tx.get(ResourcesUpdate, resources_id)
    return existing or _publish(tx, now, resources_id or new_resources_id(), resources, None)


def update_resources(
    tx: Transaction,
    now: float,
    resources_id: str,
    resources: NamedResources,
    *,
    merge: bool = False,
    version: int | None = None,
) -> ResourcesUpdate:
    previous = tx.get(ResourcesUpdate, resources_id)
    if merge and previous is not None:
        resources = {**previous.resources, **resources}
    latest = previous.version if previous is not None else 0
    if version is not None and version != latest + 1:
        if previous is not None and version == latest and previous.resources == _own_copy(resources):
            return previous
        raise RequestConflict(
            f"Resources '{resources_id}' are at version {latest}, so version {version} cannot be published; "
            "read what they are now, and give the number that follows."
        )
    return _publish(tx, now, resources_id, resources, previous)


def _publish(
    tx: Transaction, now: float, resources_id: str, resources: NamedResources, previous: ResourcesUpdate | None
) -> ResourcesUpdate:
    update = ResourcesUpdate(
        resources_id=resources_id,
        resources=_own_copy(resources),
        create_time=previous.create_time if previous else now,
        update_time=now,
        version=previous.version + 1 if previous else 1,
    )
    tx.put(update)
    tx.put(Setting(LATEST_RESOURCES, resources_id))
    tx.note("resources", name=resources_id, number=update.version)
    logger.debug("Resources %s, version %d, are published: %s.", resources_id, update.version, list(update.resources))
    return update


def _own_copy(resources: NamedResources) -> NamedResources:
    try:
        checked = _RESOURCES.validate_python(resources)
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InvalidValue(
            f"These are not resources (names mapped to LLM, ProxyLLM or PromptTemplate): {reason}."
        ) from error
    return {name: resource.model_copy(deep=True) for name, resource in checked.items()}


def get_resources_by_id(tx: Transaction, now: float, resources_id: str) -> ResourcesUpdate | None:
    return tx.get(ResourcesUpdate, resources_id)


def get_latest_resources(tx: Transaction, now: float) -> ResourcesUpdate | None:
    latest = latest_resources_id(tx)
    return None if latest is None else tx.get(ResourcesUpdate, latest)


def query_resources(tx: Transaction, now: float, **asked: object) -> PaginatedResult[ResourcesUpdate]:
    return tx.select(ResourcesUpdate, Selection.of(asked, RESOURCES_FIELDS))
