"""CommandAgent: any program, in any language, as an agent.

    CommandAgent(["node", "agent.js"], timeout_seconds=60)

For each rollout the program is run once. It reads the task from its standard input, finds its model in the variables
that SDKs look at (`command_environment`), and says how well it did (`command_reward`). What it prints becomes spans.
Whatever happens, nothing of it is left when the rollout is over (`utils.child_process`).
"""

import asyncio
import logging
import os
import shlex
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

from agentlightning.emitter import OperationContext, operation
from agentlightning.errors import AttemptTimedOut, ConfigurationError, RolloutFailed
from agentlightning.litagent.command_environment import (
    REWARD_FILE,
    as_json,
    attempt_variables,
    credentials_withheld,
    inherited,
    model_variables,
    secrets_of,
    telemetry_variables,
)
from agentlightning.litagent.command_reward import ProgramResult, RewardSource, read_reward
from agentlightning.litagent.litagent import LitAgent
from agentlightning.litagent.scoping import resources_for
from agentlightning.store.base import LightningStore
from agentlightning.tracer import get_active_tracer
from agentlightning.types import AttemptedRollout, Attributes, NamedResources, Rollout, RolloutRawResult, TaskInput
from agentlightning.utils.child_process import Program, ProgramPlan
from agentlightning.utils.clipped_text import ClippedText, redacted

__all__ = ["CommandAgent", "RunningProgram", "StdinFormat"]

logger = logging.getLogger(__name__)

StdinFormat = Literal["json", "text", "none"]
"""The task as a JSON document; the same, but text as it is; or nothing."""

GRACE_SECONDS: Final = 2.0
"""How long a program may take to end when it is asked to; a runner that was cancelled waits for 5 s in all."""
LONGEST_REWARD_FILE: Final = 64 * 1024
_SHOWN_LINES: Final = 10
_SHOWN_CHARACTERS: Final = 2000
_LONGEST_COMMAND: Final = 200


class RunningProgram(Protocol):
    """What a program is to its agent; see `utils.child_process.Program`."""

    @property
    def stdout(self) -> ClippedText | None:
        """None if what it writes goes elsewhere."""

    @property
    def stderr(self) -> ClippedText | None: ...

    @property
    def exit_code(self) -> int | None: ...

    @property
    def duration_seconds(self) -> float: ...

    async def wait(self) -> None: ...

    async def end(self, grace_seconds: float) -> None: ...


class CommandAgent(LitAgent[Any]):
    """Runs a program for each task."""

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        timeout_seconds: float | None = None,
        reward_from: RewardSource = "auto",
        stdin: StdinFormat = "json",
    ) -> None:
        """Nothing is run yet.

        Args:
            command: The program and its arguments; no shell reads them.
            cwd: The folder it runs in; by default ours.
            env: Variables to add.
            inherit_env: Gives it our environment without `AGL_` secrets and, if the resources name a model, without all
                other credentials, which `env` can add; False gives it `PATH` alone.
            timeout_seconds: After which the program is ended and the rollout fails; the rollout's own limit counts too.
            reward_from: Where to look for the reward. With `exit_code` it is 1 for zero and else 0; otherwise a program
                that ends with another code fails its rollout.
            stdin: How it is given the task.
        """
        super().__init__()
        self.command = _checked_command(command)
        self.cwd = None if cwd is None else os.fspath(cwd)
        self.env = _checked_env(env or {})
        self.inherit_env = inherit_env
        self.timeout_seconds = timeout_seconds
        self.reward_from = reward_from
        self.stdin = stdin
        self.withheld: tuple[str, ...] = ()
        """Variables that the last program did not inherit, because they are credentials."""
        _check_choice("reward_from", reward_from, get_args(RewardSource))
        _check_choice("stdin", stdin, get_args(StdinFormat))
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ConfigurationError(f"timeout_seconds must be above zero, or None; it is {timeout_seconds}.")
        if os.name != "posix":
            raise ConfigurationError("CommandAgent needs process groups, which this system does not have; use WSL.")

    async def rollout_async(self, task: TaskInput, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        if not isinstance(rollout, AttemptedRollout):
            raise ConfigurationError(
                f"CommandAgent tells its program which attempt it works for; a {type(rollout).__name__} has none. "
                "Pass an AttemptedRollout, as runners do."
            )
        own = resources_for(None, resources)
        with tempfile.TemporaryDirectory(prefix="agl-command-", ignore_cleanup_errors=True) as name, _noting() as noted:
            environment = self._environment(task, own, rollout, Path(name))
            run = _Run(self, environment, secrets_of(resources, environment), noted)
            return await run.result(task)

    async def start_program(self, plan: ProgramPlan) -> RunningProgram:
        """Run the program, by itself and in the background; OSError if it cannot be."""
        return await Program.start(plan)

    def _environment(
        self, task: TaskInput, resources: NamedResources, rollout: AttemptedRollout, folder: Path
    ) -> dict[str, str]:
        given = {**inherited(resources, is_everything=self.inherit_env), **self.env}
        environment = {
            **given,
            **model_variables(resources, rollout, given),
            **telemetry_variables(rollout, self._store(), given),
            **self.env,
            **attempt_variables(task, resources, rollout, folder),
        }
        left_out = credentials_withheld(resources) - environment.keys() if self.inherit_env else ()
        self._note_withheld(tuple(sorted(left_out)))
        return environment

    def _note_withheld(self, names: tuple[str, ...]) -> None:
        """Log which variables the program may miss, once for the same ones."""
        if names and names != self.withheld:
            logger.info("%s does not inherit %s; name in env= what it needs.", self.command[0], ", ".join(names))
        self.withheld = names

    def _store(self) -> LightningStore | None:
        """Where spans go; None for an agent that is called without a runner."""
        if vars(self).get("_runner_ref") is None:
            return None
        store: LightningStore = self.get_runner().get_store()
        return store


@dataclass(frozen=True)
class _Run:
    """One run of the program."""

    agent: CommandAgent
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    noted: OperationContext | None
    """The span around it; None if nobody records."""

    async def result(self, task: TaskInput) -> float | None:
        """Run the program to its end, and read its reward."""
        if self.noted is not None:
            words = [redacted(word, self.secrets) for word in self.agent.command]
            self.noted.set_input(command=words, cwd=self.agent.cwd or os.getcwd())
        program = await self._started(task)
        try:
            is_late = not await _ends_within(program, self.agent.timeout_seconds)
        finally:
            try:
                await program.end(GRACE_SECONDS)
            finally:
                self._note(program)
        if is_late:
            limit = self.agent.timeout_seconds
            raise AttemptTimedOut(
                f"{self._name} did not end within {limit:g} s and was killed.{self._last_words(program)}"
            )
        if program.exit_code != 0 and self.agent.reward_from != "exit_code":
            raise RolloutFailed(f"{self._name} {_described(program.exit_code)}.{self._last_words(program)}")
        return self._reward(program)

    async def _started(self, task: TaskInput) -> RunningProgram:
        agent = self.agent
        folder = Path(self.environment[REWARD_FILE]).parent
        path = folder / "stdin" if agent.stdin != "none" else Path(os.devnull)
        if agent.stdin != "none":
            path.write_text(_stdin_text(task, agent.stdin), encoding="utf-8")
        try:
            # A file, not a pipe: it is there at once whatever its size, and can be opened again as /dev/stdin.
            with path.open("rb") as stdin:
                return await agent.start_program(
                    ProgramPlan(agent.command, self.environment, marker=REWARD_FILE, stdin=stdin, cwd=agent.cwd)
                )
        except (OSError, ValueError) as error:
            raise ConfigurationError(self._why_not(error)) from error

    def _why_not(self, error: OSError | ValueError) -> str:
        """Why the program could not be started, and what to do about it."""
        program, cwd = self.agent.command[0], self.agent.cwd
        if cwd is not None and not Path(cwd).is_dir():
            return f"{self._name} cannot run in '{cwd}', which is not a folder; give another cwd."
        if isinstance(error, FileNotFoundError) and os.sep not in program:
            return (
                f"There is no program '{program}' on the PATH of its runner; install it there, or give its whole path."
            )
        if isinstance(error, FileNotFoundError):
            return (
                f"There is no program '{program}', or none that its first line names; a relative path begins at cwd, "
                f"which is '{cwd or os.getcwd()}'."
            )
        if isinstance(error, PermissionError):
            return f"'{program}' may not be executed: chmod +x it, or name its interpreter before it in the command."
        return f"{self._name} could not be started: {error}."

    # ------------------------------------------------------------------ what it left

    def _note(self, program: RunningProgram) -> None:
        """Spans for its output, and its exit code on the span around it."""
        tracer = get_active_tracer()
        if tracer is None or self.noted is None:
            return
        for name, stream in (("stdout", program.stdout), ("stderr", program.stderr)):
            if stream is None:
                continue
            attributes: Attributes = {
                "agentlightning.command.stream": name,
                "agentlightning.command.text": stream.text(self.secrets),
                "agentlightning.command.bytes": stream.byte_count,
                "agentlightning.command.cut_bytes": stream.cut_bytes,
            }
            tracer.create_span(f"command.{name}", attributes)
        end = {} if program.exit_code is None else {"exit_code": program.exit_code}
        self.noted.set_output({**end, "duration_seconds": program.duration_seconds})

    def _reward(self, program: RunningProgram) -> float | None:
        assert program.exit_code is not None
        result = ProgramResult(
            file=_content_of(Path(self.environment[REWARD_FILE])),
            last_line="" if program.stdout is None else _last_line(program.stdout),
            exit_code=program.exit_code,
        )
        return read_reward(self.agent.reward_from, result)

    @property
    def _name(self) -> str:
        command = redacted(shlex.join(self.agent.command), self.secrets)
        shown = command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}…"
        return f"The program '{shown}'"

    def _last_words(self, program: RunningProgram) -> str:
        if program.stderr is None:
            return ""
        lines = program.stderr.end(self.secrets).rstrip().splitlines()[-_SHOWN_LINES:]
        text = "\n".join(lines)[-_SHOWN_CHARACTERS:]
        return f" The end of its stderr:\n{text}" if text else " It wrote nothing to stderr."


def _noting() -> AbstractContextManager[OperationContext | None]:
    return nullcontext() if get_active_tracer() is None else operation(name="command")


async def _ends_within(program: RunningProgram, seconds: float | None) -> bool:
    try:
        await asyncio.wait_for(program.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True


def _last_line(stream: ClippedText) -> str:
    """Without white space around it; empty if its beginning is missing."""
    lines = stream.end().rstrip().rsplit("\n", 1)
    is_whole = len(lines) > 1 or not stream.cut_bytes
    return lines[-1].strip() if is_whole else ""


def _described(exit_code: int | None) -> str:
    if exit_code is None:
        return "could not be ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by the signal {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"was ended by the signal {-exit_code}"


def _stdin_text(task: TaskInput, form: StdinFormat) -> str:
    return task if form == "text" and isinstance(task, str) else as_json(task, "task")


def _content_of(path: Path) -> str:
    """What the program wrote; it may also have removed the file, or put something else in its place."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(LONGEST_REWARD_FILE).decode(errors="replace")


def _checked_command(command: object) -> tuple[str, ...]:
    if isinstance(command, (str, os.PathLike)):
        text = os.fspath(command)
        raise ConfigurationError(
            f"CommandAgent takes a list of words, because no shell reads them; instead of {text!r} give "
            f"{_split(text)!r} or, for pipes and the like, {['sh', '-c', text]!r}."
        )
    words: list[object] = list(command) if isinstance(command, Sequence) else []
    checked = tuple(os.fspath(word) for word in words if isinstance(word, (str, os.PathLike)))
    if not checked or len(checked) < len(words):
        raise ConfigurationError(
            f"The command of CommandAgent must be a list of words such as ['python', 'agent.py']; it is {command!r}."
        )
    return checked


def _checked_env(env: Mapping[str, object]) -> dict[str, str]:
    for name, value in env.items():
        if not isinstance(value, (str, os.PathLike)):
            raise ConfigurationError(
                f"Variables in env are text; {name} is of type {type(value).__name__}: give str(...)."
            )
    return {name: os.fspath(value) for name, value in env.items() if isinstance(value, (str, os.PathLike))}


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an open quote
        return command.split()


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}.")
