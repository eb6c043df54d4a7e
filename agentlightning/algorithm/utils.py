"""Parts that algorithms share: batches without end, and methods that get the store or the proxy handed in."""

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from agentlightning.algorithm.base import Algorithm
from agentlightning.errors import ConfigurationError
from agentlightning.types import Dataset

__all__ = ["batch_iter_over_dataset", "with_llm_proxy", "with_store"]

_T = TypeVar("_T")
_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])


def batch_iter_over_dataset(dataset: Dataset[_T], batch_size: int) -> Iterator[Sequence[_T]]:
    """Batches of shuffled samples, for ever; each sample comes once before any comes again.

    A batch that the last samples of a pass cannot fill is filled from the next pass, with others than it has. A data
    set smaller than a batch comes whole, in a new order each time.
    """
    size = len(dataset)
    if size == 0:
        raise ConfigurationError("An empty data set has no batches; give it at least one sample.")
    if batch_size < 1:
        raise ConfigurationError(f"batch_size must be at least 1; it is {batch_size}.")
    batch: list[int] = []
    while True:
        order = list(range(size))
        random.shuffle(order)
        if batch_size >= size:
            yield [dataset[index] for index in order]
            continue
        for index in order:
            if index in batch:
                continue
            batch.append(index)
            if len(batch) == batch_size:
                yield [dataset[position] for position in batch]
                batch = []


def with_store(method: _MethodT) -> _MethodT:
    """Call a method of an algorithm with the store as its first argument."""

    @functools.wraps(method)
    def wrapper(self: Algorithm, *args: Any, **kwargs: Any) -> Any:
        return method(self, self.get_store(), *args, **kwargs)

    return wrapper  # type: ignore[return-value] # it takes one argument less than what it wraps


def with_llm_proxy(required: bool = False, auto_start: bool = True) -> Callable[[_MethodT], _MethodT]:
    """Call a coroutine method of an algorithm with the LLM proxy as its first argument.

    Args:
        required: ConfigurationError if there is none; otherwise None is handed in.
        auto_start: Start a proxy that does not run, and stop it again afterwards.
    """

    def decorate(method: _MethodT) -> _MethodT:
        @functools.wraps(method)
        async def wrapper(self: Algorithm, *args: Any, **kwargs: Any) -> Any:
            proxy = self.get_llm_proxy()
            if proxy is None and required:
                raise ConfigurationError(
                    f"{type(self).__name__}.{method.__name__} needs an LLM proxy; give the Trainer one as llm_proxy."
                )
            is_ours = proxy is not None and auto_start and not proxy.is_running()
            if is_ours:
                await _awaited(proxy.start())
            try:
                return await method(self, proxy, *args, **kwargs)
            finally:
                if is_ours:
                    await _awaited(proxy.stop())

        return wrapper  # type: ignore[return-value] # it takes one argument less than what it wraps

    return decorate


async def _awaited(result: Any) -> None:
    if inspect.isawaitable(result):
        await result
