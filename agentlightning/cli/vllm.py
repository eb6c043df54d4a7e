"""`agl vllm`: a vLLM that a training can join, or vLLM's own command line with exact token ids in its answers.

`agl vllm MODEL` starts a server with what training needs of it (`engine.vllm.options`). Where the first word is one of
vLLM's own commands, or an option, all words are vLLM's.

vLLM since 0.10.2 returns token ids to whoever asks, as the LLM proxy does with every call, and needs no option for it;
earlier ones are taught to by `instrumentation.vllm` before they start. A vLLM that lives in another environment, and is
only known by its executable, is run as it is.
"""

import argparse
import importlib
import importlib.util
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agentlightning.cli.command import (
    argument,
    cli_command,
    port_number,
    positive_number,
    say,
)
from agentlightning.engine.vllm.options import (
    DEFAULT_MEMORY,
    KEY_VARIABLE,
    LOOPBACK,
    ServerCommand,
    VllmOptions,
    check_installed,
)
from agentlightning.errors import ConfigurationError
from agentlightning.instrumentation.vllm import instrument_vllm
from agentlightning.utils.server_launcher import is_loopback

_SERVE: Final = "serve"
_COMMANDS_OF_VLLM: Final = ("bench", "chat", "collect-env", "complete", "launch", "run-batch", _SERVE)
DEFAULT_PORT: Final = 8000
DEFAULT_NAME: Final = "policy"
"""What GRPO calls a single model."""
DEFAULT_SEQUENCES: Final = 64
_KEY_BYTES: Final = 32


def _passed_on(given: Sequence[str]) -> int | None:
    """Run vLLM's own command line until it ends, if the words are for it; returns its exit code."""
    if not given:
        main.parser().print_help()
        return 2
    if given[0] in ("-h", "--help") or not (given[0].startswith("-") or given[0] in _COMMANDS_OF_VLLM):
        return None
    arguments = _as_vllm_takes(given)
    if importlib.util.find_spec("vllm") is not None:
        return _run_in_process(arguments)
    executable = shutil.which("vllm")
    if executable is None:
        raise ConfigurationError(
            "vLLM is not installed here; `pip install vllm` installs it (it needs a GPU's drivers)."
        )
    say("vllm", f"{executable} is run as it is; it returns token ids if it is vLLM 0.10.2 or later.")
    return os.execv(executable, ["vllm", *arguments])


@cli_command(
    "vllm",
    usage="agl vllm MODEL [options] [-- ARGUMENTS OF VLLM...]\n       agl vllm ARGUMENTS...",
    description=(
        "Start a vLLM that a training can join, for this machine alone unless --host says otherwise. With a command of"
        " vLLM's own, or an option, as the first word, run vLLM's command line with these arguments; options alone"
        " stand behind `serve`."
    ),
    examples="""\
examples:
  agl vllm /models/qwen                                     a server that GRPO(engine="http://127.0.0.1:8000") joins
  agl vllm /models/qwen --lora-rank 16 --port 8001          the same for a training of adapters
  CUDA_VISIBLE_DEVICES=1 agl vllm /models/qwen --transfer nccl   the same beside a learner on another GPU
  agl vllm /models/qwen --print -- --enforce-eager          show the command, with an argument of vLLM's own
  agl vllm serve Qwen/Qwen2.5-0.5B-Instruct --port 8000     a server with exact token ids
  agl vllm --model Qwen/Qwen2.5-0.5B-Instruct --port 8000   the same
  agl vllm serve --help                                     what vLLM itself has to say
  agl proxy --model qwen=hosted_vllm/Qwen/Qwen2.5-0.5B-Instruct@http://127.0.0.1:8000/v1     the proxy before it
""",
    arguments=(
        argument("model", metavar="MODEL", help="the folder of a Hugging Face model"),
        argument("--port", type=port_number, default=DEFAULT_PORT, help="port of the server"),
        argument("--name", default=DEFAULT_NAME, help="name of the model for callers"),
        argument(
            "--lora-rank", type=positive_number, metavar="R", help="take adapters up to this rank, and no full weights"
        ),
        argument(
            "--max-sequences",
            type=positive_number,
            default=DEFAULT_SEQUENCES,
            metavar="N",
            help="sampled together at most; others wait",
        ),
        argument("--max-length", type=positive_number, metavar="TOKENS", help="tokens of prompt and answer together"),
        argument(
            "--memory",
            type=float,
            default=DEFAULT_MEMORY,
            metavar="SHARE",
            help="share of the GPU's memory; the learner needs the rest",
        ),
        argument(
            "--transfer",
            choices=("ipc", "nccl"),
            default="ipc",
            help="how full weights come: ipc from the learner on the same GPU, nccl from one on another",
        ),
        argument(
            "--host",
            default=LOOPBACK,
            metavar="ADDRESS",
            help="listen there, with --transfer nccl, for a learner on another machine; only in a network you trust",
        ),
        argument("--sleep", action="store_true", help="let a training have the memory while it learns"),
        argument("--print", action="store_true", help="show the command and its environment, and start nothing"),
    ),
    has_rest=True,
    passed_on=_passed_on,
)
def main(arguments: argparse.Namespace) -> int:
    """Become vLLM; what to write into the script is printed before."""
    options = VllmOptions(
        gpu_memory_utilization=arguments.memory,
        max_model_length=arguments.max_length,
        sleep=arguments.sleep,
        transfer=arguments.transfer,
        arguments=tuple(arguments.rest[1:]),
    )
    if not is_loopback(arguments.host) and (arguments.transfer != "nccl" or arguments.lora_rank is not None):
        raise ConfigurationError(
            f"--host {arguments.host} needs --transfer nccl and full weights: handles of GPU memory and folders of "
            "adapters are of use on this machine alone."
        )
    command = ServerCommand(
        model=arguments.model,
        name=arguments.name,
        port=arguments.port,
        options=options,
        max_sequences=arguments.max_sequences,
        lora_rank=arguments.lora_rank,
        host=arguments.host,
    )
    words = command.words()
    if arguments.print:
        variables = command.variables() | {KEY_VARIABLE: f"${KEY_VARIABLE}"}
        del variables["PYTHONPATH"]
        lines = [*(f"{name}={value} \\" for name, value in variables.items()), shlex.join(words)]
        print("\n".join(lines))  # noqa: T201 # the command's own output
        return 0
    if not (Path(arguments.model).expanduser() / "config.json").is_file():
        raise ConfigurationError(
            f"'{arguments.model}' is neither the folder of a Hugging Face model, as training needs it, nor a command "
            f"of vLLM ({', '.join(_COMMANDS_OF_VLLM)}); to serve a model by its name, write `agl vllm serve NAME`."
        )
    check_installed()
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        key = secrets.token_urlsafe(_KEY_BYTES)
        say("vllm", f"the training needs this server's key: export {KEY_VARIABLE}={key}")
    lora = "" if arguments.lora_rank is None else f", lora=LoraOptions(rank={arguments.lora_rank})"
    host = "THIS-MACHINE" if arguments.host in ("0.0.0.0", "::") else arguments.host  # only compared
    engine: Any = f"http://{host}:{arguments.port}"
    engine = f'VllmOptions(address="{engine}", sleep=True)' if arguments.sleep else f'"{engine}"'
    say("vllm", f'in a minute or two, train with GRPO("{arguments.model}", engine={engine}{lora}). Ctrl-C stops it.')
    return os.execve(words[0], words, command.environment(key))


def _as_vllm_takes(given: Sequence[str]) -> list[str]:
    """The arguments with a command in front, and the model of `serve` where vLLM wants it: first, without an option."""
    # Options that belong to no command of vLLM's.
    if given[0] in ("-v", "--version"):
        return list(given)
    command, rest = (_SERVE, list(given)) if given[0].startswith("-") else (given[0], list(given[1:]))
    if command != _SERVE or (rest and not rest[0].startswith("-")):
        return [command, *rest]
    for place, word in enumerate(rest):
        option, equals, model = word.partition("=")
        if option != "--model":
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
        run = importlib.import_module("vllm.entrypoints.cli.main").main
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"This vLLM has no command line that can be run ({error}); install 0.8.4 or later: pip install -U vllm."
        ) from error
    before, sys.argv = sys.argv, ["vllm", *arguments]  # where vLLM reads what it was called with
    try:
        code = run()
    except SystemExit as leaving:
        code = leaving.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)  # noqa: T201 # as Python itself does with a text instead of a number
            return 1
    finally:
        sys.argv = before
    return code if isinstance(code, int) else 0
