"""What a user may do with a training besides waiting for it: begin it in the background, pause, stop, fail, retry.

All of it may be done from any thread. A training that runs has flags, which runners in other processes see too. SIGTERM
stops everything and closes the run, and `fit` returns; Ctrl-C does the same, and raises KeyboardInterrupt at the end. A
program that handles a signal itself is left alone.
"""

import logging
import queue
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from typing import Any

from agentlightning.execution.events import ControlFlags
from agentlightning.litagent import LitAgent
from agentlightning.trainer.roles import PREPARED_SECONDS
from agentlightning.types.lifecycle import Component, LifecycleState, lifecycle_of
from agentlightning.utils.daemon_threads import in_background

logger = logging.getLogger(__name__)


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


class _EndingSignals:
    """What SIGTERM and Ctrl-C do to a training."""

    def __init__(self, stop: Callable[[], None], is_urgent: Callable[[Sequence[int]], bool]) -> None:
        self.received: list[int] = []
        # A handler must not touch a lock that the interrupted code may hold; `put` of this queue may interrupt itself.
        self.news: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stop = stop
        self._is_urgent = is_urgent

    def handle(self, number: int, _frame: object) -> None:
        self.received.append(number)
        if self._is_urgent(self.received):
            raise KeyboardInterrupt
        self.news.put(number)

    def serve(self) -> None:
        while (number := self.news.get()) is not None:
            if number == signal.SIGINT:
                logger.warning("Ctrl-C: the training ends, and saves what was learned; press it again not to wait.")
            self._stop()


@contextmanager
def stopped_by_signals(
    stop: Callable[[], None], is_urgent: Callable[[Sequence[int]], bool] | None = None
) -> Iterator[None]:
    """When SIGTERM comes, call `stop`, in another thread, and return at the end, however many more of them come.

    A handler of the program's own is left alone.

    Args:
        is_urgent: If given, Ctrl-C calls `stop` too, and KeyboardInterrupt is raised at the end. It is raised at once
            where this says so of the signals up to now. The handler of `asyncio.run` is replaced: it cancels the main
            task, which comes to nothing while the task itself blocks.
    """
    numbers = [signal.SIGTERM] if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else []
    at_interrupt = signal.getsignal(signal.SIGINT)
    module = str(getattr(getattr(at_interrupt, "func", at_interrupt), "__module__", ""))
    if is_urgent is not None and (at_interrupt is signal.default_int_handler or module.startswith("asyncio")):
        numbers.append(signal.SIGINT)
    if not numbers or threading.current_thread() is not threading.main_thread():  # others cannot handle signals
        yield
        return
    signals = _EndingSignals(stop, is_urgent or (lambda received: False))
    thread = threading.Thread(target=signals.serve, name="signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, signals.handle) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        if not signals.received:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.news.put(None)
        thread.join()
    if signal.SIGINT in signals.received:
        raise KeyboardInterrupt
