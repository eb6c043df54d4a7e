"""The engine of this package in a child process, seen from the process that trains; and the choice among engines.

Sampling does not share a core's time, an interpreter or a failure with anything else. New weights travel through GPU
memory, or as a file in memory, in the numbers that the child samples with, and are taken over between two steps.

`ChildProgram` is a program in a child process for code without an event loop: every engine and learner is one.
"""

from __future__ import annotations

import http.client
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
from typing_extensions import Self

from agentlightning.engine.base import ServerOptions
from agentlightning.engine.vllm.options import VllmOptions
from agentlightning.errors import ConfigurationError, EngineError
from agentlightning.utils.child_process import DRAIN_SECONDS, Program, ProgramPlan, python_path, wait_for_event
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.log_failures import announce
from agentlightning.utils.loop_thread import LoopThread

if TYPE_CHECKING:
    from agentlightning.engine.base import EngineChoice
    from agentlightning.engine.weights import PublishedWeights, WeightsBlock

logger = logging.getLogger(__name__)


class ChildProgram:
    """`start` it and `stop` it; between them it may end by itself. Its output is read in a thread."""

    def __init__(self, name: str, *, stop_seconds: float) -> None:
        """Prepare.

        Args:
            name: For messages.
            stop_seconds: How long it may take to end when it is stopped.
        """
        self._name = name
        self._stop_seconds = stop_seconds
        self._secrets: tuple[str, ...] = ()
        self._thread = LoopThread("agl-child")
        self._program: Program | None = None

    def start(self, plan: ProgramPlan, *, secrets: tuple[str, ...] = ()) -> None:
        """Run it; OSError if it cannot be.

        Args:
            secrets: Left out of its lines.
        """
        self._secrets = secrets
        self._program = self._thread.run(Program.start(plan))

    def await_ready(self, is_ready: Callable[[], bool], *, seconds: float, poll_seconds: float) -> None:
        """Return when it serves; EngineError with its last lines if it ends before, or takes longer than that."""
        began = logged = time.monotonic()
        while not is_ready():
            now = time.monotonic()
            if self.has_ended(poll_seconds):
                raise self.ended()
            if now - began > seconds:
                raise EngineError(f"{self._name} did not begin to serve within {seconds:g} s. {self._shown()}")
            if now - logged > 15.0:
                logged = now
                last_line = "".join(self.last_lines(1))
                announce(logger, f"{self._name} has been loading for {now - began:.0f} s: {last_line}")
        announce(logger, f"{self._name} serves after {time.monotonic() - began:.0f} s.")

    def stop(self) -> None:
        """End it with all that it started; harmless if nothing runs."""
        program, self._program = self._program, None
        if program is not None:
            self._thread.run(program.end(self._stop_seconds))
        self._thread.stop()

    @property
    def process_id(self) -> int | None:
        return None if self._program is None else self._program.process_id

    def is_running(self) -> bool:
        return self._program is not None and self._program.exit_code is None

    def has_ended(self, timeout_seconds: float = 1.0) -> bool:
        """Whether it has ended, after waiting for that, and for its last output, for a while."""
        if self._program is not None:
            self._thread.run(wait_for_event(self._program.exited, timeout_seconds))
            if self._program.exited.is_set():
                self._thread.run(wait_for_event(self._program.streams_closed, DRAIN_SECONDS))
        return not self.is_running()

    def output(self) -> str:
        """The beginning of its standard output."""
        found = None if self._program is None else self._program.stdout
        return "" if found is None else found.text()

    def last_lines(self, count: int) -> list[str]:
        """Of its standard error."""
        found = None if self._program is None else self._program.stderr
        return [] if found is None else found.end(self._secrets).splitlines()[-count:]

    def ended(self) -> EngineError:
        """Why it does not serve any more."""
        if not self.has_ended():
            return EngineError(f"{self._name} does not serve any more, and has not ended. {self._shown()}")
        code = None if self._program is None else self._program.exit_code
        return EngineError(f"{self._name} has ended with code {code}. {self._shown()}")

    def _shown(self) -> str:
        lines = self.last_lines(30)
        return "Its last lines:\n" + "\n".join(lines) if lines else "It printed nothing."


# ---------------------------------------------------------------------- the embedded engine


EMBEDDED: Final = "embedded"
NAMED_MODELS: Final = ("tiny", "smollm2")
MODEL_FILES: Final = ("tiny.json", "config.json", "agentlightning.json")
"""One of these is in every folder with a model: ours, and Hugging Face's."""
_MEMORY: Final = Path("/dev/shm")
_KEY_BYTES: Final = 32
_NOT_RUNNING: Final = "The engine's server is not running."


def check_model(name_or_path: str) -> None:
    """EngineError for what the engine cannot load; without torch, whose import takes seconds."""
    place = Path(name_or_path).expanduser()
    if name_or_path in NAMED_MODELS or (place.is_file() and place.suffix == ".gguf"):
        return
    if not name_or_path or not place.is_dir():
        raise EngineError(
            f"There is no model '{name_or_path}': neither a folder nor one of {' and '.join(map(repr, NAMED_MODELS))}. "
            "Nothing is downloaded; give the path of a folder with a Hugging Face model."
        )
    if not any((place / file).is_file() for file in MODEL_FILES):
        raise EngineError(f"'{name_or_path}' holds no model: there is no {' or '.join(MODEL_FILES[:2])} in it.")


class EngineServer:
    """Serves a model in a child process. `start` it and `stop` it, or use it as a block."""

    def __init__(
        self,
        model: str = "tiny",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_sequences: int = 64,
        max_length: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        threads: int = 1,
        name: str | None = None,
        log_level: int | str = logging.WARNING,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            model: As `engine.checkpoint.load` takes it.
            port: 0 takes a free one.
            max_sequences: Sampled together at most.
            max_length: Tokens of prompt and response together, if fewer than the model can take.
            threads: That compute one operation of the model.
            name: The name of the model in requests; its own name by default.
            log_level: Of the child; its lines appear in the log of this process.
        """
        self.host = host
        self.api_key = secrets.token_urlsafe(_KEY_BYTES)
        """What callers must show; `model_config` hands it to the proxy."""
        self._weights_key = secrets.token_urlsafe(_KEY_BYTES)
        self._options = ServerOptions(
            model,
            host,
            port,
            max_sequences=max_sequences,
            max_length=max_length,
            device=device,
            dtype=dtype,
            threads=threads,
            name=name,
            api_key=self.api_key,
            weights_key=self._weights_key,
            log_level=str(logging.getLevelName(log_level)) if isinstance(log_level, int) else log_level,
        )
        self._served: JsonObject = {}
        """What the child wrote when it was ready."""
        self._shares_gpu = True
        """Until sharing GPU memory with the child fails."""
        self._block: WeightsBlock | None = None
        self._child = ChildProgram("The engine's process", stop_seconds=10.0)
        self._folders: list[Path] = []
        """For weights under way: in memory where that can be, and on the disk for those that memory has no room for."""

    @property
    def address(self) -> str:
        """Where OpenAI's clients find it: `http://127.0.0.1:port/v1`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._announced('port')}/v1"

    @property
    def model_name(self) -> str:
        return str(self._announced("model_name"))

    def model_config(self) -> JsonObject:
        """Its entry in the model list of `LLMProxy`."""
        parameters = {"model": f"agl/{self.model_name}", "api_base": self.address, "api_key": self.api_key}
        return {"model_name": self.model_name, "litellm_params": parameters}

    def start(self) -> None:
        """Serve; returns when calls are answered. EngineError with the child's last lines if that does not happen."""
        if self._folders:
            raise EngineError("The engine's server runs already.")
        places = [_MEMORY, None] if os.access(_MEMORY, os.W_OK) else [None]
        self._folders = [Path(tempfile.mkdtemp(prefix="agl-engine-", dir=place)) for place in places]
        threads = str(self._options.threads)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": python_path()}
        options = replace(self._options, weights_folders=[*map(str, self._folders)])
        try:
            with tempfile.TemporaryFile() as settings:  # not in the command line, which every user can read
                settings.write(orjson.dumps({**vars(options), "parent": os.getpid()}) + b"\n")
                settings.seek(0)
                plan = ProgramPlan(
                    command=[sys.executable, "-m", "agentlightning.engine.server"],
                    env={**os.environ, **environment},
                    marker=None,
                    stdin=settings,
                    on_error_line=lambda line: logger.warning("engine: %s", line),
                )
                self._child.start(plan)
            self._child.await_ready(lambda: self._child.output().endswith("\n"), seconds=600.0, poll_seconds=0.05)
            self._served, self._shares_gpu = orjson.loads(self._child.output()), True
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Finish the calls in flight and end the child; harmless if nothing runs."""
        self._child.stop()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders, self._block = [], None

    def is_running(self) -> bool:
        return self._child.is_running()

    @property
    def process_id(self) -> int | None:
        """Of the child; None if there is none."""
        return self._child.process_id

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def status(self) -> JsonObject:
        """What `/agl/status` returns."""
        return self._request("GET", "/agl/status", key=self.api_key)

    def publish(self, version: int, weights: PublishedWeights) -> None:
        """Have it sample from other weights from its next step on; returns when it does.

        Calls in flight go on. Weights that do not fit are an EngineError, and the old ones stay.
        """
        if not self._folders:
            raise EngineError(_NOT_RUNNING)
        import torch

        from agentlightning.engine.weights import write_weights

        if self._publish_shared(version, weights):
            return
        dtype = getattr(torch, self._served["dtype"])
        tensors = {name: tensor.to("cpu") for name, tensor in weights.tensors(dtype)}
        # The first folder with room for them; containers often give little memory to files.
        needed = sum(tensor.nbytes for tensor in tensors.values()) + (1 << 20)  # for names and shapes
        folder = next((one for one in self._folders if shutil.disk_usage(one).free >= needed), self._folders[-1])
        self._announce(version, folder, ".safetensors", lambda path: write_weights(path, tensors))

    def _publish_shared(self, version: int, weights: PublishedWeights) -> bool:
        """Publish in memory of the child's GPU, where the weights are there too; False if they travel as a file."""
        import torch

        from agentlightning.engine.weights import DESCRIPTION_SUFFIX, gpu_of

        gpu = self._served["gpu"]
        if not self._shares_gpu or gpu is None or gpu_of(weights.device) != gpu:
            return False
        dtype = getattr(torch, self._served["dtype"])
        try:
            self._block = weights.block(dtype, self._block)
            self._announce(version, self._folders[0], DESCRIPTION_SUFFIX, self._block.describe)
        except (RuntimeError, EngineError) as error:  # no room, or an allocator whose memory cannot be shared
            logger.warning("Weights travel to the engine as a file, since it shares no GPU memory: %s", error)
            self._shares_gpu, self._block = False, None
            return False
        return True

    def _announce(self, version: int, folder: Path, suffix: str, write: Callable[[Path], None]) -> None:
        path = folder / f"weights-{version}-{time.monotonic_ns()}{suffix}"
        try:
            write(path)
            self._request("POST", "/agl/weights", {"version": version, "path": str(path)}, key=self._weights_key)
        finally:
            path.unlink(missing_ok=True)

    def _announced(self, name: str) -> object:
        if not self._served:
            raise EngineError(f"The engine's server has no {name} before it is started.")
        return self._served[name]

    def _request(self, method: str, path: str, content: object = None, *, key: str) -> JsonObject:
        if not self.is_running():
            raise self._child.ended() if self._folders else EngineError(_NOT_RUNNING)
        connection = http.client.HTTPConnection(self.host, self._served["port"], timeout=120.0)
        try:
            body = None if content is None else orjson.dumps(content)
            connection.request(method, path, body, {"Authorization": f"Bearer {key}"})
            response = connection.getresponse()
            status, found = response.status, orjson.loads(response.read())
        except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
            if self._child.has_ended():
                raise self._child.ended() from error
            raise EngineError(f"The engine's process does not answer '{path}': {error!r}") from error
        finally:
            connection.close()
        if status != http.client.OK:
            raise EngineError(str(found.get("error", {}).get("message", found)))
        return dict(found)


def engine_choice(engine: str | EngineChoice) -> EngineChoice | None:
    """The choice behind a name of `GRPO(engine=…)`, None for our own; ConfigurationError with the names it could be."""
    if not isinstance(engine, str):
        if callable(getattr(engine, "create", None)):
            return engine
    elif engine == EMBEDDED:
        return None
    elif engine == "vllm":
        return VllmOptions()
    elif engine.startswith(("http://", "https://")):
        return VllmOptions(address=engine)
    raise ConfigurationError(
        f"engine is {engine!r}; it must be '{EMBEDDED}', 'vllm', the address of a running vLLM such as "
        "'http://127.0.0.1:8000', VllmOptions(…), or another object with the method `create` of EngineChoice."
    )
