"""Plain functions as algorithms: what a function works with is handed to it by the name of the parameter.

    @algo
    async def algorithm(*, store, train_dataset): ...

A function that is not a coroutine function gets a store whose operations block, so that it need not await them, also
where it is called by hand with `store=`.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import closing, nullcontext
from typing import Any

from agentlightning.algorithm.base import Algorithm, Tasks
from agentlightning.store.base import LightningStore
from agentlightning.store.forwarding import BlockingStore
from agentlightning.types import NamedResources
from agentlightning.utils.json_values import JsonObject

__all__ = ["FunctionalAlgorithm", "algo"]


class FunctionalAlgorithm(Algorithm):
    """A function as an algorithm; calling it calls the function."""

    def __init__(self, algorithm_func: Callable[..., Any]) -> None:
        self._algorithm_func = algorithm_func
        self._parameters = frozenset(inspect.signature(algorithm_func).parameters)
        functools.update_wrapper(self, algorithm_func)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._algorithm_func)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        store = kwargs.get("store")
        if self.is_async() or not isinstance(store, LightningStore):
            return self._algorithm_func(*args, **kwargs)
        with closing(BlockingStore(store)) as blocking:
            return self._algorithm_func(*args, **{**kwargs, "store": blocking})

    def run(
        self, train_dataset: Tasks | None = None, val_dataset: Tasks | None = None
    ) -> None | Coroutine[Any, Any, None]:
        """Call the function with what it declares; a data set that it does not declare is a TypeError."""
        arguments: JsonObject = {}
        for name, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
            if name in self._parameters:
                arguments[name] = dataset
            elif dataset is not None:
                function = getattr(self._algorithm_func, "__name__", repr(self._algorithm_func))
                raise TypeError(
                    f"{name} is provided but not supported by {function}; add a parameter of that name to it."
                )
        for name in ("adapter", "llm_proxy", "initial_resources"):
            if name in self._parameters:
                arguments[name] = getattr(self, f"get_{name}")()
        if self.is_async():
            own = {"store": self.get_store()} if "store" in self._parameters else {}
            result: Coroutine[Any, Any, None] = self._algorithm_func(**arguments, **own)
            return result
        with self.blocking_store() if "store" in self._parameters else nullcontext() as store:
            self._algorithm_func(**arguments, **({} if store is None else {"store": store}))
        return None

    def dev_resources(self) -> NamedResources | None:
        """What `Trainer.dev` has agents run with: the initial resources. The function itself is not called."""
        return self.get_initial_resources()


def algo(func: Callable[..., object]) -> FunctionalAlgorithm:
    """Make an algorithm of a function, plain or a coroutine function."""
    return FunctionalAlgorithm(func)
