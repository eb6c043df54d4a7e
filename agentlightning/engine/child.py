"""A program in a child process, for code without an event loop: every engine and learner is started and stopped so."""

import logging
import time
from collections.abc import Callable

from agentlightning.errors import EngineError
from agentlightning.utils.announcements import announce
from agentlightning.utils.child_process import DRAIN_SECONDS, Program, ProgramPlan, wait_for_event
from agentlightning.utils.loop_thread import LoopThread

logger = logging.getLogger(__name__)


class ChildProgram:
    """`start` it and `stop` it; between them it may end by itself. Its output is read in a thread."""

    def __init__(self, name: str, *, stop_seconds: float) -> None:
        """Prepare.

        Args:
            name: For messages.
            stop_seconds: How long it may take to end when it is stopped.
        """
        self._name = name
        self._stop_seconds = stop_seconds
        self._secrets: tuple[str, ...] = ()
        self._thread = LoopThread("agl-child")
        self._program: Program | None = None

    def start(self, plan: ProgramPlan, *, secrets: tuple[str, ...] = ()) -> None:
        """Run it; OSError if it cannot be.

        Args:
            secrets: Left out of its lines.
        """
        self._secrets = secrets
        self._program = self._thread.run(Program.start(plan))

    def await_ready(self, is_ready: Callable[[], bool], *, seconds: float, poll_seconds: float) -> None:
        """Return when it serves; EngineError with its last lines if it ends before, or takes longer than that."""
        began = logged = time.monotonic()
        while not is_ready():
            now = time.monotonic()
            if self.has_ended(poll_seconds):
                raise self.ended()
            if now - began > seconds:
                raise EngineError(f"{self._name} did not begin to serve within {seconds:g} s. {self._shown()}")
            if now - logged > 15.0:
                logged = now
                last_line = "".join(self.last_lines(1))
                announce(logger, f"{self._name} has been loading for {now - began:.0f} s: {last_line}")
        announce(logger, f"{self._name} serves after {time.monotonic() - began:.0f} s.")

    def stop(self) -> None:
        """End it with all that it started; harmless if nothing runs."""
        program, self._program = self._program, None
        if program is not None:
            self._thread.run(program.end(self._stop_seconds))
        self._thread.stop()

    @property
    def process_id(self) -> int | None:
        return None if self._program is None else self._program.process_id

    def is_running(self) -> bool:
        return self._program is not None and self._program.exit_code is None

    def has_ended(self, timeout_seconds: float = 1.0) -> bool:
        """Whether it has ended, after waiting for that, and for its last output, for a while."""
        if self._program is not None:
            self._thread.run(wait_for_event(self._program.exited, timeout_seconds))
            if self._program.exited.is_set():
                self._thread.run(wait_for_event(self._program.streams_closed, DRAIN_SECONDS))
        return not self.is_running()

    def output(self) -> str:
        """The beginning of its standard output."""
        found = None if self._program is None else self._program.stdout
        return "" if found is None else found.text()

    def last_lines(self, count: int) -> list[str]:
        """Of its standard error."""
        found = None if self._program is None else self._program.stderr
        return [] if found is None else found.end(self._secrets).splitlines()[-count:]

    def ended(self) -> EngineError:
        """Why it does not serve any more."""
        if not self.has_ended():
            return EngineError(f"{self._name} does not serve any more, and has not ended. {self._shown()}")
        code = None if self._program is None else self._program.exit_code
        return EngineError(f"{self._name} has ended with code {code}. {self._shown()}")

    def _shown(self) -> str:
        lines = self.last_lines(30)
        return "Its last lines:\n" + "\n".join(lines) if lines else "It printed nothing."
