"""`agl runner`: run an agent for a training on another machine; it may come and go at any time."""

import asyncio
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from agentlightning.cli.arguments import CommandParser, amount, positive_number
from agentlightning.cli.store_address import why_silent
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError
from agentlightning.execution import ClientServerExecutionStrategy
from agentlightning.execution.events import ControlFlags, ExecutionEvent, ThreadingEvent
from agentlightning.litagent import LitAgent
from agentlightning.litagent.decorator import FunctionalLitAgent
from agentlightning.logging import setup
from agentlightning.runner import LitAgentRunner
from agentlightning.store import LightningStore, LightningStoreClient
from agentlightning.tracer import OtelTracer
from agentlightning.trainer.roles import RunnerRole

__all__ = ["main"]

DEFAULT_STORE = "http://127.0.0.1:4747"
GRACE_SECONDS = 30.0

EXAMPLES = """\
examples:
  agl runner my_agent:agent                                      for a training on this machine
  agl runner --store http://trainer:4747 my_agent:agent          for one on another; AGL_STORE_TOKEN lets you in
  agl runner --n-runners 4 --max-concurrency 16 my_agent:agent   64 rollouts at once, in 4 processes
  agl runner --max-rollouts 100 my_agent:agent                   leave after 100

Ctrl-C or SIGTERM lets running rollouts finish, for --grace seconds; a second one leaves at once. What still ran is
given back.
"""


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="agl runner",
        description="Run an agent on the rollouts of a training.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "agent", metavar="MODULE:AGENT", help="where the agent is: a function, a LitAgent, or a class of one"
    )
    parser.add_argument("--store", default=DEFAULT_STORE, help="the training's store (default: %(default)s)")
    parser.add_argument("--token", help="what the store asks for; better given as AGL_STORE_TOKEN, which `ps` hides")
    parser.add_argument("--n-runners", type=positive_number, default=1, help="processes (default: %(default)s)")
    parser.add_argument(
        "--max-concurrency", type=positive_number, default=1, help="rollouts at once in each (default: %(default)s)"
    )
    parser.add_argument(
        "--max-rollouts", type=positive_number, help="leave after so many in each process; never by default"
    )
    parser.add_argument("--name", default="Worker", help="how the workers' ids begin (default: %(default)s)")
    parser.add_argument(
        "--grace",
        type=amount,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help="how long the last rollouts may take once it leaves (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-poml", action="store_true", help="format POML templates of the store, which are code of who wrote them"
    )
    parser.add_argument("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; returns the exit code."""
    arguments = _parser().parse_args(argv)
    setup(arguments.log_level.upper())
    agent = loaded_agent(arguments.agent)
    token = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, arguments.token)
    store = LightningStoreClient(arguments.store, token=token)
    silence = why_silent(arguments.store, token)
    runner: LitAgentRunner[object] = LitAgentRunner(
        OtelTracer(),
        max_rollouts=arguments.max_rollouts,
        max_concurrency=arguments.max_concurrency,
        worker_name=arguments.name,
        allow_poml=arguments.allow_poml,
    )
    strategy = ClientServerExecutionStrategy(
        role="runner", n_runners=arguments.n_runners, managed_store=False, graceful_timeout=arguments.grace
    )
    flags = ControlFlags(paused=ThreadingEvent(), stopped=ThreadingEvent(), prepared=ThreadingEvent())
    role = RunnerRole(runner, agent, (), flags, is_alone=True)
    print(f"agl runner: {arguments.name} works for {arguments.store}; Ctrl-C to leave", file=sys.stderr)  # noqa: T201
    if silence is not None:
        print(f"agl runner: {silence} It is waited for.", file=sys.stderr)  # noqa: T201
    try:
        strategy.execute(_no_algorithm, role, store)
    finally:
        asyncio.run(store.close())
    if strategy.is_interrupted:
        raise KeyboardInterrupt
    return 0


async def _no_algorithm(store: LightningStore, event: ExecutionEvent) -> None:
    raise AssertionError("A runner has no algorithm.")


def _described(error: Exception) -> str:
    """An error in a line, with the place where it was raised unless it says that itself."""
    if isinstance(error, (ImportError, AttributeError, ValueError, SyntaxError)):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"


def loaded_agent(address: str) -> LitAgent[object]:
    """The agent at `module:name`; modules of the working directory are found too."""
    sys.path.insert(0, os.getcwd())
    if ":" not in address:
        raise ConfigurationError(f"'{address}' does not say where the agent is; write it as module:agent.")
    try:
        found = pkgutil.resolve_name(address)
        agent = found() if isinstance(found, type) and issubclass(found, LitAgent) else found
    except Exception as error:  # the user's own module is run here, and may raise anything
        raise ConfigurationError(f"There is no agent at '{address}': {_described(error)}.") from error
    if inspect.isfunction(agent):
        agent = FunctionalLitAgent(agent)
    if not isinstance(agent, LitAgent):
        raise ConfigurationError(
            f"'{address}' is of type {type(agent).__name__}, no agent; "
            "name a function, or derive a class from LitAgent."
        )
    agent.check_parameters()
    return agent
