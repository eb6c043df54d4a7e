"""A server in a child process, whichever engine it is: started, awaited, watched and stopped in one way."""

import logging
import time
from collections.abc import Callable
from typing import Final

from agentlightning.engine.background import BackgroundProgram
from agentlightning.errors import EngineError
from agentlightning.utils.child_process import ProgramPlan

__all__ = ["ChildServer"]

logger = logging.getLogger(__name__)

LAST_LINES: Final = 30
"""Of its standard error, that an error shows."""
END_SECONDS: Final = 1.0
"""A connection breaks a moment before the end of a process is seen."""
_PROGRESS_SECONDS: Final = 15.0


class ChildServer:
    """`start` it and `stop` it; between them it may end by itself."""

    def __init__(self, name: str, *, start_seconds: float, poll_seconds: float, stop_seconds: float) -> None:
        """Prepare.

        Args:
            name: For messages.
            start_seconds: How long it may take until it serves; an end before that is noticed at once.
        """
        self._name = name
        self._start_seconds = start_seconds
        self._poll_seconds = poll_seconds
        self._stop_seconds = stop_seconds
        self._program = BackgroundProgram("agl-engine")
        self._secrets: tuple[str, ...] = ()

    def start(self, plan: ProgramPlan, is_ready: Callable[[], bool], *, secrets: tuple[str, ...] = ()) -> None:
        """Return when it serves; EngineError with its last lines if it ends before, or takes too long.

        Args:
            secrets: Left out of its lines.
        """
        self._secrets = secrets
        self._program.start(plan)
        began = logged = time.monotonic()
        while not is_ready():
            now = time.monotonic()
            if self._program.has_ended(self._poll_seconds):
                raise self.ended()
            if now - began > self._start_seconds:
                raise EngineError(
                    f"{self._name} did not begin to serve within {self._start_seconds:g} s. {self._end()}"
                )
            if now - logged > _PROGRESS_SECONDS:
                logged = now
                last_line = "".join(self._program.last_lines(1, self._secrets))
                logger.info("%s has been loading for %.0f s: %s", self._name, now - began, last_line)
        logger.info("%s serves after %.0f s.", self._name, time.monotonic() - began)

    def stop(self) -> None:
        """End it with all that it started; harmless if nothing runs."""
        self._program.stop(self._stop_seconds)

    @property
    def process_id(self) -> int | None:
        return self._program.process_id

    def is_running(self) -> bool:
        return self._program.is_running()

    def has_ended(self) -> bool:
        """Whether it has ended, after waiting a moment for that."""
        return self._program.has_ended(END_SECONDS)

    def output(self) -> str:
        return self._program.output()

    def ended(self) -> EngineError:
        """Why it does not serve any more."""
        if not self.has_ended():
            return EngineError(f"{self._name} does not serve any more, and has not ended. {self._end()}")
        return EngineError(f"{self._name} has ended with code {self._program.exit_code}. {self._end()}")

    def _end(self) -> str:
        lines = self._program.last_lines(LAST_LINES, self._secrets)
        return "Its last lines:\n" + "\n".join(lines) if lines else "It printed nothing."
