"""How a training uses vLLM, and the command that starts a server it can use.

The floor and the ceiling of the extra `vllm` are those of the routes for new weights: they came with 0.24, they are
vLLM's routes for development, and each of its releases may change them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args
from urllib.parse import urlsplit

from agentlightning.errors import ConfigurationError
from agentlightning.utils.child_process import python_path
from agentlightning.utils.installation import install_command
from agentlightning.utils.spelling import suggests_arguments

if TYPE_CHECKING:
    from agentlightning.engine.base import Engine, EngineRequest

Transfer = Literal["auto", "ipc", "nccl", "folder"]
LOOPBACK: Final = "127.0.0.1"
KEY_VARIABLE: Final = "VLLM_API_KEY"
DEFAULT_MEMORY: Final = 0.4
_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM takes for `--max-lora-rank`."""
_REFUSAL: Final = b'{"error": {"message": "The key is missing or wrong.", "type": "Unauthorized", "code": 401}}'


@suggests_arguments
@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """vLLM samples, and the training publishes its weights to it. `GRPO(engine="vllm")` takes all defaults."""

    address: str | None = None
    """Of a server that `agl vllm` has started, such as `http://127.0.0.1:8000`; it is not stopped. None starts one."""
    api_key: str | None = field(default=None, repr=False)
    """Of that server; None reads VLLM_API_KEY. A server of our own gets a random one."""
    gpu_memory_utilization: float = DEFAULT_MEMORY
    """Share of the GPU's memory that vLLM takes for weights and cache; the learner has the rest."""
    max_model_length: int | None = None
    """Tokens of prompt and answer together; None is what the model can take."""
    sleep: bool = False
    """Give vLLM's memory to the learner while it learns. It costs about half a second a step, and each needs only as
    much of the GPU as it uses alone; with `max_staleness=0` only."""
    transfer: Transfer = "auto"
    """How full weights travel: "ipc" copies from the learner's GPU memory to vLLM's on the same GPU, "nccl" sends them
    to other GPUs, of this machine or another, "folder" writes files that vLLM reads. "auto" is "nccl" with `gpus` or a
    server that was started for it, "ipc" where the learner is on the first GPU and the server on this machine, and else
    "folder"."""
    gpus: Sequence[int] = ()
    """Of this machine, by number, for a server that is started: vLLM shares the model among them, and the learner keeps
    its own. None named is the learner's GPU."""
    arguments: Sequence[str] = ()
    """Further arguments of `vllm serve`."""

    def __post_init__(self) -> None:
        if self.transfer not in get_args(Transfer):
            known = ", ".join(repr(one) for one in get_args(Transfer))
            raise ConfigurationError(f"transfer is {self.transfer!r}; it must be one of {known}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigurationError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1."
            )
        if isinstance(self.arguments, str):
            raise ConfigurationError(
                f"arguments is the text {self.arguments!r}; give one text for each: {shlex.split(self.arguments)!r}."
            )
        if isinstance(self.gpus, (str, int)) or not all(type(one) is int and one >= 0 for one in self.gpus):
            raise ConfigurationError(f"gpus is {self.gpus!r}; give a list of the numbers of GPUs, such as [1].")
        if self.gpus and self.transfer == "ipc":
            raise ConfigurationError("transfer='ipc' is for one GPU, and gpus names others; leave transfer='auto'.")
        if self.address is None:
            return
        if self.gpus:
            raise ConfigurationError(
                f"The server at '{self.address}' has its GPUs already; choose them where `agl vllm` is started, with "
                "CUDA_VISIBLE_DEVICES."
            )
        place = urlsplit(self.address)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise ConfigurationError(
                f"'{self.address}' is not the address of a vLLM; give one such as 'http://127.0.0.1:8000'."
            )
        if self.arguments or self.max_model_length is not None:
            raise ConfigurationError(
                f"The server at '{self.address}' runs already; give its arguments to `agl vllm`, not to VllmOptions."
            )

    @property
    def backend(self) -> str:
        """Of vLLM's `--weight-transfer-config`, for a server that is started."""
        return "nccl" if self.transfer == "nccl" or (self.transfer == "auto" and self.gpus) else "ipc"

    @property
    def root(self) -> str | None:
        """The address without the /v1 that clients of OpenAI's interface put behind it."""
        return None if self.address is None else self.address.rstrip("/").removesuffix("/v1").rstrip("/")

    def create(self, request: EngineRequest) -> Engine:
        """An engine that is not started yet; ConfigurationError without vLLM, or for a model that it cannot serve."""
        from agentlightning.engine.vllm.engine import VllmEngine

        if self.address is None:
            check_installed()
            if not (Path(request.source).expanduser() / "config.json").is_file():
                raise ConfigurationError(
                    f"vLLM serves Hugging Face models from a folder, and '{request.source}' is none; name a folder, or "
                    "leave engine='embedded'."
                )
        return VllmEngine(request, self)


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """`vllm serve` with what training needs of it."""

    model: str
    name: str
    port: int
    options: VllmOptions
    max_sequences: int = 64
    lora_rank: int | None = None
    """Of the largest adapters; None serves full weights, and no adapters."""
    host: str = LOOPBACK

    def words(self) -> list[str]:
        """The command; no secret is in it."""
        options = self.options
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        words += [os.path.expanduser(self.model), "--served-model-name", self.name]
        words += ["--host", self.host, "--port", str(self.port)]
        # Those of the sampled distribution; raw ones are wrong at any temperature but 1.
        words += ["--logprobs-mode", "processed_logprobs"]
        # The checkpoint's own top_p and top_k would sample from less than the whole distribution.
        words += ["--generation-config", "vllm"]
        words += ["--max-num-seqs", str(self.max_sequences)]
        words += ["--gpu-memory-utilization", f"{options.gpu_memory_utilization:g}"]
        words += ["--middleware", f"{KeyMiddleware.__module__}.{KeyMiddleware.__qualname__}"]
        words += ["--disable-uvicorn-access-log"]
        if options.max_model_length is not None:
            words += ["--max-model-len", str(options.max_model_length)]
        if options.sleep:
            words += ["--enable-sleep-mode"]
        if len(options.gpus) > 1:
            words += ["--tensor-parallel-size", str(len(options.gpus))]
        # Never both: full weights end a server with adapters.
        if self.lora_rank is None:
            # One process that writes answers with log-probabilities is slower than the GPU that samples them. Adapters
            # are loaded by one process alone.
            words += ["--api-server-count", str(max(1, min(4, (os.cpu_count() or 1) // 4)))]
            words += ["--weight-transfer-config", json.dumps({"backend": options.backend}, separators=(",", ":"))]
        else:
            rank = next((one for one in _RANKS if self.lora_rank <= one), None)
            if rank is None:
                raise ConfigurationError(f"vLLM serves adapters up to rank {_RANKS[-1]}; the rank is {self.lora_rank}.")
            words += ["--enable-lora", "--max-lora-rank", str(rank)]
            # The newest adapters of a policy, and those before them for calls in flight.
            words += ["--max-loras", "2", "--max-cpu-loras", "4"]
        return [*words, *options.arguments]

    def variables(self) -> dict[str, str]:
        """What its environment has besides, apart from the key."""
        special = {}
        if self.lora_rank is not None:
            special["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        elif self.options.backend == "ipc":
            # Handles of GPU memory come pickled. KeyMiddleware admits nobody else to that route, on loopback alone.
            special["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if self.options.gpus:
            special["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.options.gpus))
        return {
            **special,
            "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, sleep and take new weights
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # one stream, so that lines stay in their order
            "PYTHONPATH": python_path(),
        }

    def environment(self, api_key: str) -> dict[str, str]:
        """All of it."""
        return {**os.environ, **self.variables(), KEY_VARIABLE: api_key}


def check_installed() -> None:
    """ConfigurationError with the line to run where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationError(
            f"vLLM is not installed beside this package: run `{install_command('vllm')}` (it needs a GPU)."
        )


class KeyMiddleware:
    """Stands before every route of a vLLM that we start; vLLM imports it by its name (`--middleware`).

    vLLM demands its key below /v1 alone. Its routes for new weights lie elsewhere, and one of them unpickles what it is
    sent: without this, every account of the machine could run code as the one that trains. RuntimeError without a key,
    so that no server is open by mistake.
    """

    def __init__(self, app: Any) -> None:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(
                f"{KEY_VARIABLE} is not set; without a key, everybody could change this server's weights."
            )
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        shown = dict(scope.get("headers", ())).get(b"authorization", b"")
        # These two paths say no more than whether the server lives.
        is_open = scope["type"] == "lifespan" or scope["path"] in ("/health", "/ping")
        if is_open or secrets.compare_digest(shown, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_REFUSAL))]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})
