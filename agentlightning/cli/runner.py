"""`agl runner`: run an agent for a training on another machine; it may come and go at any time."""

import argparse
import asyncio
import inspect
import os
import pkgutil
import signal
import sys
import traceback
from pathlib import Path

from agentlightning.cli.command import (
    amount,
    argument,
    cli_command,
    positive_number,
    say,
)
from agentlightning.cli.stores import outage_of
from agentlightning.errors import ConfigurationError
from agentlightning.execution import ClientServerExecutionStrategy
from agentlightning.execution.events import ControlFlags, ExecutionEvent, ThreadingEvent
from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import LightningStore, LightningStoreClient
from agentlightning.tracer import OtelTracer
from agentlightning.trainer.components import checked_agent
from agentlightning.trainer.roles import RunnerRole

GRACE_SECONDS = 30.0


@cli_command(
    "runner",
    description="Run an agent on the rollouts of a training.",
    examples="""\
examples:
  agl runner my_agent:agent                                      for a training on this machine
  agl runner --store http://trainer:4747 my_agent:agent          for one on another; AGL_STORE_TOKEN lets you in
  agl runner --n-runners 4 --max-concurrency 16 my_agent:agent   64 rollouts at once, in 4 processes
  agl runner --max-rollouts 100 my_agent:agent                   leave after 100

Ctrl-C or SIGTERM lets running rollouts finish, for --grace seconds; a second one leaves at once. What still ran is
given back.
""",
    arguments=(
        argument("agent", metavar="MODULE:AGENT", help="the agent: a function, a LitAgent, or a class of one"),
        argument("--store", default="http://127.0.0.1:4747", help="the training's store"),
        argument("--token", help="token of the store; better given as AGL_STORE_TOKEN, which `ps` hides"),
        argument("--n-runners", type=positive_number, default=1, help="processes"),
        argument("--max-concurrency", type=positive_number, default=1, help="rollouts at once in each"),
        argument("--max-rollouts", type=positive_number, help="leave after so many in each process; never by default"),
        argument("--name", default="Worker", help="beginning of the workers' ids"),
        argument(
            "--grace",
            type=amount,
            default=GRACE_SECONDS,
            metavar="SECONDS",
            help="how long the last rollouts may take once it leaves",
        ),
        argument(
            "--allow-poml",
            action="store_true",
            help="format POML templates of the store, which are code of who wrote them",
        ),
    ),
    log_level="INFO",
)
def main(arguments: argparse.Namespace) -> int:
    agent = loaded_agent(arguments.agent)
    store = LightningStoreClient(arguments.store, token=arguments.token)
    outage = outage_of(arguments.store, arguments.token)
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
    say("runner", f"{arguments.name} works for {arguments.store}; Ctrl-C to leave")
    if outage is not None:
        say("runner", f"{outage} It is waited for.")
    try:
        strategy.execute(_no_algorithm, role, store)
    finally:
        asyncio.run(store.close())
    return signal.SIGINT if strategy.is_interrupted else 0


async def _no_algorithm(store: LightningStore, event: ExecutionEvent) -> None:
    raise AssertionError("A runner has no algorithm.")


def loaded_agent(address: str) -> LitAgent[object]:
    """The agent at `module:name`; modules of the working directory are found too."""
    sys.path.insert(0, os.getcwd())
    if ":" not in address:
        raise ConfigurationError(f"'{address}' does not say where the agent is; write it as module:agent.")
    try:
        found = pkgutil.resolve_name(address)
        agent = found() if isinstance(found, type) and issubclass(found, LitAgent) else found
    except Exception as error:  # the user's own module is run here, and may raise anything
        reason = str(error)
        if not isinstance(error, (ImportError, AttributeError, ValueError, SyntaxError)):  # these say where
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
        is_module_missing = isinstance(error, ModuleNotFoundError) and error.name == address.partition(":")[0]
        hint = " Run the command in the folder of the module, or name that folder in PYTHONPATH."
        raise ConfigurationError(f"There is no agent at '{address}': {reason}.{hint * is_module_missing}") from error
    if not isinstance(agent, LitAgent) and not inspect.isfunction(agent):
        raise ConfigurationError(
            f"'{address}' is of type {type(agent).__name__}, no agent; "
            "name a function, or derive a class from LitAgent."
        )
    return checked_agent(agent)
