"""Parts that algorithms share: endless batches, coroutines at once, metrics, and the store or proxy as arguments."""

import asyncio
import functools
import inspect
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agentlightning.algorithm.base import Algorithm
from agentlightning.errors import ConfigurationError
from agentlightning.types import Dataset

__all__ = [
    "batch_iter_over_dataset",
    "check_least",
    "gathered",
    "report_metrics",
    "running_proxy",
    "shuffled_batches",
    "with_llm_proxy",
    "with_store",
]

_T = TypeVar("_T")
_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])


def check_least(settings: object, **least: float) -> None:
    """ConfigurationError for a setting that is below its least value; None is allowed, and not a number is not."""
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= lowest:
            raise ConfigurationError(f"{name} is {value!r}; it must be at least {lowest}.")


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
    for numbers in shuffled_batches(size, batch_size, random.shuffle):
        yield [dataset[number] for number in numbers]


def shuffled_batches(count: int, size: int, shuffle: Callable[[list[int]], object]) -> Iterator[list[int]]:
    """Numbers below `count` in batches, for ever, in the manner of `batch_iter_over_dataset`.

    Args:
        shuffle: Puts numbers in random order.
    """
    batch: list[int] = []
    while True:
        order = list(range(count))
        shuffle(order)
        if size >= count:
            yield order
            continue
        for number in order:
            if number not in batch:
                batch.append(number)
            if len(batch) == size:
                yield batch
                batch = []


async def gathered(coroutines: Iterable[Coroutine[object, object, _T]], *, limit: int) -> list[_T]:
    """The results, in the given order; at most `limit` run at a time, and they begin in that order."""
    gate = asyncio.Semaphore(limit)
    works = list(coroutines)

    async def run(work: Coroutine[Any, Any, _T]) -> _T:
        async with gate:
            return await work

    tasks = [asyncio.ensure_future(run(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in works:
            work.close()  # those that never began
        raise


async def report_metrics(algorithm: Algorithm, step: int, metrics: Mapping[str, float]) -> None:
    """Add the finite ones to the run of an algorithm, if it has one."""
    run_id = algorithm.get_run_id()
    if run_id is not None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        await algorithm.get_store().add_metrics(run_id, step, finite)


def with_store(method: _MethodT) -> _MethodT:
    """Call a method of an algorithm with the store as its first argument."""

    @functools.wraps(method)
    def wrapper(self: Algorithm, *args: object, **kwargs: object) -> Any:
        return method(self, self.get_store(), *args, **kwargs)

    @functools.wraps(method)
    async def coroutine_wrapper(self: Algorithm, *args: object, **kwargs: object) -> Any:
        return await method(self, self.get_store(), *args, **kwargs)

    # A coroutine function stays one, which `is_async` asks for.
    is_coroutine = inspect.iscoroutinefunction(method)
    return coroutine_wrapper if is_coroutine else wrapper  # type: ignore[return-value] # one argument less


def with_llm_proxy(required: bool = False, auto_start: bool = True) -> Callable[[_MethodT], _MethodT]:
    """Call a coroutine method of an algorithm with the LLM proxy as its first argument.

    Args:
        required: ConfigurationError if there is none; otherwise None is handed in.
        auto_start: Start a proxy that does not run, and stop it again afterwards.
    """
    if callable(required):
        raise ConfigurationError("with_llm_proxy is used with parentheses: @with_llm_proxy().")

    def decorate(method: _MethodT) -> _MethodT:
        if not inspect.iscoroutinefunction(inspect.unwrap(method)):
            raise ConfigurationError(
                f"with_llm_proxy needs a coroutine method; write it as async def {method.__name__}."
            )

        @functools.wraps(method)
        async def wrapper(self: Algorithm, *args: object, **kwargs: object) -> Any:
            if required and self.get_llm_proxy() is None:
                raise ConfigurationError(
                    f"{type(self).__name__}.{method.__name__} needs an LLM proxy; give the Trainer one as llm_proxy."
                )
            async with running_proxy(self, auto_start=auto_start) as proxy:
                return await method(self, proxy, *args, **kwargs)

        return wrapper  # type: ignore[return-value] # it takes one argument less than what it wraps

    return decorate


@asynccontextmanager
async def running_proxy(algorithm: Algorithm, *, auto_start: bool = True) -> AsyncIterator[Any]:
    """The LLM proxy of an algorithm, None if it has none; one that does not run is started, and stopped afterwards."""
    proxy = algorithm.get_llm_proxy()
    is_ours = proxy is not None and auto_start and not proxy.is_running()
    if is_ours:
        await _awaited(proxy.start())
    try:
        yield proxy
    finally:
        if is_ours:
            await _awaited(proxy.stop())


async def _awaited(result: object) -> None:
    if inspect.isawaitable(result):
        await result
