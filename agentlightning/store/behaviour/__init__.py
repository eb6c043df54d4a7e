"""What each store operation does, as plain functions `(transaction, now, arguments…)`; all behaviour, no storage.

`BEHAVIOURS` maps the name of an operation to its function, which has the same name and the arguments of the contract in
`store/base.py`. To wait is the store's business, and not the transaction's.
"""

from collections.abc import Callable
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour import attempts, claims, records, rollouts, spans
from agentlightning.store.operations import operations_of

__all__ = ["BEHAVIOURS"]

_MODULES = (rollouts, attempts, claims, spans, records)

BEHAVIOURS: dict[str, Callable[..., Any]] = {
    name: vars(module)[name] for name in operations_of(LightningStore) for module in _MODULES if name in vars(module)
}
