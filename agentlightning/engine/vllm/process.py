"""A vLLM that we started: its whole process group ends with the training, also with one that is killed."""

import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Final

from agentlightning.engine.vllm.options import ServerCommand
from agentlightning.errors import EngineError
from agentlightning.utils.child_process import BackgroundProgram, ProgramPlan

__all__ = ["VllmProcess"]

logger = logging.getLogger(__name__)

START_SECONDS: Final = 1200.0
"""For large models on slow disks; one that has ended is noticed at once."""
STOP_SECONDS: Final = 15.0
LAST_LINES: Final = 30
"""Of its output, that an error shows."""
_END_SECONDS: Final = 5.0
"""Between the last answer of a server and its end."""
_POLL_SECONDS: Final = 0.2
_PROGRESS_SECONDS: Final = 15.0
_MARKER: Final = "AGL_VLLM_ID"


class VllmProcess:
    """`start` it and `stop` it; between them it may end by itself."""

    def __init__(self, command: ServerCommand, api_key: str) -> None:
        self._command = command
        self._api_key = api_key
        self._program = BackgroundProgram("agl-vllm")

    def start(self) -> None:
        """Run the command; it takes a minute or two until it serves."""
        environment = {**self._command.environment(self._api_key), _MARKER: secrets.token_hex()}
        with open(os.devnull, "rb") as nothing:
            plan = ProgramPlan(command=self._command.words(), env=environment, marker=_MARKER, stdin=nothing)
            self._program.start(plan)

    def await_health(self, is_healthy: Callable[[], bool]) -> None:
        """Return when it serves; EngineError with its last lines if it ends before, or takes too long."""
        began = told = time.monotonic()
        logger.info("vLLM loads '%s', which takes a minute or two.", self._command.model)
        while not is_healthy():
            now = time.monotonic()
            if not self.is_running():
                raise self.gone()
            if now - began > START_SECONDS:
                raise EngineError(f"vLLM did not begin to serve within {START_SECONDS:g} s. {self._shown()}")
            if now - told > _PROGRESS_SECONDS:
                told = now
                logger.info("vLLM has been loading for %.0f s: %s", now - began, "".join(self._lines(1)))
            time.sleep(_POLL_SECONDS)
        logger.info("vLLM serves '%s' after %.0f s.", self._command.model, time.monotonic() - began)

    def is_running(self) -> bool:
        return self._program.is_running()

    def gone(self) -> EngineError:
        """Why it does not serve any more."""
        has_ended = self._program.has_ended(_END_SECONDS)
        ended = f"vLLM has ended with code {self._program.exit_code}"
        return EngineError(f"{ended if has_ended else 'Its engine has ended, and vLLM waits'}. {self._shown()}")

    def stop(self) -> None:
        """End it with all that it started; harmless if nothing runs."""
        self._program.stop(STOP_SECONDS)

    def _shown(self) -> str:
        lines = self._lines(LAST_LINES)
        return "Its last lines:\n" + "\n".join(lines) if lines else "It printed nothing."

    def _lines(self, count: int) -> list[str]:
        return self._program.last_lines(count, (self._api_key,))
