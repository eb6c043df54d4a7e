"""Plain functions as algorithms: what a function works with is handed to it by the name of the parameter.

    @algo
    async def algorithm(*, store, train_dataset): ...

A function that is not a coroutine function gets a store whose operations block, so that it need not await them, also
where it is called by hand with `store=`.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import closing
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
                raise TypeError(
                    f"{name} is provided but not supported by {self._name}; add a parameter of that name to it."
                )
        if "adapter" in self._parameters:
            arguments["adapter"] = self.get_adapter()
        if "llm_proxy" in self._parameters:
            arguments["llm_proxy"] = self.get_llm_proxy()
        if "initial_resources" in self._parameters:
            arguments["initial_resources"] = self.get_initial_resources()
        if "store" not in self._parameters:
            return self._call(arguments)
        if self.is_async():
            return self._call({**arguments, "store": self.get_store()})
        with self.blocking_store() as store:
            return self._call({**arguments, "store": store})

    def _call(self, arguments: JsonObject) -> None | Coroutine[Any, Any, None]:
        """A coroutine for whoever awaits it; what a plain function returns is of no use."""
        result = self._algorithm_func(**arguments)
        return result if self.is_async() else None

    def dev_resources(self) -> NamedResources | None:
        """What `Trainer.dev` has agents run with: the initial resources. The function itself is not called."""
        return self.get_initial_resources()

    @property
    def _name(self) -> str:
        return getattr(self._algorithm_func, "__name__", repr(self._algorithm_func))


def algo(func: Callable[..., object]) -> FunctionalAlgorithm:
    """Make an algorithm of a function, plain or a coroutine function."""
    return FunctionalAlgorithm(func)
