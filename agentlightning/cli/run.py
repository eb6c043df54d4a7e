"""`agl run`: run any program once as a rollout, with its model calls recorded.

The program is not changed and need not know: it finds the LLM proxy in the variables that SDKs look at, and a key that
is good for this attempt alone. The real keys stay in the proxy, which passes calls on to where the environment, or
`--model`, says.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import select
import shlex
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, get_args
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentlightning import semconv
from agentlightning.cli.command import (
    argument,
    cli_command,
    print_json,
    say,
)
from agentlightning.cli.models import MODEL_ARGUMENTS, Models, budget_of, models_of, passed_through
from agentlightning.cli.store import DEFAULT_SQLITE_PATH
from agentlightning.cli.stores import opened_store
from agentlightning.emitter import find_final_reward
from agentlightning.emitter.reward import get_reward_value
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import AgentLightningError, ConfigurationError
from agentlightning.litagent.command import CommandAgent, RewardSource
from agentlightning.litagent.command_environment import secrets_of
from agentlightning.llm_proxy import LLMProxy
from agentlightning.llm_proxy.flush import FlushedCalls, flush_calls
from agentlightning.logging import printable
from agentlightning.runner import LitAgentRunner
from agentlightning.runner.attempt import AttemptRun
from agentlightning.store import LightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import AttemptedRollout, NamedResources, ProxyLLM, Span, TaskInput
from agentlightning.types.resources import PROXY_SECRET_PREFIX
from agentlightning.utils.child_process import (
    DRAIN_SECONDS,
    KILL_SECONDS,
    STDERR,
    STDOUT,
    CapturedProcess,
    ProgramPlan,
    wait_for_event,
)
from agentlightning.utils.clipped_text import redacted

_LONGEST_TEXT: Final = 60
WORKER_ID: Final = "agl-run"
DEFAULT_RETRIES: Final = 2
_ANY_MODEL: Final = "*"
_SIGNALLED: Final = 128
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CREDENTIALS: Final = (
    *("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    *(LightningEnvVar.AGL_PROXY_API_KEY.value, LightningEnvVar.AGL_STORE_TOKEN.value),
)
"""Variables that would be shown to the proxy instead of the attempt's key, or are none of the program's business."""


@cli_command(
    "run",
    usage="agl run [options] -- COMMAND...",
    description="Run a program once, as a rollout with its model calls recorded.",
    examples="""\
examples:
  agl run -- python my_script.py                           its calls go where they always went, and are recorded
  agl run --model gpt-4o=http://127.0.0.1:8000/v1 -- node agent.js     what it calls gpt-4o is served there
  agl run --store http://127.0.0.1:4747 --proxy http://127.0.0.1:4749 -- ./agent    a proxy that runs already
  agl run --reward exit_code -- pytest -q                  the exit code is the reward; also: file, stdout, auto
  agl run --show ro-1f2e3d                                 what was recorded of a rollout

The program keeps its terminal, its input and its exit code. What it prints is recorded, unless to a terminal.
""",
    arguments=(
        argument("--store", default=DEFAULT_SQLITE_PATH, help="a file, or the address of a server"),
        argument("--token", help="token of the store; better given as AGL_STORE_TOKEN, which `ps` hides"),
        argument(
            "--proxy", metavar="URL", help="use a proxy that runs, for the same store; AGL_PROXY_API_KEY is its key"
        ),
        *MODEL_ARGUMENTS,
        argument("--task", metavar="JSON", help="the rollout's input, for AGL_TASK; else it is the command line"),
        argument(
            "--reward", choices=get_args(RewardSource), default="none", help="where the program says how well it did"
        ),
        argument(
            "--env",
            metavar="NAME",
            action="append",
            default=[],
            help="pass this variable on to the program, which inherits no keys, tokens and passwords; may be repeated",
        ),
        argument("--show", metavar="ROLLOUT_ID", help="show what was recorded of a rollout, and run nothing"),
        argument("--json", action="store_true", help="with --show, one JSON object for each span"),
        argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS),
    ),
    # A program that failed has said so itself, and the report says it again.
    quiet_loggers=("agentlightning.runner.attempt", "agentlightning.runner.failures", "agentlightning.llm_proxy.flush"),
    has_rest=True,
)
def main(arguments: argparse.Namespace) -> int:
    """Run the program; returns its exit code."""
    # Two dashes behind the program's name are the program's own.
    command = [*arguments.command, *arguments.rest[0 if arguments.command else 1 :]]
    if not command and arguments.show is None:
        main.parser().error("there is no program to run; write it behind two dashes: agl run -- python script.py")
    is_shown = arguments.show is not None
    task, models = ("", Models([])) if is_shown else (_task(arguments.task, command), models_of(arguments))
    variables = _passed_on(arguments.env)
    proxy = None if is_shown or arguments.proxy is None else _named_proxy(arguments, models)
    with opened_store(arguments.store, arguments.token, must_exist=is_shown) as store:
        if is_shown:
            asyncio.run(print_trace(store, arguments.show, as_json=arguments.json))
            return 0
        with _own_proxy(arguments, models, store) if proxy is None else contextlib.nullcontext(proxy) as llm:
            agent = _ForegroundAgent(command, llm, env=variables, reward_from=arguments.reward)
            return asyncio.run(_Session(arguments.store, store, agent).run(task))


def _task(text: str | None, command: Sequence[str]) -> TaskInput:
    if text is None:
        return redacted(shlex.join(command), secrets_of({}, os.environ))
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--task is no JSON: {error}; a text stands in quotes of its own: '\"text\"'."
        ) from error


# ---------------------------------------------------------------------- the proxy


@contextmanager
def _own_proxy(arguments: argparse.Namespace, models: Models, store: LightningStore) -> Iterator[ProxyLLM]:
    """The model as the program is to see it, behind a proxy that runs as long as the block."""
    models = models if models.entries else passed_through()
    proxy = LLMProxy(
        model_list=models.entries,
        store=store,
        litellm_config=models.settings,
        num_retries=DEFAULT_RETRIES,
        api_key=PROXY_SECRET_PREFIX + secrets.token_urlsafe(24),
        rollout_budget=budget_of(arguments),
    )
    proxy.start()
    try:
        resource = proxy.as_resource(model=models.entries[0]["model_name"])
        assert isinstance(resource, ProxyLLM)
        yield resource
    finally:
        proxy.stop()


def _named_proxy(arguments: argparse.Namespace, models: Models) -> ProxyLLM:
    """The same behind a proxy that runs already."""
    if models.entries or budget_of(arguments) is not None:
        raise ConfigurationError("--proxy has models and limits of its own; leave --model, --config and --max-... out.")
    if urlsplit(arguments.proxy).scheme not in ("http", "https"):
        raise ConfigurationError(f"--proxy {arguments.proxy} is no address; write it as http://127.0.0.1:4749.")
    key = resolve_str_env_var(LightningEnvVar.AGL_PROXY_API_KEY)
    secret = PROXY_SECRET_PREFIX + key.removeprefix(PROXY_SECRET_PREFIX) if key else "unused"
    return ProxyLLM(endpoint=arguments.proxy, model=_ANY_MODEL, api_key=secret)


# ---------------------------------------------------------------------- in the foreground
#
# The program has our terminal, our process group and our signals, as if a shell had started it. Where a stream goes to
# a terminal, it gets the terminal itself, with its colours and its questions. Any other stream is handed on as it
# comes, and kept in bounded memory on the way.


def streams_to_capture(*, reads_stdout: bool = False) -> set[int]:
    """Which streams are kept: those that are no terminal, and standard output where it is read for a reward."""
    return {number for number in (STDOUT, STDERR) if not os.isatty(number)} | ({STDOUT} if reads_stdout else set())


def has_terminal_signals() -> bool:
    """Whether Ctrl-C reaches our whole process group, and so the program too, without our help."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


class ForegroundProgram(CapturedProcess):
    """A running program; what it started is its own affair."""

    @classmethod
    async def start(cls, plan: ProgramPlan, captured: Collection[int]) -> "ForegroundProgram":
        """Run it with our standard input; OSError if it cannot be.

        Args:
            plan: What to run; its `stdin` and `marker` are for programs that run by themselves.
            captured: Which streams are kept and handed on; others are ours.
        """
        pipes: dict[str, Any] = {
            "stdin": None,
            "stdout": asyncio.subprocess.PIPE if STDOUT in captured else None,
            "stderr": asyncio.subprocess.PIPE if STDERR in captured else None,
        }
        sys.stdout.flush()
        sys.stderr.flush()
        _, program = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(captured), *plan.command, cwd=plan.cwd, env=dict(plan.env), **pipes
        )
        return program

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Hand on what is captured."""
        super().pipe_data_received(fd, data)
        try:
            _write(fd, data)
        except OSError:  # our reader has gone: the program is to learn it as it would without us
            pipe = self._transport.get_pipe_transport(fd)
            if pipe is not None:
                pipe.close()

    def send_signal(self, number: signal.Signals) -> None:
        """Harmless if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.send_signal(number)

    async def end(self, grace_seconds: float) -> None:
        """Read the last output; if the program still runs, ask it to end, and kill it later."""
        try:
            if not self.exited.is_set():
                self.send_signal(signal.SIGTERM)
                await wait_for_event(self.exited, grace_seconds)
            if not self.exited.is_set():
                self.send_signal(signal.SIGKILL)
                await wait_for_event(self.exited, KILL_SECONDS)
            # What a program left in the background may keep its streams open for ever.
            await wait_for_event(self.streams_closed, DRAIN_SECONDS)
        finally:
            self._transport.close()


def _write(fd: int, data: bytes) -> None:
    """All of it, past Python's own buffers; the program waits meanwhile, as it would for a slow terminal."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process has made our stream one that does not wait
            select.select([], [fd], [])


# ---------------------------------------------------------------------- the program


def _passed_on(names: Sequence[str]) -> dict[str, str]:
    """The variables that the user names for the program."""
    for name in names:
        if name in _CREDENTIALS:
            raise ConfigurationError(
                f"--env {name}: the proxy has {name}, and the program gets a key for its attempt; leave it out."
            )
        if name not in os.environ:
            raise ConfigurationError(f"--env {name}: there is no variable {name} to pass on; set it, or leave it out.")
    return {name: os.environ[name] for name in names}


class _ForegroundAgent(CommandAgent):
    """Runs its program before the eyes of the user."""

    def __init__(
        self, command: Sequence[str], llm: ProxyLLM, *, env: dict[str, str], reward_from: RewardSource
    ) -> None:
        super().__init__(command, env=env, reward_from=reward_from, stdin="none")
        self.llm = llm
        self.program: ForegroundProgram | None = None
        self.flushed = FlushedCalls()
        """What the proxy says of the calls of the attempt, when the program has ended."""

    async def start_program(self, plan: ProgramPlan) -> ForegroundProgram:
        captured = streams_to_capture(reads_stdout=self.reward_from in ("auto", "stdout"))
        self.program = await ForegroundProgram.start(plan, captured)
        return self.program

    async def rollout_async(self, task: TaskInput, resources: NamedResources, rollout: Any) -> Any:
        try:
            return await super().rollout_async(task, resources, rollout)
        finally:  # before the attempt is over, and its key with it
            self.flushed = await flush_calls([self.llm], rollout, rollout.attempt.attempt_id)

    def _environment(
        self, task: TaskInput, resources: NamedResources, rollout: AttemptedRollout, folder: Path
    ) -> dict[str, str]:
        environment = super()._environment(task, resources, rollout, folder)
        if _ANY_MODEL in self.llm.model:  # the program names its models itself
            environment.pop("AGL_MODEL")
            environment.pop("OPENAI_MODEL")
            environment |= {name: os.environ[name] for name in ("OPENAI_MODEL",) if name in os.environ}
        # Calls to our proxy do not go through one of the network.
        if any(environment.get(name) for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")):
            host = urlsplit(self.llm.get_base_url(None, None)).hostname or ""
            listed = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
            environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), f"{listed},{host}" if listed else host)
        return environment


class _Session:
    """One run of one program, from its rollout to the report."""

    def __init__(self, address: str, store: LightningStore, agent: _ForegroundAgent) -> None:
        self._address = address
        self._store = store
        self._agent = agent
        self._ended_by: signal.Signals | None = None

    async def run(self, task: TaskInput) -> int:
        try:
            with self._passing_signals_on():
                rollout = await self._store.start_rollout(task, worker_id=WORKER_ID)
                error = await self._attempted(rollout)
                report = await report_of(self._store, rollout, self._agent.flushed, self._address)
        except asyncio.CancelledError:
            if self._ended_by is None:
                raise
            if self._ended_by == signal.SIGINT:
                raise KeyboardInterrupt from None
            return _SIGNALLED + self._ended_by
        _print(report, is_error=True)  # it is not the program's result
        program = self._agent.program
        if program is None or program.exit_code is None:
            _report_error(error)
            # What shells give for a program that is not there.
            return 127
        if error is not None and program.exit_code == 0:
            _report_error(error)  # such as a reward that cannot be read
        if program.exit_code != 0 and self._agent.withheld:
            names = ", ".join(self._agent.withheld)
            _say(f"the program did not inherit {names}; pass on what it needs with --env NAME.")
        return program.exit_code if program.exit_code >= 0 else _SIGNALLED - program.exit_code

    async def _attempted(self, rollout: AttemptedRollout) -> BaseException | None:
        """Run the program as the attempt of its rollout; what went wrong, if anything did."""
        runner: LitAgentRunner[TaskInput] = LitAgentRunner(OtelTracer(instrument=False))
        with runner.run_context(agent=self._agent, store=self._store):
            # Not published: in a store that others use, the proxy of one program is not for all.
            attempt = AttemptRun(runner, rollout, resources={"main_llm": self._agent.llm})
            await attempt.run()
            return attempt.error

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Have the program, not us, ended by signals; before it runs, they end us."""
        loop, ours = asyncio.get_running_loop(), asyncio.current_task()
        assert ours is not None

        def pass_on(number: signal.Signals) -> None:
            program = self._agent.program
            if program is None:
                self._ended_by = number
                ours.cancel()
            elif number != signal.SIGINT or not has_terminal_signals():
                program.send_signal(number)

        for number in _PASSED_ON:
            loop.add_signal_handler(number, pass_on, number)
        try:
            yield
        finally:
            for number in _PASSED_ON:
                loop.remove_signal_handler(number)


# ---------------------------------------------------------------------- what was recorded


async def report_of(store: LightningStore, rollout: AttemptedRollout, flushed: FlushedCalls, address: str) -> Table:
    """The figures of an attempt that is over, and of whose calls the proxy has told."""
    spans = await store.query_spans(rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)
    known = await store.get_rollout_by_id(rollout.rollout_id)
    calls = [span for span in spans if span.name == semconv.CALL_SPAN]
    failed = sum(span.status.status_code == "ERROR" for span in calls)
    reward = find_final_reward(spans)
    table = Table(show_header=False)
    table.add_row("rollout", f"{rollout.rollout_id} ({'unknown' if known is None else known.status})")
    table.add_row("model calls", f"{len(calls)} ({failed} failed)" if failed else str(len(calls)))
    for words in _missing(flushed):
        table.add_row("not recorded", escape(words))
    table.add_row("tokens", f"{_sum(calls, semconv.TOKENS_READ)} read, {_sum(calls, semconv.TOKENS_WRITTEN)} written")
    table.add_row("reward", "none" if reward is None else f"{reward:g}")
    table.add_row("recorded in", escape(address))
    table.add_row("trace", f"agl run --show {rollout.rollout_id} --store {escape(shlex.quote(address))}")
    return table


def _sum(calls: Sequence[Span], name: str) -> int:
    return sum(value for call in calls if isinstance(value := call.attributes.get(name), int))


def _missing(flushed: FlushedCalls) -> list[str]:
    words = [f"{number} calls: {reason}" if number else reason for reason, number in flushed.lost.items()]
    if flushed.unanswered:
        words.append(f"{flushed.unanswered} calls: not answered when the program ended")
    if flushed.unknown_proxies:
        words.append("what calls there were: the address of the proxy is not that of an `agl proxy`")
    return words


def _print(table: Table, *, is_error: bool = False) -> None:
    """Whole, also where there is no terminal whose width is known."""
    console = Console(stderr=is_error)
    if not console.is_terminal:
        # No table here has so many columns of text.
        console.width = 400
    console.print(table)


async def print_trace(store: LightningStore, rollout_id: str, *, as_json: bool) -> None:
    """Print the spans of a rollout's last attempt, in their order."""
    if await store.get_rollout_by_id(rollout_id) is None:
        raise ConfigurationError(f"There is no rollout '{rollout_id}' in this store.")
    spans = await store.query_spans(rollout_id, attempt_id="latest", sort_by="sequence_id")
    table = Table(title=f"trace of {escape(rollout_id)}")
    for column in ("#", "span", "model", "tokens", "seconds", "what"):
        table.add_column(column)
    for span in spans:
        if as_json:
            print_json(span.model_dump(mode="json"))
        elif span.name != semconv.RAW_SPAN:
            table.add_row(*(escape(printable(text)) for text in _row(span)))
    if not as_json:
        _print(table)


def _row(span: Span) -> tuple[str, ...]:
    attributes = span.attributes
    read = attributes.get(semconv.TOKENS_READ)
    tokens = "" if read is None else f"{read}+{attributes.get(semconv.TOKENS_WRITTEN, 0)}"
    model = str(attributes.get(semconv.RESPONSE_MODEL) or attributes.get(semconv.REQUEST_MODEL) or "")
    seconds = "" if span.start_time is None or span.end_time is None else f"{span.end_time - span.start_time:.3f}"
    name = "model call" if span.name == semconv.CALL_SPAN else span.name
    reward = get_reward_value(span)
    details = (
        span.status.description if span.status.status_code == "ERROR" else None,
        None if reward is None else f"reward {reward:g}",
        attributes.get(f"{semconv.COMPLETION}.0.content"),
        attributes.get("agentlightning.command.text"),
    )
    text = " ".join(str(next((detail for detail in details if detail), "")).split())
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
    return str(span.sequence_id), name, model, tokens, seconds, text


def _report_error(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, AgentLightningError):
        raise error
    _say(str(error))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        say("run", text)
