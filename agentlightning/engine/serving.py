"""The engine and its server in a process of their own, seen from the process that trains.

Sampling does not share a core's time, an interpreter or a failure with anything else. New weights travel as a file in
memory, in the numbers that the child samples with, and are taken over between two steps.
"""

import http.client
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
from typing_extensions import Self

from agentlightning.errors import EngineError
from agentlightning.utils.child_process import BackgroundProgram, ProgramPlan, python_path

if TYPE_CHECKING:
    from torch import Tensor

    from agentlightning.engine.published import PublishedWeights
    from agentlightning.engine.shared_weights import SharedBlock

__all__ = ["EngineServer"]

logger = logging.getLogger(__name__)

START_SECONDS: Final = 600.0
"""For a model to be loaded; one that is gone is noticed at once."""
STOP_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 120.0
LAST_LINES: Final = 20
"""Of the child's standard error, that an error tells."""
_MEMORY: Final = Path("/dev/shm")
_POLL_SECONDS: Final = 0.05
_KEY_BYTES: Final = 32
_SPARE_BYTES: Final = 1 << 20
"""That a file of weights has beyond the numbers, at most: names and shapes."""


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
            model: As `engine.loading.load` takes it.
            port: 0 takes a free one.
            max_sequences: Sampled together at most.
            max_length: Tokens of prompt and answer together, if fewer than the model can take.
            threads: That compute one operation of the model.
            name: What callers call the model; its own name by default.
            log_level: Of the child; its lines appear in the log of this process.
        """
        self.host = host
        self.api_key = secrets.token_urlsafe(_KEY_BYTES)
        """What callers must show; `model_config` hands it to the proxy."""
        self._weights_key = secrets.token_urlsafe(_KEY_BYTES)
        self._settings: dict[str, Any] = {
            "model": model,
            "host": host,
            "port": port,
            "max_sequences": max_sequences,
            "max_length": max_length,
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "name": name,
            "log_level": logging.getLevelName(log_level) if isinstance(log_level, int) else log_level,
        }
        self._port: int | None = None
        self._model_name: str | None = None
        self._dtype = "float32"
        self._gpu: str | None = None
        """That the child is on, unless weights travel to it as files."""
        self._block: SharedBlock | None = None
        self._program = BackgroundProgram("agl-engine")
        self._folders: list[Path] = []
        """For weights under way: in memory where that can be, and on the disk for those that memory has no room for."""

    # ------------------------------------------------------------------ addresses

    @property
    def address(self) -> str:
        """Where OpenAI's clients find it: `http://127.0.0.1:port/v1`."""
        if self._port is None:
            raise EngineError("The engine's server has no address before it is started.")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._port}/v1"

    endpoint = address

    @property
    def model_name(self) -> str:
        if self._model_name is None:
            raise EngineError("The engine's server has no model before it is started.")
        return self._model_name

    def model_config(self) -> dict[str, Any]:
        """Its entry in the model list of `LLMProxy`."""
        parameters = {"model": f"agl/{self.model_name}", "api_base": self.address, "api_key": self.api_key}
        return {"model_name": self.model_name, "litellm_params": parameters}

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Serve; returns when calls are answered. EngineError with the child's last lines if that does not happen."""
        if self._folders:
            raise EngineError("The engine's server runs already.")
        places = [_MEMORY, None] if os.access(_MEMORY, os.W_OK) else [None]
        self._folders = [Path(tempfile.mkdtemp(prefix="agl-engine-", dir=place)) for place in places]
        threads = str(self._settings["threads"])
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": python_path()}
        keys = {"api_key": self.api_key, "weights_key": self._weights_key}
        own = {"parent": os.getpid(), "weights_folders": [*map(str, self._folders)]}
        try:
            with tempfile.TemporaryFile() as settings:  # not in the command line, which every user can read
                settings.write(orjson.dumps({**self._settings, **keys, **own}) + b"\n")
                settings.seek(0)
                plan = ProgramPlan(
                    command=[sys.executable, "-m", "agentlightning.engine.process"],
                    env={**os.environ, **environment},
                    marker=None,
                    stdin=settings,
                    on_error_line=lambda line: logger.warning("engine: %s", line),
                )
                self._program.start(plan)
            self._read_announcement()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Finish the calls in flight and end the child; harmless if nothing runs."""
        self._program.stop(STOP_SECONDS)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders, self._block = [], None

    def is_running(self) -> bool:
        return self._program.is_running()

    @property
    def process_id(self) -> int | None:
        """Of the child; None if there is none."""
        return self._program.process_id

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ what it does

    def publish(self, version: int, weights: "PublishedWeights") -> None:
        """Have it sample from other weights from its next step on; returns when it does.

        Calls in flight go on. Weights that do not fit are an EngineError, and the old ones stay.
        """
        if not self._folders:
            raise EngineError("The engine's server is not running.")
        import torch

        from agentlightning.engine.weights import write_weights

        if self._publish_shared(version, weights):
            return
        tensors = {name: tensor.to("cpu") for name, tensor in weights.tensors(getattr(torch, self._dtype))}
        folder = self._roomy_folder(tensors)
        self._announce(version, folder, ".safetensors", lambda path: write_weights(path, tensors))

    def _publish_shared(self, version: int, weights: "PublishedWeights") -> bool:
        """Publish in memory of the engine's GPU, where the weights are there too; False if they travel as a file."""
        import torch

        from agentlightning.engine.shared_weights import DESCRIPTION_SUFFIX, SharedBlock, gpu_of

        if self._gpu is None or gpu_of(weights.device) != self._gpu:
            return False
        try:
            if self._block is None:
                self._block = SharedBlock(weights.shapes, getattr(torch, self._dtype), weights.device)
            self._block.fill(weights.tensors(self._block.dtype))
            self._announce(version, self._folders[0], DESCRIPTION_SUFFIX, self._block.describe)
        except (RuntimeError, EngineError) as error:  # no room, or an allocator whose memory cannot be shared
            logger.warning("Weights travel to the engine as a file, since it shares no GPU memory: %s", error)
            self._gpu = self._block = None
            return False
        return True

    def _announce(self, version: int, folder: Path, suffix: str, write: Callable[[Path], None]) -> None:
        path = folder / f"weights-{version}-{time.monotonic_ns()}{suffix}"
        try:
            write(path)
            self._ask("POST", "/agl/weights", {"version": version, "path": str(path)}, key=self._weights_key)
        finally:
            path.unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """How it is, as `/agl/status` tells."""
        return self._ask("GET", "/agl/status", key=self.api_key)

    # ------------------------------------------------------------------ parts

    def _roomy_folder(self, tensors: "Mapping[str, Tensor]") -> Path:
        """The first with room for these; containers often give little memory to files."""
        needed = sum(tensor.nbytes for tensor in tensors.values()) + _SPARE_BYTES
        return next((one for one in self._folders if shutil.disk_usage(one).free >= needed), self._folders[-1])

    def _read_announcement(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (line := self._program.output()).endswith("\n"):
            if self._program.has_ended(_POLL_SECONDS):
                raise self._gone()
            if time.monotonic() > deadline:
                raise EngineError(f"The engine's process did not begin to serve within {START_SECONDS:g} s.")
        announced = orjson.loads(line)
        self._port, self._model_name = announced["port"], announced["model_name"]
        self._dtype, self._gpu = announced["dtype"], announced["gpu"]

    def _ask(self, method: str, path: str, content: Any = None, *, key: str) -> dict[str, Any]:
        if not self.is_running():
            raise self._gone()
        assert self._port is not None
        connection = http.client.HTTPConnection(self.host, self._port, timeout=ANSWER_SECONDS)
        try:
            body = None if content is None else orjson.dumps(content)
            connection.request(method, path, body, {"Authorization": f"Bearer {key}"})
            response = connection.getresponse()
            status, answer = response.status, orjson.loads(response.read())
        except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
            if self._program.has_ended(1.0):  # a connection breaks a moment before the end of the process is seen
                raise self._gone() from error
            raise EngineError(f"The engine's process does not answer '{path}': {error!r}") from error
        finally:
            connection.close()
        if status != http.client.OK:
            raise EngineError(str(answer.get("error", {}).get("message", answer)))
        return dict(answer)

    def _gone(self) -> EngineError:
        if not self._folders:
            return EngineError("The engine's server is not running.")
        self._program.has_ended(1.0)
        lines = "\n".join(self._program.last_lines(LAST_LINES)) or "It said nothing."
        code = self._program.exit_code
        return EngineError(f"The engine's process has ended with code {code}. Its last words:\n{lines}")
