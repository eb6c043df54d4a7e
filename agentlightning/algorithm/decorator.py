"""Plain functions as algorithms: what a function works with is handed to it by the name of the parameter.

    @algo
    async def algorithm(*, store, train_dataset): ...

A function that is not a coroutine function gets a store whose operations block, so that it need not await them.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from agentlightning.algorithm.base import Algorithm
from agentlightning.store.forwarding import BlockingStore
from agentlightning.types import Dataset

__all__ = ["FunctionalAlgorithm", "algo"]


class FunctionalAlgorithm(Algorithm):
    """A function as an algorithm; calling it calls the function."""

    def __init__(self, algorithm_func: Callable[..., Any]) -> None:
        self._algorithm_func = algorithm_func
        self._parameters = frozenset(inspect.signature(algorithm_func).parameters)
        self._blocking_store: BlockingStore | None = None
        functools.update_wrapper(self, algorithm_func)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._algorithm_func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._algorithm_func(*args, **kwargs)

    def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None | Coroutine[Any, Any, None]:
        """Call the function with what it declares; a data set that it does not declare is a TypeError."""
        arguments: dict[str, Any] = {}
        for name, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
            if name in self._parameters:
                arguments[name] = dataset
            elif dataset is not None:
                raise TypeError(
                    f"{name} is provided but not supported by {self._name}; add a parameter of that name to it."
                )
        if "store" in self._parameters:
            arguments["store"] = self.get_store()
        if "adapter" in self._parameters:
            arguments["adapter"] = self.get_adapter()
        if "llm_proxy" in self._parameters:
            arguments["llm_proxy"] = self.get_llm_proxy()
        if "initial_resources" in self._parameters:
            arguments["initial_resources"] = self.get_initial_resources()
        if self.is_async():
            coroutine: Coroutine[Any, Any, None] = self._algorithm_func(**arguments)
            return coroutine
        self._run_blocking(arguments)
        return None

    def _run_blocking(self, arguments: dict[str, Any]) -> None:
        if "store" not in arguments:
            self._algorithm_func(**arguments)
            return
        self._blocking_store = store = BlockingStore(arguments["store"])
        try:
            self._algorithm_func(**{**arguments, "store": store})
        finally:
            store.close()

    def abandon(self) -> None:
        """Close the store to a plain function that still runs, which nobody can end: its next call of it raises."""
        if self._blocking_store is not None:
            self._blocking_store.close()

    @property
    def _name(self) -> str:
        return getattr(self._algorithm_func, "__name__", repr(self._algorithm_func))


def algo(func: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make an algorithm of a function, plain or a coroutine function."""
    return FunctionalAlgorithm(func)
