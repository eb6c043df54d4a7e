"""The life cycle of a component: where it stands, and the steps that it may take from there.

    created ──init──▶ ready ──start──▶ running ◀─resume── paused
                       ▲                │   └─────pause────▶
                       │                ├──stop──▶ stopping ──▶ stopped
                       └─────retry── failed ◀──error

`Trainer` and `Runner` are components. What a step does is written in each; where it leads is written here, once.
"""

import concurrent.futures
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any, Generic, TypeVar

from agentlightning.errors import ConfigurationError, InvalidTransition, TrainingError
from agentlightning.utils.daemon_threads import in_background

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")


class LifecycleState(str, Enum):
    """States of a component."""

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


_STEPS: dict[str, tuple[set[str], LifecycleState]] = {
    "init": ({"created", "ready", "stopped", "failed"}, LifecycleState.READY),
    "start": ({"created", "ready", "stopped"}, LifecycleState.RUNNING),
    "pause": ({"running", "paused"}, LifecycleState.PAUSED),
    "resume": ({"running", "paused"}, LifecycleState.RUNNING),
    "stop": ({"ready", "running", "paused", "stopping"}, LifecycleState.STOPPING),
    "error": ({state.value for state in LifecycleState} - {"stopped"}, LifecycleState.FAILED),
    "retry": ({"failed"}, LifecycleState.READY),
}
"""From where each step may be taken, and where it leads."""
_BEGINNINGS = ("init", "start", "retry")
_AT_WORK = (LifecycleState.RUNNING, LifecycleState.PAUSED, LifecycleState.STOPPING)


def _nobody() -> None:
    """Whose state it is that came from another process."""


class Lifecycle:
    """The state of one component; steps may be taken from any thread. A copy of it stands at the beginning."""

    def __init__(self, name: str, component: object = None) -> None:
        """Begin as `created`.

        Args:
            name: What the component is called in messages.
            component: Whose state this is.
        """
        self._name = name
        self.component = _nobody if component is None else weakref.ref(component)
        self._changing = threading.Lock()  # protects the state, the failure and whether it is ending
        self.state = LifecycleState.CREATED
        self._is_ending = False
        """Whether the work still ends of a component that was marked as failed while it worked."""
        self.failure: BaseException | None = None
        """Why it failed; None in every other state."""
        self.background: concurrent.futures.Future[None] | None = None
        """What `start` began."""

    def __reduce__(self) -> Any:
        return Lifecycle, (self._name,)

    def step(self, name: str, *, error: BaseException | None = None) -> LifecycleState:
        """Take a step; InvalidTransition if it cannot be taken from here."""
        sources, target = _STEPS[name]
        with self._changing:
            if self.state.value not in sources:
                possible = [step for step, (starts, _) in _STEPS.items() if self.state.value in starts]
                raise InvalidTransition(
                    f"{self._name} is {self.state.value} and cannot {name}; from here it can {', '.join(possible)}."
                )
            if self._is_ending and name in _BEGINNINGS:
                raise InvalidTransition(f"{self._name} is failed and its work still ends; call wait() before {name}().")
            if name == "stop" and self.state is LifecycleState.READY:  # there is nothing to wait for
                target = LifecycleState.STOPPED
            if name == "error":
                self._is_ending = self._is_ending or self.state in _AT_WORK
            elif name in _BEGINNINGS:
                self.background = None  # of the work before
            self._enter(target, error)
            return target

    def become(self, state: LifecycleState, *, error: BaseException | None = None) -> None:
        """Note what has happened to the component, whatever was before."""
        with self._changing:
            self._is_ending = False
            self._enter(state, error)

    def end(self, state: LifecycleState = LifecycleState.STOPPED) -> None:
        """Note that the work is over: stopped if it was to stop, failed if it has failed, otherwise `state`."""
        with self._changing:
            self._is_ending = False
            if self.state is LifecycleState.STOPPING:
                self._enter(LifecycleState.STOPPED, None)
            elif self.state in _AT_WORK:
                self._enter(state, None)

    def _enter(self, state: LifecycleState, error: BaseException | None) -> None:
        self.state = state
        self.failure = error if state is LifecycleState.FAILED else None

    def work_in_background(self, work: Callable[[], None]) -> None:
        """Do the work of a component that has started in a thread; how it ends becomes the state."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.become(LifecycleState.FAILED, error=error)
                logger.error("%s failed: %s: %s; wait() raises it.", self._name, type(error).__name__, error)
                raise
            self.end()

        self.background = in_background("agl-background", run)


class ComponentProperty(Generic[ValueT]):
    """A property that a subclass may replace by an attribute of its instances, as old ones do with `state`."""

    def __init__(self, read: Callable[[Any], ValueT]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> ValueT:
        return self if instance is None else self._read(instance)  # type: ignore[return-value] # as other descriptors


class Component:
    """What has a life cycle.

    Subclasses need not call `super().__init__()`, and may have methods and attributes of these names for themselves:
    the package itself asks `lifecycle_of`. A copy of a component, here or in another process, is `created`.
    """

    _kind: str = "component"
    """What it is called in messages."""

    @ComponentProperty
    def state(self) -> LifecycleState:
        """Where it stands."""
        return lifecycle_of(self).state

    @ComponentProperty
    def failure(self) -> BaseException | None:
        """Why it failed; None in every other state."""
        return lifecycle_of(self).failure

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Get ready."""
        lifecycle_of(self).step("init")

    def start(self) -> None:
        """Begin to work, in the background, and return."""
        lifecycle_of(self).step("start")

    def pause(self) -> None:
        """Begin nothing more until `resume`."""
        lifecycle_of(self).step("pause")

    def resume(self) -> None:
        """Undo `pause`."""
        lifecycle_of(self).step("resume")

    def stop(self) -> None:
        """End the work; the state is `stopped` when that has ended."""
        lifecycle_of(self).step("stop")

    def error(self, error: BaseException | None = None) -> None:
        """End the work as failed; whoever waits for it gets this error."""
        if not isinstance(error, BaseException | None):
            raise ConfigurationError(f"error() takes an exception, such as RuntimeError({error!r}); not {error!r}.")
        failure = error or TrainingError(f"The {self._kind} was marked as failed, by error() without an exception.")
        lifecycle_of(self).step("error", error=failure)

    def retry(self) -> None:
        """Get ready again after a failure."""
        lifecycle_of(self).step("retry")

    def wait(self, timeout: float | None = None) -> LifecycleState:
        """Wait for what `start` began, for `timeout` seconds at most, and return the state; what it raised is raised.

        A program that ends does not wait for what is in the background, and takes it along. Ctrl-C stops the work, and
        is raised when that has ended; a second one does not wait.
        """
        background = lifecycle_of(self).background
        if background is None:
            return lifecycle_of(self).state
        try:
            ended = concurrent.futures.wait([background], timeout).done
        except KeyboardInterrupt:
            with suppress(InvalidTransition):  # it stops already, or has ended
                self.stop()
            concurrent.futures.wait([background])
            raise
        if ended:
            background.result()
        return lifecycle_of(self).state


def lifecycle_of(component: Component) -> Lifecycle:
    """The life cycle of a component, which begins when it is first asked for."""
    attributes = component.__dict__  # not setattr: a frozen dataclass may be a component
    life: Lifecycle | None = attributes.get("_life")
    if life is not None:
        if life.component() is component:
            return life
        attributes.pop("_life", None)  # of the component that this is a copy of
    return attributes.setdefault("_life", Lifecycle(f"The {component._kind}", component))  # type: ignore[no-any-return] # attributes are of any type
