"""A vLLM that we started: its whole process group ends with the training, also with one that is killed."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Final

from agentlightning.engine.vllm.options import ServerCommand
from agentlightning.errors import EngineError
from agentlightning.utils.loop_thread import LoopThread
from agentlightning.utils.program import Program, ProgramPlan

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
        self._thread = LoopThread("agl-vllm")
        self._program: Program | None = None

    def start(self) -> None:
        """Run the command; it takes a minute or two until it serves."""
        environment = {**self._command.environment(self._api_key), _MARKER: secrets.token_hex()}
        with open(os.devnull, "rb") as nothing:
            plan = ProgramPlan(command=self._command.words(), env=environment, marker=_MARKER, stdin=nothing)
            self._program = self._thread.run(Program.start(plan))

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
                logger.info("vLLM has been loading for %.0f s: %s", now - began, "".join(self._lines()[-1:]))
            time.sleep(_POLL_SECONDS)
        logger.info("vLLM serves '%s' after %.0f s.", self._command.model, time.monotonic() - began)

    def is_running(self) -> bool:
        return self._program is not None and self._program.exit_code is None

    def gone(self) -> EngineError:
        """Why it does not serve any more."""
        assert self._program is not None
        self._thread.run(_ended(self._program))
        code = self._program.exit_code
        what = "Its engine has ended, and vLLM waits" if code is None else f"vLLM has ended with code {code}"
        return EngineError(f"{what}. {self._shown()}")

    def stop(self) -> None:
        """End it with all that it started; harmless if nothing runs."""
        program, self._program = self._program, None
        if program is not None:
            self._thread.run(program.end(STOP_SECONDS))
        self._thread.stop()

    def _shown(self) -> str:
        lines = self._lines()[-LAST_LINES:]
        return "Its last lines:\n" + "\n".join(lines) if lines else "It printed nothing."

    def _lines(self) -> list[str]:
        output = None if self._program is None else self._program.stderr
        return [] if output is None else output.end((self._api_key,)).splitlines()


async def _ended(program: Program) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(program.wait(), _END_SECONDS)
