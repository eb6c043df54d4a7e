"""What a user may do with a training besides waiting for it: begin it in the background, pause, stop, fail, retry.

All of it may be done from any thread. A training that runs has flags, which runners in other processes see too. SIGTERM
stops everything, closes the run, and ends the program; a program that handles SIGTERM itself is left alone.
"""

import asyncio
import logging
import queue
import signal
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from typing import Any, Final

from agentlightning.execution.events import ControlFlags
from agentlightning.litagent import LitAgent
from agentlightning.trainer.roles import PREPARED_SECONDS
from agentlightning.types.lifecycle import Component, LifecycleState, lifecycle_of
from agentlightning.utils.daemon_threads import in_background

logger = logging.getLogger(__name__)

EXIT_CODE: Final = 128 + signal.SIGTERM
"""What a shell says of a program that SIGTERM ended."""
BLOCKED_SECONDS: Final = 0.5
"""After which an event loop that takes no step counts as blocked."""
LOOK_SECONDS: Final = 0.02


class TrainingControl(Component):
    """The life cycle of a trainer."""

    _kind = "trainer"

    def __init__(self) -> None:
        self._stepping = threading.Lock()  # protects the flags, which are there exactly while it may be stopped
        self._flags: ControlFlags | None = None
        self._last_fit: tuple[LitAgent[object], object, object] | None = None
        """The agent and the data sets of a training that failed, for `retry`."""

    @abstractmethod
    def fit(self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Train an agent; returns when the algorithm is done."""

    @abstractmethod
    def dev(self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Try an agent."""

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Get ready for a training, as `fit` does itself."""
        super().init()

    def start(
        self, agent: LitAgent[object] | None = None, train_dataset: object = None, val_dataset: object = None
    ) -> None:
        """As `fit`, in the background: returns when the training runs. `stop` ends it; `wait` waits for its end."""
        life = lifecycle_of(self)
        if self._flags is not None:
            life.step("start")  # which raises: it runs already
        fitting = in_background("agl-fit", lambda: self.fit(agent, train_dataset, val_dataset))
        while self._flags is None and not fitting.done():
            wait_for_futures([fitting], timeout=PREPARED_SECONDS)
        if fitting.done() and fitting.exception() is not life.failure:  # it has not begun
            fitting.result()
        life.background = fitting
        fitting.add_done_callback(_log_failure)

    def pause(self) -> None:
        """Let runners claim nothing more until `resume`; what runs goes on, and so does the algorithm."""
        self._step("pause", lambda flags: flags.paused.set())

    def resume(self) -> None:
        """Undo `pause`."""
        self._step("resume", lambda flags: flags.paused.clear())

    def stop(self) -> None:
        """End the algorithm and the runners; `fit` returns when they have ended.

        An algorithm that is a plain function cannot be ended; it is left behind in its thread, without the store.
        """
        self._step("stop", lambda flags: flags.stopped.set())

    def error(self, error: BaseException | None = None) -> None:
        """End the algorithm and the runners; `fit` raises this error, and the run has failed."""
        with self._stepping:
            super().error(error)
            if self._flags is not None:
                self._flags.stopped.set()

    def retry(
        self, agent: LitAgent[object] | None = None, train_dataset: object = None, val_dataset: object = None
    ) -> None:
        """Fit again after a failure; with a durable store, what was finished is still there.

        What is left out is taken from the training that failed, also if that was a `dev`.
        """
        lifecycle_of(self).step("retry")
        last_agent, last_train, last_val = self._last_fit or (None, None, None)
        agent = last_agent if agent is None else agent
        train_dataset = last_train if train_dataset is None else train_dataset
        val_dataset = last_val if val_dataset is None else val_dataset
        is_trial = getattr(self, "algorithm", None) is None and (train_dataset is not None or val_dataset is not None)
        (self.dev if is_trial else self.fit)(agent, train_dataset, val_dataset)

    def _step(self, step: str, act: Callable[[ControlFlags], None]) -> None:
        """Take a step, and set the flags of the training if one runs."""
        with self._stepping:
            lifecycle_of(self).step(step)
            if self._flags is not None:
                act(self._flags)

    def _began(self, flags: ControlFlags) -> None:
        """A training runs, which these flags stop and pause."""
        with self._stepping:
            lifecycle_of(self).step("start")
            self._flags = flags

    def _ended(self, error: BaseException | None = None) -> None:
        """The training is over; what `error` was called with is raised, unless the training has raised it."""
        life = lifecycle_of(self)
        with self._stepping:
            if error is not None:
                life.become(LifecycleState.FAILED, error=error)
            life.end()
            self._flags = None
            if life.state is LifecycleState.STOPPED:
                self._last_fit = None
        if error is None and life.failure is not None:
            raise life.failure


def _log_failure(fitting: "Future[None]") -> None:
    if (error := fitting.exception()) is not None:
        logger.error("The training failed: %s: %s; wait() raises it.", type(error).__name__, error)


# ---------------------------------------------------------------------- signals


class _Sigterm:
    """What SIGTERM does to a training."""

    def __init__(self, stop: Callable[[], None], is_running: Callable[[], bool]) -> None:
        self.count = 0
        self.is_over = False
        """Whether nothing is left to interrupt."""
        # A handler must not touch a lock that the interrupted code may hold; `put` of this queue may interrupt itself.
        self.news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop = stop
        self._is_running = is_running

    def handle(self, _signal: int, _frame: object) -> None:
        self.count += 1
        self.news.put(self._stop)
        if self.count < 2 or not self._is_running():
            return
        loop = asyncio._get_running_loop()
        if loop is None or self.count > 2:
            self._interrupt()
        else:  # between two steps, or else a task would end with the interruption, and report it
            loop.call_soon_threadsafe(self._interrupt)
            self.news.put(self._insist)

    def serve(self) -> None:
        while (action := self.news.get()) is not None:
            action()

    def _interrupt(self) -> None:
        if not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt

    def _insist(self) -> None:
        given_up = time.monotonic() + BLOCKED_SECONDS
        while not self.is_over and time.monotonic() < given_up:
            time.sleep(LOOK_SECONDS)
        if not self.is_over:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


@contextmanager
def stopped_by_sigterm(stop: Callable[[], None], is_running: Callable[[], bool]) -> Iterator[None]:
    """When SIGTERM comes, call `stop`, in another thread, and exit at the end.

    A second one interrupts the main thread, if the algorithm `is_running` still. Once that has ended, what is left to
    do is to end the runners, which takes a limited time and must not be cut short.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others cannot handle signals
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    sigterm = _Sigterm(stop, is_running)
    thread = threading.Thread(target=sigterm.serve, name="sigterm", daemon=True)
    thread.start()
    signal.signal(signal.SIGTERM, sigterm.handle)
    try:
        yield
    except KeyboardInterrupt:
        if not sigterm.count:
            raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sigterm.is_over = True
        sigterm.news.put(None)
        thread.join()
    if sigterm.count:
        sys.exit(EXIT_CODE)


@contextmanager
def interrupted_by_sigint() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt in a main thread that blocks its event loop.

    The handler of `asyncio.run` cancels the main task instead, which comes to nothing while the task itself blocks. A
    handler of the program's own is left alone.
    """
    before = signal.getsignal(signal.SIGINT)
    is_of_asyncio = getattr(getattr(before, "func", before), "__module__", "").startswith("asyncio")
    if threading.current_thread() is not threading.main_thread() or not is_of_asyncio:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
