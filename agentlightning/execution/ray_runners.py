"""Runners as Ray actors: placed and started again by Ray, followed from one process to the next by the trainer.

An actor is one runner. Ray restarts its process, on another node if need be, for as long as the training lasts. The
process of an actor may claim work only after the trainer knows which process it is; so, when that process is lost, the
trainer can give back what it had claimed, and nothing that its successor claims.
"""

import asyncio
import gc
import io
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.execution.base import RunnerBundle, at_start, give_back, owned_by
from agentlightning.execution.events import ControlFlags, ExecutionEvent, ThreadingEvent
from agentlightning.execution.watch import PlacedRunners
from agentlightning.litagent.decorator import FunctionalLitAgent
from agentlightning.logging import setup
from agentlightning.store.base import LightningStore
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.utils.deadline import until

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS: Final = 30.0
"""How long Ray may take to place a runner before the user hears of it, and its lost work is given to others."""
REPORT_SECONDS: Final = 2.0
"""How much longer than their grace runners are waited for, so that they can report what they had to leave."""


@dataclass(frozen=True)
class RunnerProcess:
    """The process in which an actor runs now."""

    start: int
    """Which start of the runner it is, as the trainer counts them."""
    address: str
    """Of its node."""


@dataclass(frozen=True)
class Control:
    """What a runner is to do; of two that arrive, the one with the higher version counts."""

    version: int
    flags: Mapping[str, bool]
    is_leaving: bool = False
    """Whether to claim nothing more, and to end."""
    grace_seconds: float | None = None
    """How long what runs may take when it leaves; None waits for ever."""


# ---------------------------------------------------------------------- in the process of an actor


class RunnerActor:
    """One runner, in a process of Ray's."""

    def __init__(self, number: int, store: LightningStoreClient, log_level: int | None) -> None:
        self._number = number
        self._store = store
        self._version = -1
        self._stop = ThreadingEvent()
        self._flags = ControlFlags(paused=ThreadingEvent(), stopped=ThreadingEvent(), prepared=ThreadingEvent())
        self._runner: Any = None
        self._start = 0
        self._work: asyncio.Task[None] | None = None
        if log_level is not None:
            setup(log_level, color=False)

    def __repr__(self) -> str:
        """How Ray marks the lines that this process prints."""
        return f"runner-{self._number}"

    async def begin(self, pickled: bytes, control: Control, start: int) -> RunnerProcess:
        """Load the runner, unless an earlier call did, and say in which process it is; `work` may be called then."""
        from ray.util import get_node_ip_address

        address: str = get_node_ip_address()
        if self._runner is None:
            try:
                self._runner = pickle.loads(pickled)
            except ModuleNotFoundError as error:
                raise ConfigurationError(
                    f"The agent needs the module {error.name!r}, which the node {address} does not have; install it "
                    "there, or send it along with runtime_env={'working_dir': ...} or runtime_env={'pip': [...]}."
                ) from error
            if hasattr(self._runner, "flags"):
                self._runner.flags = self._flags
            self._runner, self._start = at_start(self._runner, start), start
            gc.freeze()  # as in the processes of `cs`: what is loaded by now stays
        await self.apply(control)
        return RunnerProcess(self._start, address)

    async def apply(self, control: Control) -> None:
        """Take notice of what is to be done from now on."""
        if control.version < self._version:
            return
        self._version = control.version
        self._flags.apply(control.flags)
        if not control.is_leaving:
            return
        self._stop.set()
        if control.grace_seconds is not None and self._work is not None:
            asyncio.get_running_loop().call_later(control.grace_seconds, self._work.cancel)

    async def work(self) -> None:
        """Run rollouts until the runner is to leave; a second call waits for the same end."""
        if self._work is None:
            self._work = asyncio.create_task(self._run(), name=repr(self))
        await asyncio.wait([self._work])
        if not self._work.cancelled():
            self._work.result()

    async def _run(self) -> None:
        try:
            await self._runner(self._store, self._number, self._stop)
        finally:
            await self._store.close()


# ---------------------------------------------------------------------- in the process of the trainer


def pickled_runner(runner: RunnerBundle) -> bytes:
    """A runner as it travels to the processes of actors, which are given flags of their own."""
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc,name-defined,unused-ignore] # untyped where Ray is missing
        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, ControlFlags):
                return str, ()
            # An actor has a main module of its own, so an agent of the program's is sent whole, not by its address.
            if isinstance(obj, FunctionalLitAgent) and obj.__module__ == "__main__":
                return object.__reduce__(obj)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(runner)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"The agent, its runner or its hooks cannot be sent to Ray's processes, because they cannot be pickled "
            f"({error}); make connections, locks and files inside the agent's function."
        ) from error
    return buffer.getvalue()


@dataclass
class _Member:
    """A runner, over as many processes as it takes."""

    number: int
    actor: Any
    process: RunnerProcess | None = None
    """Where it is or last was; None before it was placed."""
    is_leaving: bool = False


class RayRunners(PlacedRunners):
    """The runners of one training: more or fewer of them as it goes on, and none when it has ended."""

    def __init__(
        self,
        create_actor: Callable[[int], Any],
        runner: RunnerBundle,
        pickled: bytes,
        store: LightningStore,
        stop: ExecutionEvent,
    ) -> None:
        """No runner yet.

        Args:
            create_actor: Makes the actor of this number, a handle of `RunnerActor`.
            runner: What they run; its flags are those of the training.
            pickled: The same as it travels.
            store: Where the claims of lost processes are given back.
            stop: Set when a runner has failed.
        """
        import ray

        super().__init__(lambda: all(task.done() for task in self._members), owned_by(runner), stop)
        self._create_actor = create_actor
        # Not an argument of the actors' constructor: Ray starts an actor again only where it still finds those.
        self._pickled = ray.put(pickled)
        self._runner = runner
        self._stop_all = stop.set
        self._flags: ControlFlags | None = getattr(runner, "flags", None)
        self._store = store
        self._members: dict[asyncio.Task[None], _Member] = {}
        self._version = 0
        self.failure: Exception | None = None
        """Of the first runner that has failed."""
        self._following = asyncio.create_task(self._follow_flags(), name="flags")

    def scale(self, count: int) -> None:
        """Start runners, or have the youngest leave when they have finished what they run."""
        active = [task for task, member in self._members.items() if not (task.done() or member.is_leaving)]
        for task in active[count:]:
            self._dismiss(task, None)
        for _ in range(count - len(active)):
            number = len(self._members)  # never one that was used before: ids of workers tell runners apart
            member = _Member(number, self._create_actor(number))
            task = asyncio.create_task(self._attend(member), name=f"runner-{number}")
            task.add_done_callback(self._note_end)
            self._members[task] = member

    def have_failed(self) -> bool:
        return self.failure is not None

    async def stop(self, grace_seconds: float) -> None:
        """End all; what still runs after the grace is given back."""
        self._following.cancel()
        for task in self._members:
            self._dismiss(task, grace_seconds)
        ending = [self._following, *self._members]
        _, late = await asyncio.wait(ending, timeout=grace_seconds + REPORT_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.wait(ending)
        for task in late & self._members.keys():  # their actors are dead by now
            await self._give_back(self._members[task])

    # ------------------------------------------------------------------ one runner

    async def _attend(self, member: _Member) -> None:
        """Have a runner work, and again in every process in which Ray starts it."""
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        name = f"runner-{member.number}"
        try:
            while True:
                await self._begin(member)
                try:
                    # Not tried again by Ray: what the lost process had claimed is given back first.
                    await member.actor.work.options(max_task_retries=0).remote()
                    return
                except RayActorError as error:
                    logger.warning("%s was lost, and Ray starts it again: %s", name, str(error).partition("\n")[0])
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise TrainingError(f"{name} failed: {type(cause).__name__}: {cause}") from cause
        except RayError as error:
            raise TrainingError(f"Ray cannot run {name}: {error}") from error
        finally:
            ray.kill(member.actor, no_restart=True)

    async def _begin(self, member: _Member) -> None:
        """Wait until the runner is in a process, and give back what the one before had claimed, if there was one."""
        start = 0 if member.process is None else member.process.start + 1
        beginning = asyncio.wrap_future(member.actor.begin.remote(self._pickled, self._control(member), start).future())
        try:
            done, _ = await asyncio.wait([beginning], timeout=PLACEMENT_SECONDS)
            if not done:
                text = (
                    "Ray has found no place for runner-%d in %g s; `ray status` shows what it needs and what is free."
                )
                logger.warning(text, member.number, PLACEMENT_SECONDS)
                await self._give_back(member)
            process = await beginning
        finally:
            beginning.cancel()
        if process != member.process:  # the same one again was out of reach for a while, and has gone on
            await self._give_back(member)
        member.process = process

    async def _give_back(self, member: _Member) -> None:
        """Let others have what the process of a runner had claimed."""
        if member.process is not None:
            reason = f"runner-{member.number} on {member.process.address} was lost"
            await give_back(self._store, self._runner, member.number, member.process.start, reason)

    def _dismiss(self, task: "asyncio.Task[None]", grace_seconds: float | None) -> None:
        member = self._members[task]
        member.is_leaving = True
        if member.process is None:  # it has claimed nothing, and may never be placed
            task.cancel()
        elif not task.done():
            member.actor.apply.remote(self._control(member, grace_seconds))

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self.failure is None:
            self.failure = error if isinstance(error, TrainingError) else TrainingError(str(error))
            self._stop_all()

    # ------------------------------------------------------------------ what they are to do

    def _control(self, member: _Member, grace_seconds: float | None = None) -> Control:
        self._version += 1
        return Control(self._version, self._states(), member.is_leaving, grace_seconds)

    def _states(self) -> dict[str, bool]:
        return {} if self._flags is None else self._flags.states()

    async def _follow_flags(self) -> None:
        """Send all of them each change of a flag."""
        while True:
            states = self._states()
            await until(lambda before=states: self._states() != before)  # type: ignore[misc] # a default of a lambda
            for task, member in self._members.items():
                if not (task.done() or member.is_leaving):
                    member.actor.apply.remote(self._control(member))
