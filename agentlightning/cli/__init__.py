"""The `agl` command: one module a command, loaded when it is called."""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

import agentlightning
from agentlightning.cli.command import CommandParser, say
from agentlightning.errors import AgentLightningError
from agentlightning.utils.spelling import similar_word

__all__ = ["COMMANDS", "main", "module_of"]

logger = logging.getLogger(__name__)

INTERRUPTED, TERMINATED = 130, 143
"""What shells give for a program that Ctrl-C has ended, or SIGTERM."""
COMMANDS = {
    "demo": "watch an agent learn, in a minute or two",
    "store": "serve a store, look into it, copy it, move it",
    "dashboard": "look at a store in the browser",
    "why": "tell what a run gained, or why it gained nothing",
    "doctor": "look at the installation",
    "runner": "join a training from this machine",
    "run": "run any program once, with its model calls recorded",
    "proxy": "serve models to agents, and record every call",
    "serve": "serve the embedded model, or one of your own, to OpenAI's clients",
    "eval": "score a model, an endpoint or a prompt on a data set",
    "export-model": "write a checkpoint as a model of its own",
    "vllm": "start a vLLM for a training, or run its own command line",
    "mcp": "show a store to coding agents",
    "tokens": "make and read the tokens of a store server",
    "agentops": "stand in for AgentOps' service on this machine",
}

_MODULES = {"agentops": "agentops_server", "eval": "evaluate", "export-model": "export_model"}
"""Of commands whose module has another name."""

_RELATED = {
    "backup": "store backup",
    "evaluate": "eval",
    "export": "export-model",
    "help": "--help",
    "import": "store import",
    "server": "store",
    "status": "store status",
    "train": "demo",
    "ui": "dashboard",
    "worker": "runner",
}
"""Words that are no commands, and the command that does what they say."""


def module_of(command: str) -> str:
    """The module of a command, which is its `main`."""
    return f"agentlightning.cli.{_MODULES.get(command, command)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code.

    Errors of ours, and of the system about a file or an address, are one line; `--log-level DEBUG` shows the rest.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    lines = "\n".join(f"  {name:<12} {what}" for name, what in COMMANDS.items())
    parser = CommandParser(
        prog="agl",
        description=f"Agent Lightning makes any AI agent learn.\n\ncommands:\n{lines}",
        examples="""\
examples:
  agl store --backend sqlite --path runs.db
  agl store status runs.db
  agl dashboard runs.db
  agl why runs.db
  agl store export runs.db runs.jsonl
  agl runner --store http://trainer:4747 my_agent:agent
  agl run --store runs.db -- python my_script.py
  agl proxy --model qwen=http://127.0.0.1:8000/v1 --store http://127.0.0.1:4747

`agl COMMAND --help` tells more.""",
        usage="agl [-h] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"agentlightning {agentlightning.__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    name = parser.parse_args(given[:1]).command  # the rest is the command's, word for word
    if name is None:
        parser.print_help()
        return 2
    if name not in COMMANDS:
        likely = similar_word(name, [*COMMANDS, *_RELATED])
        question = "" if likely is None else f"; did you mean `agl {_RELATED.get(likely, likely)}`?"
        parser.error(f"there is no command '{name}'{question}")
    try:
        code: int = importlib.import_module(module_of(name)).main(given[1:])
    except KeyboardInterrupt:
        say(name, "Stopped by Ctrl-C.")
        return INTERRUPTED
    except (AgentLightningError, OSError, RuntimeError) as error:
        # A server that cannot start raises a plain RuntimeError; any other kind of one is a fault of ours.
        if not isinstance(error, (AgentLightningError, OSError)) and type(error) is not RuntimeError:
            raise
        logger.debug("The command failed.", exc_info=True)
        say(name, str(error))
        return 1
    return code
