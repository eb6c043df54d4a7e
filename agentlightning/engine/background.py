"""A program for code without an event loop."""

from agentlightning.utils.child_process import DRAIN_SECONDS, Program, ProgramPlan, wait_for_event
from agentlightning.utils.loop_thread import LoopThread

__all__ = ["BackgroundProgram"]


class BackgroundProgram:
    """A program whose output is read in a thread. `start` it and `stop` it."""

    def __init__(self, name: str) -> None:
        self._thread = LoopThread(name)
        self._program: Program | None = None

    def start(self, plan: ProgramPlan) -> None:
        """Run it; OSError if it cannot be."""
        self._program = self._thread.run(Program.start(plan))

    def stop(self, grace_seconds: float) -> None:
        """End it with all that it started; harmless if nothing runs."""
        program, self._program = self._program, None
        if program is not None:
            self._thread.run(program.end(grace_seconds))
        self._thread.stop()

    @property
    def process_id(self) -> int | None:
        """None if there is none."""
        return None if self._program is None else self._program.process_id

    @property
    def exit_code(self) -> int | None:
        return None if self._program is None else self._program.exit_code

    def is_running(self) -> bool:
        return self._program is not None and self._program.exit_code is None

    def has_ended(self, timeout_seconds: float) -> bool:
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

    def last_lines(self, count: int, secrets: tuple[str, ...] = ()) -> list[str]:
        """Of its standard error, without secrets."""
        found = None if self._program is None else self._program.stderr
        return [] if found is None else found.end(secrets).splitlines()[-count:]
