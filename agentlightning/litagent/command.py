"""CommandAgent: any program, in any language, as an agent.

    CommandAgent(["node", "agent.js"], timeout_seconds=60)

For each rollout the program is run once. It reads the task from its standard input, finds its model in the variables
that SDKs look at (`command_environment`), and reports its reward: in its reward file, in the last line it prints, or by
its exit code. Its output becomes spans. Nothing of it is left when the rollout is over (`utils.child_process`).
"""

import asyncio
import json
import logging
import math
import os
import re
import shlex
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

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
from agentlightning.litagent.litagent import LitAgent
from agentlightning.store.base import LightningStore
from agentlightning.tracer import get_active_tracer
from agentlightning.types import AttemptedRollout, Attributes, NamedResources, Rollout, RolloutRawResult, TaskInput
from agentlightning.types.resources import resources_for
from agentlightning.utils.child_process import CapturedProcess, Program, ProgramPlan
from agentlightning.utils.clipped_text import ClippedText, redacted
from agentlightning.utils.spelling import suggests_arguments

__all__ = ["CommandAgent", "RewardSource", "StdinFormat"]

logger = logging.getLogger(__name__)

StdinFormat = Literal["json", "text", "none"]
"""The task as a JSON document; the same, but text as it is; or nothing."""
RewardSource = Literal["auto", "stdout", "file", "exit_code", "none"]
"""`auto` reads the file if it was written, else the last line, if that is a reward, else gives none."""

GRACE_SECONDS: Final = 2.0
"""How long a program may take to end when it is asked to; a runner that was cancelled waits for 5 s in all."""
LONGEST_REWARD_FILE: Final = 64 * 1024
_SHOWN_LINES: Final = 10
_SHOWN_CHARACTERS: Final = 2000
_LONGEST_QUOTE: Final = 200
_NUMBER: Final = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf|infinity)", re.ASCII | re.IGNORECASE)


@suggests_arguments
class CommandAgent(LitAgent[TaskInput]):
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
        """Check the options; the program runs for each rollout.

        Args:
            command: The program and its arguments; no shell reads them.
            cwd: The folder it runs in; by default ours.
            env: Variables to add.
            inherit_env: Gives it our environment without `AGL_` secrets and, if the resources name a model, without all
                other credentials, which `env` can add; False gives it `PATH` alone.
            timeout_seconds: After which the program is ended and the rollout fails; the rollout's own limit counts too.
            reward_from: Where to look for the reward. With `exit_code` it is 1 for zero and else 0; otherwise a program
                that ends with another code fails its rollout.
            stdin: How it gets the task.
        """
        super().__init__()
        self.command = _checked_command(command)
        self.cwd = None if cwd is None else os.fspath(cwd)
        self.env = {name: os.fspath(value) for name, value in (env or {}).items() if _check_variable(name, value)}
        self.inherit_env = inherit_env
        self.timeout_seconds = timeout_seconds
        self.reward_from = reward_from
        self.stdin = stdin
        self.withheld: tuple[str, ...] = ()
        """Variables that the last program did not inherit, because they are credentials."""
        for name, value, choices in (("reward_from", reward_from, RewardSource), ("stdin", stdin, StdinFormat)):
            if value not in get_args(choices):
                known = ", ".join(map(repr, get_args(choices)))
                raise ConfigurationError(f"{name} is {value!r}; it must be one of {known}.")
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
        spans = nullcontext() if get_active_tracer() is None else operation(name="command")
        with tempfile.TemporaryDirectory(prefix="agl-command-", ignore_cleanup_errors=True) as name, spans as span:
            environment = self._environment(task, resources_for(None, resources), rollout, Path(name))
            return await _Run(self, environment, secrets_of(resources, environment), span).result(task)

    async def start_program(self, plan: ProgramPlan) -> CapturedProcess:
        """Run the program, by itself and in the background; OSError if it cannot be."""
        return await Program.start(plan)

    def _environment(
        self, task: TaskInput, resources: NamedResources, rollout: AttemptedRollout, folder: Path
    ) -> dict[str, str]:
        store: LightningStore | None = None  # there is none for an agent that is called without a runner
        if vars(self).get("_runner_ref") is not None:
            store = self.get_runner().get_store()
        given = {**inherited(resources, is_everything=self.inherit_env), **self.env}
        environment = {
            **given,
            **model_variables(resources, rollout, given),
            **telemetry_variables(rollout, store, given),
            **self.env,
            **attempt_variables(task, resources, rollout, folder),
        }
        withheld = sorted(credentials_withheld(resources) - environment.keys()) if self.inherit_env else []
        if withheld and tuple(withheld) != self.withheld:
            logger.info("%s does not inherit %s; name in env= what it needs.", self.command[0], ", ".join(withheld))
        self.withheld = tuple(withheld)
        return environment


@dataclass(frozen=True)
class _Run:
    """One run of the program."""

    agent: CommandAgent
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    span: OperationContext | None
    """Around the run; None if no tracer is active."""

    async def result(self, task: TaskInput) -> float | None:
        """Run the program to its end, and read its reward."""
        agent = self.agent
        if self.span is not None:
            command = [redacted(word, self.secrets) for word in agent.command]
            self.span.set_input(command=command, cwd=agent.cwd or os.getcwd())
        program = await self._started(task)
        is_late = False
        try:
            await asyncio.wait_for(program.wait(), agent.timeout_seconds)
        except asyncio.TimeoutError:
            is_late = True
        finally:
            try:
                await program.end(GRACE_SECONDS)
            finally:
                self._record(program)
        if is_late:
            limit = f"{agent.timeout_seconds:g} s"
            raise AttemptTimedOut(
                f"{self._name} did not end within {limit} and was killed.{self._error_lines(program)}"
            )
        if program.exit_code != 0 and agent.reward_from != "exit_code":
            raise RolloutFailed(f"{self._name} {_described(program.exit_code)}.{self._error_lines(program)}")
        return self._reward(program)

    async def _started(self, task: TaskInput) -> CapturedProcess:
        agent = self.agent
        path = Path(os.devnull)
        if agent.stdin != "none":
            path = Path(self.environment[REWARD_FILE]).parent / "stdin"
            is_plain = agent.stdin == "text" and isinstance(task, str)
            path.write_text(str(task) if is_plain else as_json(task, "task"), encoding="utf-8")
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

    def _record(self, program: CapturedProcess) -> None:
        """Spans for its output, and its exit code on the span around it."""
        tracer = get_active_tracer()
        if tracer is None or self.span is None:
            return
        for name, stream in (("stdout", program.stdout), ("stderr", program.stderr)):
            if stream is not None:
                attributes: Attributes = {
                    "agentlightning.command.stream": name,
                    "agentlightning.command.text": stream.text(self.secrets),
                    "agentlightning.command.bytes": stream.byte_count,
                    "agentlightning.command.cut_bytes": stream.cut_bytes,
                }
                tracer.create_span(f"command.{name}", attributes)
        end = {} if program.exit_code is None else {"exit_code": program.exit_code}
        self.span.set_output({**end, "duration_seconds": program.duration_seconds})

    @property
    def _name(self) -> str:
        command = redacted(shlex.join(self.agent.command), self.secrets)
        shown = command if len(command) <= _LONGEST_QUOTE else f"{command[:_LONGEST_QUOTE]}…"
        return f"The program '{shown}'"

    def _error_lines(self, program: CapturedProcess) -> str:
        if program.stderr is None:
            return ""
        lines = program.stderr.end(self.secrets).rstrip().splitlines()[-_SHOWN_LINES:]
        text = "\n".join(lines)[-_SHOWN_CHARACTERS:]
        return f" The end of its stderr:\n{text}" if text else " It wrote nothing to stderr."

    # ------------------------------------------------------------------ the reward

    def _reward(self, program: CapturedProcess) -> float | None:
        """The reward from where it is expected; RolloutFailed if it is not there."""
        source = self.agent.reward_from
        if source == "none":
            return None
        if source == "exit_code":
            return 1.0 if program.exit_code == 0 else 0.0
        path, written = Path(self.environment[REWARD_FILE]), ""
        if source != "stdout" and path.is_file():  # the program may have removed it, or put a folder in its place
            with path.open("rb") as file:
                written = file.read(LONGEST_REWARD_FILE).decode(errors="replace").strip()
        if source == "file" or written:
            place, text = "The reward file", written
            reward = _parsed_reward(text, place)
            if reward is None and text:
                reward = _parsed_reward(text.splitlines()[-1].strip(), place)
        else:
            place, text = "The last line of stdout", _last_line(program.stdout)
            reward = _parsed_reward(text, place)
            if source == "auto":
                return reward
        if reward is None:
            found = f"it is {text[:_LONGEST_QUOTE]!r}" if text else "it is empty"
            raise RolloutFailed(f'{place} must be a number or a JSON object such as {{"reward": 0.5}}; {found}.')
        return reward


def _last_line(stream: ClippedText | None) -> str:
    """Without white space around it; empty if its beginning is missing."""
    lines = [] if stream is None else stream.end().rstrip().rsplit("\n", 1)
    is_whole = len(lines) > 1 or (stream is not None and not stream.cut_bytes)
    return lines[-1].strip() if is_whole else ""


def _parsed_reward(text: str, place: str) -> float | None:
    """A number, or the `reward` of a JSON object; None for anything else."""
    value: Any
    if text.startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if "reward" not in value:
            return None
        value = value["reward"]
        if not isinstance(value, (int, float)):
            raise RolloutFailed(f"{place} gives the reward {str(value)[:_LONGEST_QUOTE]!r}, which is not a number.")
    elif _NUMBER.fullmatch(text):
        value = text
    else:
        return None
    try:
        reward = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        reward = math.inf
    if not math.isfinite(reward):
        raise RolloutFailed(f"{place} gives the reward {reward}; a reward must be finite.")
    return reward


def _described(exit_code: int | None) -> str:
    if exit_code is None:
        return "could not be ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by the signal {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"was ended by the signal {-exit_code}"


def _checked_command(command: object) -> tuple[str, ...]:
    if isinstance(command, (str, os.PathLike)):
        text = os.fspath(command)
        try:
            words = shlex.split(text)
        except ValueError:  # an open quote
            words = text.split()
        raise ConfigurationError(
            f"CommandAgent takes a list of words, because no shell reads them; instead of {text!r} give "
            f"{words!r} or, for pipes and the like, {['sh', '-c', text]!r}."
        )
    given = list(command) if isinstance(command, Sequence) else []
    if not given or not all(isinstance(word, (str, os.PathLike)) for word in given):
        raise ConfigurationError(
            f"The command of CommandAgent must be a list of words such as ['python', 'agent.py']; it is {command!r}."
        )
    return tuple(os.fspath(word) for word in given)


def _check_variable(name: str, value: object) -> bool:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"Variables in env are text; {name} is of type {type(value).__name__}: give str(...).")
    return True
