"""ChildRun: a function that is traced in a child process, and what comes back of it."""

import contextlib
import contextvars
import inspect
import logging
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from agentlightning.errors import TracingError
from agentlightning.tracer.http_trace import Entry
from agentlightning.utils.child_process import end_process, leave_with_parent
from agentlightning.utils.loop_thread import LoopThread

if TYPE_CHECKING:
    from agentlightning.tracer.http import HttpTracer

__all__ = ["ChildRun"]

logger = logging.getLogger(__name__)


@dataclass
class _Outcome:
    """What the child sends back."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    """Of the error, as the child saw it."""
    entries: list[Entry] = field(default_factory=list)


class _InChildProcess(Exception):
    """The cause of an error that was raised in a child process: where it came from there."""


class ChildRun:
    """One call of a function in a process of its own; started at once."""

    def __init__(
        self, tracer: "HttpTracer", func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.name = getattr(func, "__name__", type(func).__name__)
        self.entries: list[Entry] = []
        """What the child's trace held, once `wait` has returned."""
        self._outcome: _Outcome | None = None
        self._timeout_seconds = tracer.subprocess_timeout
        self._deadline = time.monotonic() + tracer.subprocess_timeout
        context = multiprocessing.get_context()
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_work, args=(tracer, func, args, kwargs, sender), name=f"AgentLightning-HttpTracer-{self.name}"
        )
        try:
            self._process.start()
        finally:
            sender.close()  # so that the end of the child is the end of the pipe

    def wait(self) -> None:
        """Wait for the child to end, and no longer than the tracer allows; harmless the second time."""
        if self._outcome is not None:
            return
        try:
            self._outcome = self._received()
        finally:
            end_process(self._process)
            self._receiver.close()
        self.entries = self._outcome.entries

    def kill(self) -> None:
        """End the process at once; whoever waits for it is told that it died."""
        self._process.kill()

    def outcome(self) -> Any:
        """What the function returned; raises what it raised."""
        assert self._outcome is not None, "wait comes first"
        if self._outcome.error is not None:
            raise self._outcome.error from _InChildProcess(f"\n{self._outcome.traceback}")
        return self._outcome.value

    def _received(self) -> _Outcome:
        if not self._receiver.poll(max(self._deadline - time.monotonic(), 0.0)):
            raise TracingError(
                f"'{self.name}' took longer than {self._timeout_seconds:g} s in its child process, which was ended; "
                "give HttpTracer a longer subprocess_timeout, or subprocess_mode=False."
            )
        try:
            outcome: _Outcome = pickle.loads(self._receiver.recv_bytes())
        except EOFError:
            self._process.join()
            raise TracingError(
                f"The child process of '{self.name}' ended with exit code {self._process.exitcode} and gave no result."
            ) from None
        self._process.join(max(self._deadline - time.monotonic(), 0.0))
        return outcome


# ---------------------------------------------------------------------- in the child


def _work(
    tracer: "HttpTracer", func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sender: Connection
) -> None:
    leave_with_parent()
    # A forked child inherits the context of its parent, where another trace may be open.
    outcome = contextvars.Context().run(_traced, tracer, func, args, kwargs)
    with contextlib.suppress(BrokenPipeError):  # the parent has given up on us
        sender.send_bytes(_pickled(outcome))
    sender.close()


def _traced(tracer: "HttpTracer", func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outcome:
    outcome = _Outcome()
    with tracer._trace_context_sync(getattr(func, "__name__", None)) as trace:
        try:
            outcome.value = func(*args, **kwargs)
            if inspect.isawaitable(outcome.value):
                outcome.value = _awaited(outcome.value)
        except BaseException as error:  # noqa: BLE001 # the parent raises it
            outcome.error, outcome.traceback = error, traceback.format_exc()
    outcome.entries = trace.entries()
    return outcome


def _awaited(awaitable: Any) -> Any:
    async def wait() -> Any:
        return await awaitable

    loop = LoopThread("agl-http-tracer")
    try:
        return loop.run(wait())
    finally:
        loop.stop()


def _pickled(outcome: _Outcome) -> bytes:
    """The outcome, or one that says why it cannot be sent; its trace comes along either way."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # some exceptions pickle, and cannot be made again
        return data
    except Exception as reason:  # noqa: BLE001 # pickling runs the code of whatever is pickled
        what = f"returned {outcome.value!r}" if outcome.error is None else f"raised {outcome.error!r}"
        said = TracingError(f"The function {what} in its child process, which cannot be sent back: {reason}.")
        return pickle.dumps(_Outcome(error=said, traceback=outcome.traceback, entries=outcome.entries))
