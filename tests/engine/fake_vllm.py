"""A server that behaves as vLLM 0.24 was recorded to, and answers with a model of ours.

Its routes for pausing, sleeping, new weights and adapters keep the states that vLLM keeps, and refuse what vLLM
refuses. Calls that come while it is paused or asleep wait. Full weights end a server with adapters. As a program
(`python -m tests.engine.fake_vllm serve …`) it takes the arguments of `vllm serve` that matter.
"""

import argparse
import asyncio
import base64
import importlib
import json
import os
import pickle
import queue
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson

from agentlightning.engine.checkpoint import load
from agentlightning.engine.scheduler import InferenceEngine
from agentlightning.engine.server import EngineApp
from agentlightning.engine.weights import read_weights
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs
from tests.engine.scripted import running

__all__ = ["FakeVllm", "fake_vllm", "install_fake_vllm"]

GPU_ID = "GPU-1d796275"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class _Failure(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class FakeVllm:
    """The application, and what a test may look at."""

    app: EngineApp
    name: str = "policy"
    has_lora: bool = False
    max_lora_rank: int = 16
    takes_weights: bool = True
    transfer: str = "ipc"
    is_dev: bool = True
    can_sleep: bool = False
    logprobs_mode: str = "processed_logprobs"
    key: str | None = None
    url: str = ""
    requests: list[str] = field(default_factory=list)
    """Every request but those for health, in their order."""
    asked_models: list[str] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    adapter_configs: dict[str, Any] = field(default_factory=dict)
    """Of every adapter that was loaded."""
    adapter_tensors: dict[str, list[str]] = field(default_factory=dict)
    loads: int = 0
    """How often the weights were replaced."""
    is_dead: bool = False
    is_paused: bool = False
    is_asleep: bool = False
    buffers: list[Any] = field(default_factory=list)
    """What `share` made handles of."""
    groups: "list[FakeGroup]" = field(default_factory=list)
    """That were formed to send weights by NCCL."""
    meetings: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)
    """Where the server was told to meet the learner."""
    refuses_weights: bool = False
    _part: dict[str, Any] | None = None
    """Weights of an update that is under way."""

    def __post_init__(self) -> None:
        self._awake = asyncio.Event()
        self._awake.set()

    def share(self, tensor: Any) -> tuple[Any, ...]:
        """Stands for torch's `reduce_tensor`, between two that are in one process."""
        self.buffers.append(tensor)
        return (len(self.buffers) - 1,)

    def connect(self, info: Any) -> "FakeGroup":
        """Stands for NCCL's group: it is there when the server has been told of the same meeting."""
        if self.meetings.get(timeout=30) != info:
            raise RuntimeError("learner and server wait at different places")
        self.groups.append(FakeGroup())
        return self.groups[-1]

    # ------------------------------------------------------------------ requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path, query = scope["path"], parse_qs(scope["query_string"].decode())
        line = f"{scope['method']} {path}" + (f"?{scope['query_string'].decode()}" if query else "")
        if path != "/health":
            self.requests.append(line)
        body = b""
        while scope["method"] == "POST":
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        try:
            self._admit(scope, path)
            if path.endswith("/completions"):
                await self._complete(scope, body, send)
                return
            content = await self._other(path, query, orjson.loads(body) if body else None)
            await _answer(send, 200, content)
        except _Failure as failure:
            error = {"message": str(failure), "type": "Error", "param": None, "code": failure.status}
            await _answer(send, failure.status, {"error": error})

    def _admit(self, scope: Any, path: str) -> None:
        shown = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.key is not None and path.startswith("/v1") and shown != f"Bearer {self.key}":
            raise _Failure(401, "Unauthorized")

    async def _complete(self, scope: Any, body: bytes, send: Any) -> None:
        asked = orjson.loads(body)
        if asked["model"] != self.name and asked["model"] not in self.adapters:
            raise _Failure(404, f"The model `{asked['model']}` does not exist.")
        await self._awake.wait()
        if self.is_dead:
            raise _Failure(500, DEAD)
        self.asked_models.append(asked["model"])
        inner = orjson.dumps({**asked, "model": self.app.name})
        headers = [
            (name, value) for name, value in scope["headers"] if name not in (b"content-length", b"authorization")
        ]
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": inner, "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def keep(message: Any) -> None:
            sent.append(message)

        await self.app({**scope, "headers": headers}, receive, keep)
        answer = orjson.loads(b"".join(message.get("body", b"") for message in sent))
        for unknown in ("weights_version", "last_weights_version"):  # vLLM says none
            answer.pop(unknown, None)
        await _answer(send, sent[0]["status"], {**answer, "model": asked["model"]})

    async def _other(self, path: str, query: dict[str, list[str]], body: Any) -> Any:
        if path == "/health":
            if self.is_dead:
                raise _Failure(503, "")
            return None
        if path == "/version":
            return {"version": "0.24.0"}
        if path == "/v1/models":
            adapters = [{"id": name, "parent": self.name} for name in self.adapters]
            return {"object": "list", "data": [{"id": self.name, "parent": None}, *adapters]}
        if path.startswith("/v1/"):
            return self._adapter(path, body)
        if not self.is_dev:
            raise _Failure(404, "Not Found")
        handler = getattr(self, "_route" + path.replace("/", "_"), None)
        if handler is None:
            raise _Failure(404, "Not Found")
        return await handler(query, body)

    def _adapter(self, path: str, body: Any) -> str:
        name = body["lora_name"]
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(name, None) is None:
                raise _Failure(404, f"The lora adapter '{name}' cannot be found.")
            return f"Success: LoRA adapter '{name}' removed successfully."
        if not (Path(body["lora_path"]) / "adapter_model.safetensors").is_file():
            raise _Failure(404, f"Loading lora {name} failed: No adapter found for {body['lora_path']}")
        if name in self.adapters and not body.get("load_inplace"):
            raise _Failure(400, f"The lora adapter '{name}' has already been loaded.")
        self.adapters[name] = body["lora_path"]
        self.adapter_tensors[name] = sorted(read_weights(Path(body["lora_path"]) / "adapter_model.safetensors"))
        self.adapter_configs[name] = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
        return f"Success: LoRA adapter '{name}' added successfully."

    # ------------------------------------------------------------------ routes for development

    async def _route_server_info(self, query: dict[str, list[str]], body: Any) -> Any:
        if query.get("config_format") != ["json"]:
            return {"vllm_config": "model='/models/models/smol', dtype=torch.bfloat16"}
        model = {
            "dtype": "torch.float32",
            "logprobs_mode": self.logprobs_mode,
            "enable_sleep_mode": self.can_sleep,
        }
        return {
            "vllm_config": {
                "model_config": model,
                "lora_config": {"max_lora_rank": self.max_lora_rank} if self.has_lora else None,
                "weight_transfer_config": {"backend": self.transfer} if self.takes_weights else None,
            }
        }

    async def _route_get_world_size(self, query: Any, body: Any) -> Any:
        return {"world_size": 1}

    async def _route_is_paused(self, query: Any, body: Any) -> Any:
        return {"is_paused": self.is_paused}

    async def _route_is_sleeping(self, query: Any, body: Any) -> Any:
        return {"is_sleeping": self.is_asleep}

    async def _route_pause(self, query: Any, body: Any) -> Any:
        self.is_paused = True
        self._awake.clear()
        return {"status": "paused"}

    async def _route_resume(self, query: Any, body: Any) -> Any:
        self.is_paused = False
        self._awake.set()
        return {"status": "resumed"}

    async def _route_sleep(self, query: Any, body: Any) -> None:
        self.is_asleep = True
        self._awake.clear()

    async def _route_wake_up(self, query: Any, body: Any) -> None:
        self.is_asleep = False
        self._awake.set()

    async def _route_reset_prefix_cache(self, query: Any, body: Any) -> None:
        return None

    async def _route_init_weight_transfer_engine(self, query: Any, body: Any) -> Any:
        if not self.takes_weights:
            raise _Failure(500, "Weight transfer is not configured.")
        self.meetings.put(body["init_info"])
        return {"message": "Weight transfer initialized"}

    async def _route_start_weight_update(self, query: Any, body: Any) -> Any:
        if self._part is not None:
            raise _Failure(500, "start_weight_update called while a weight update is already active.")
        self._part = {}
        return {"message": "Weight update started"}

    async def _route_update_weights(self, query: Any, body: Any) -> Any:
        if self._part is None:
            raise _Failure(500, "start_weight_update must be called before update_weights.")
        torch = importlib.import_module("torch")
        info = body["update_info"]
        if self.refuses_weights:
            raise _Failure(500, "Call to update_weights failed: no such weight")
        if self.transfer == "nccl":
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                tensor = await asyncio.to_thread(self.groups[-1].sent.get, timeout=30)
                if (str(tensor.dtype), list(tensor.shape)) != (f"torch.{dtype}", shape):
                    raise _Failure(500, f"The weight {name} is not what was announced.")
                self._part[name] = tensor
            return {"message": "Weights updated"}
        (place,) = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))[GPU_ID]
        packed = self.buffers[place][: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
        for name, dtype, shape, flat in zip(info["names"], info["dtype_names"], info["shapes"], packed, strict=True):
            self._part[name] = flat.clone().view(getattr(torch, dtype)).view(*shape)
        return {"message": "Weights updated"}

    async def _route_finish_weight_update(self, query: Any, body: Any) -> Any:
        part, self._part = self._part, None
        if part is None:
            raise _Failure(500, "finish_weight_update called without a matching start_weight_update.")
        if part:
            await self._load(part)
        return {"message": "Weight update finished"}

    async def _route_collective_rpc(self, query: Any, body: Any) -> Any:
        folder = Path(body["kwargs"]["weights_path"])
        file = folder / "model.safetensors"
        if not file.is_file():
            raise _Failure(500, f"Call to collective_rpc method failed: {folder}")
        await self._load(read_weights(file))
        return {"results": [None]}

    async def _route_die(self, query: Any, body: Any) -> None:
        print("torch.OutOfMemoryError: CUDA out of memory.", file=sys.stderr, flush=True)
        os._exit(3)

    async def _load(self, tensors: dict[str, Any]) -> None:
        if self.has_lora:
            self.is_dead = True
            raise _Failure(500, "Call to collective_rpc method failed: 'embed_tokens.weight'")
        await asyncio.wrap_future(self.app.engine.load_weights(self.loads + 1, tensors))
        self.loads += 1


class FakeGroup:
    """Stands for vLLM's `PyNcclCommunicator`, between two that are in one process."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_destroyed = False

    def broadcast(self, tensor: Any, src: int) -> None:
        assert src == 0
        self.sent.put(tensor.clone())

    def destroy(self) -> None:
        self.is_destroyed = True


async def _answer(send: Any, status: int, content: Any) -> None:
    body = b"" if content is None else orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


# ---------------------------------------------------------------------- serving


@contextmanager
def fake_vllm(source: str = "tiny", **options: Any) -> Iterator[FakeVllm]:
    """One that runs in a thread of this process."""
    model, codec = load(source, device="cpu")
    app = EngineApp(InferenceEngine(model, max_sequences=16), codec)
    fake = FakeVllm(app, **options)
    with running(app, fake) as fake.url:
        yield fake


def install_fake_vllm(folder: Path) -> Path:
    """A package `vllm` whose command line is this server; the folder belongs on `sys.path`."""
    place = folder / "vllm" / "entrypoints" / "cli"
    place.mkdir(parents=True)
    (place / "main.py").write_text(
        "import os, sys\n"
        "print('INFO loading the model', file=sys.stderr, flush=True)\n"
        "if os.environ.get('FAKE_VLLM_FAILS'):\n"
        "    sys.exit('ValueError: No available memory for the cache blocks.')\n"
        "from tests.engine.fake_vllm import main\n"
        "main()\n"
    )
    for package in (place, *place.parents[:2]):
        (package / "__init__.py").write_text("__version__ = '0.24.0'\n")
    return folder


def main(argv: Sequence[str] | None = None) -> None:
    """Serve as a program, until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    for option in ("--served-model-name", "--host", "--logprobs-mode", "--middleware", "--weight-transfer-config"):
        parser.add_argument(option)
    parser.add_argument("--port", type=int)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    arguments, _ = parser.parse_known_args(argv)
    asyncio.run(_serve(arguments))


async def _serve(arguments: argparse.Namespace) -> None:
    model, codec = load(arguments.model, device="cpu")
    app = EngineApp(InferenceEngine(model, max_sequences=16), codec)
    fake: Any = FakeVllm(
        app,
        name=arguments.served_model_name,
        has_lora=arguments.enable_lora,
        takes_weights=json.loads(arguments.weight_transfer_config or "null") is not None,
        can_sleep=arguments.enable_sleep_mode,
        logprobs_mode=arguments.logprobs_mode,
    )
    module, _, name = arguments.middleware.rpartition(".")
    guarded = getattr(importlib.import_module(module), name)(fake)
    options = PythonServerLauncherArgs(host=arguments.host, port=arguments.port)
    async with app.running():
        await PythonServerLauncher(guarded, options).run_forever()


if __name__ == "__main__":
    main()
