"""Calling an agent as it is written: coroutines are awaited, plain methods run in a thread."""

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from agentlightning.litagent.litagent import LitAgent
from agentlightning.types import NamedResources, Rollout, RolloutRawResult, TaskInput

__all__ = ["RolloutMethod", "call_agent"]

_T = TypeVar("_T")

RolloutMethod = Literal["rollout", "training_rollout", "validation_rollout"]
_ASYNC_NAMES = ("rollout_async", "training_rollout_async", "validation_rollout_async")


async def call_agent(
    agent: LitAgent[Any], method: RolloutMethod, *, task: TaskInput, resources: NamedResources, rollout: Rollout
) -> RolloutRawResult:
    """Have an agent do a task, by the method of that name or by the coroutine it is written as."""
    plain: Callable[..., Any] = getattr(agent, method)
    result: RolloutRawResult
    if not agent.is_async():
        result = await _in_daemon_thread(lambda: plain(task, resources=resources, rollout=rollout))
    elif all(getattr(type(agent), name) is getattr(LitAgent, name) for name in _ASYNC_NAMES):
        result = await plain(task, resources=resources, rollout=rollout)
    else:
        result = await getattr(agent, f"{method}_async")(task, resources=resources, rollout=rollout)
    return result


async def _in_daemon_thread(function: Callable[[], _T]) -> _T:
    """Call a function in the caller's context. Cancelled, it is left behind, and does not keep the program alive."""
    done: concurrent.futures.Future[_T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # from here on it is not cancelled, whoever stops waiting
    context = contextvars.copy_context()

    def work() -> None:
        try:
            done.set_result(context.run(function))
        except StopIteration as error:  # which a future does not take
            done.set_exception(RuntimeError(f"The agent raised StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001 # whatever it is, it is raised where the function was asked for
            done.set_exception(error)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await asyncio.wrap_future(done)
