"""`agl vllm`: run vLLM's own command line, with its chat completions carrying the token ids they were made of.

vLLM since 0.10.2 returns token ids to whoever asks, as the LLM proxy does with every call, and needs no option for it;
earlier ones are taught to by `instrumentation.vllm` before they start. A vLLM that lives in another environment, and is
only known by its executable, is run as it is.
"""

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from agentlightning.cli.arguments import CommandParser
from agentlightning.errors import ConfigurationError
from agentlightning.instrumentation.vllm import instrument_vllm

__all__ = ["main"]

_COMMAND_LINE: Final = "vllm.entrypoints.cli.main"
_MODEL_OPTION: Final = "--model"
_SERVE: Final = "serve"
_OF_VLLM_ITSELF: Final = ("-v", "--version")
"""Options that belong to no command of vLLM's."""

EXAMPLES = """\
examples:
  agl vllm serve Qwen/Qwen2.5-0.5B-Instruct --port 8000     a server with exact token ids
  agl vllm --model Qwen/Qwen2.5-0.5B-Instruct --port 8000   the same
  agl vllm serve --help                                     what vLLM itself has to say
  agl proxy --model qwen=hosted_vllm/Qwen/Qwen2.5-0.5B-Instruct@http://127.0.0.1:8000/v1     the proxy before it
"""


def _parser() -> CommandParser:
    return CommandParser(
        prog="agl vllm",
        usage="agl vllm [-h] ARGUMENTS...",
        description="Run vLLM's command line with these arguments; options alone stand behind `serve`.",
        examples=EXAMPLES,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run vLLM until it ends; returns its exit code."""
    given = list(argv or ())
    if not given or given[0] in ("-h", "--help"):
        _parser().print_help()
        return 0 if given else 2
    arguments = _as_vllm_takes(given)
    if importlib.util.find_spec("vllm") is not None:
        return _run_in_process(arguments)
    executable = shutil.which("vllm")
    if executable is None:
        raise ConfigurationError(
            "vLLM is not installed here; `pip install vllm` installs it (it needs a GPU's drivers)."
        )
    print(  # noqa: T201 # the command's own output
        f"agl vllm: {executable} is run as it is; it returns token ids if it is vLLM 0.10.2 or later.", file=sys.stderr
    )
    return os.execv(executable, ["vllm", *arguments])


def _as_vllm_takes(given: Sequence[str]) -> list[str]:
    """The arguments with a command in front, and the model of `serve` where vLLM wants it: first, without an option."""
    if given[0] in _OF_VLLM_ITSELF:
        return list(given)
    command, rest = (_SERVE, list(given)) if given[0].startswith("-") else (given[0], list(given[1:]))
    if command != _SERVE or (rest and not rest[0].startswith("-")):
        return [command, *rest]
    for place, word in enumerate(rest):
        option, equals, model = word.partition("=")
        if option != _MODEL_OPTION:
            continue
        if equals:
            return [command, model, *rest[:place], *rest[place + 1 :]]
        if place + 1 == len(rest):
            raise ConfigurationError("--model is the last word; the name of a model belongs behind it.")
        return [command, rest[place + 1], *rest[:place], *rest[place + 2 :]]
    return [command, *rest]


def _run_in_process(arguments: Sequence[str]) -> int:
    instrument_vllm()
    try:
        run = importlib.import_module(_COMMAND_LINE).main
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"This vLLM has no command line that can be run ({error}); install 0.8.4 or later: pip install -U vllm."
        ) from error
    with _called_as(["vllm", *arguments]):
        try:
            code = run()
        except SystemExit as leaving:
            return _code_of(leaving)
    return code if isinstance(code, int) else 0


def _code_of(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)  # noqa: T201 # as Python itself does with words instead of a number
    return 1


@contextmanager
def _called_as(words: list[str]) -> Iterator[None]:
    """vLLM reads what it was called with from `sys.argv`."""
    before = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = before
