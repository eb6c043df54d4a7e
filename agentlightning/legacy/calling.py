"""How an agent is called, whichever release it was written for.

The first release handed a rollout method the id of the rollout, later ones hand it the rollout itself; the signature
tells which. Of the methods an agent may define, the most fitting one is called, plain or a coroutine, from code with an
event loop and from code without one. What the agent raises is raised, but for what would end more than this rollout.
"""

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

from agentlightning.errors import RolloutFailed
from agentlightning.litagent import LitAgent
from agentlightning.litagent.decorator import FunctionalLitAgent
from agentlightning.litagent.litagent import is_v0_1_rollout_api
from agentlightning.types import NamedResources, RolloutLegacy, RolloutMode, Task
from agentlightning.utils.loop_thread import LoopThread

__all__ = ["call_on_loop", "call_plainly", "rollout_method"]

_PLAIN, _ASYNC = "", "_async"
_TRAINING: Final = ("training_rollout", "rollout")
_OTHERS: Final = ("validation_rollout", "rollout", "training_rollout")
"""In the first release, an agent that only said how to train validated in the same way."""


def rollout_method(agent: LitAgent[Any], mode: RolloutMode | None, *, prefers_async: bool) -> Callable[..., Any]:
    """The method that does a task of this mode: the first one the agent defines itself."""
    if isinstance(agent, FunctionalLitAgent):  # defines both, of which only one works
        prefers_async = agent.is_async()
    suffixes = (_ASYNC, _PLAIN) if prefers_async else (_PLAIN, _ASYNC)
    for name in _TRAINING if mode == "train" else _OTHERS:
        for method in _defined(agent, [name + suffix for suffix in suffixes]):
            return method
    return agent.rollout  # which says what is missing


def _defined(agent: LitAgent[Any], names: list[str]) -> Iterator[Callable[..., Any]]:
    for name in names:
        method = getattr(agent, name, None)
        if method is not None and getattr(method, "__func__", method) is not getattr(LitAgent, name):
            yield method


def call_plainly(agent: LitAgent[Any], task: Task, resources: NamedResources) -> object:
    """What the agent returns; a coroutine runs on an event loop of its own."""
    method = rollout_method(agent, task.mode, prefers_async=False)
    try:
        result: object = method(task.input, **_arguments(method, task, resources))
        if not inspect.iscoroutine(result):
            return result
        thread = LoopThread("legacy-agent")
        try:
            return thread.run(_contained(result))
        finally:
            thread.stop()
    except (asyncio.CancelledError, concurrent.futures.CancelledError) as error:
        raise RolloutFailed("The agent was cancelled from within: something it awaited was cancelled.") from error


async def call_on_loop(agent: LitAgent[Any], task: Task, resources: NamedResources) -> object:
    """As `call_plainly`, on the running loop; a plain method runs in a thread, so that others go on."""
    method = rollout_method(agent, task.mode, prefers_async=True)
    work = asyncio.ensure_future(_contained(_called(method, task, resources)))
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait([work])
        raise
    if work.cancelled():
        raise RolloutFailed("The agent was cancelled from within: something it awaited was cancelled.")
    return work.result()


async def _called(method: Callable[..., Any], task: Task, resources: NamedResources) -> object:
    arguments = _arguments(method, task, resources)
    if inspect.iscoroutinefunction(method):
        result: object = await method(task.input, **arguments)
    else:
        result = await asyncio.to_thread(method, task.input, **arguments)
    return await result if inspect.iscoroutine(result) else result


async def _contained(work: Any) -> object:
    """Out of a task these two would end the event loop, and with it everything else that runs there."""
    try:
        result: object = await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RolloutFailed(f"The agent raised {type(error).__name__}: {error}") from error
    return result


def _arguments(method: Callable[..., Any], task: Task, resources: NamedResources) -> dict[str, Any]:
    if is_v0_1_rollout_api(method):
        return {"rollout_id": task.rollout_id, "resources": resources}
    return {"resources": resources, "rollout": RolloutLegacy(rollout_id=task.rollout_id, task=task)}
