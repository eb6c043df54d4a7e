"""A learner whose work is done by several processes, seen from the process that trains.

The model here is an ordinary one in the computer's memory, and is trained in place, as by `Learner`: its weights lie in
a file that the processes map too, and have their new values when `update` returns. Publishing, saving and exporting
therefore know nothing of the processes. torchrun starts these and ends all when one fails; `sharded_rank` is what
they run. Commands go to each of them over a Unix socket in a private folder, and large states as files in it.
"""

import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, Final

import orjson
import torch
from torch import Tensor

from agentlightning.algorithm.grpo.packing import Row, planned
from agentlightning.algorithm.grpo.samples import Sample, Sampled
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.sharded_rank import (
    SETTINGS_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    map_weights,
    parameters_of,
)
from agentlightning.engine.embedded import ChildProgram
from agentlightning.engine.hf import HfModel
from agentlightning.engine.model import CausalModel, LoraOptions
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.utils.child_process import ProgramPlan, python_path

STOP_SECONDS: Final = 10.0
LAST_LINES: Final = 20
"""Of a rank's standard error, that an error has."""
_MEMORY: Final = Path("/dev/shm")


class ShardedLearner:
    """Trains one Hugging Face model in place; `start` it and `stop` it."""

    rounded_copy: Final = None

    def __init__(
        self, model: CausalModel, settings: LearnerSettings, *, source: str, device: str, lora: LoraOptions | None
    ) -> None:
        """Prepare; nothing runs before `start`. ConfigurationError where there cannot be so many processes.

        Args:
            model: In the computer's memory. With a KL term, its weights at `start` are the reference.
            source: What `engine.checkpoint.load` made the model of.
            device: "cuda", a GPU for each process, or "cpu".
        """
        wanted = f"processes is {settings.processes}"
        if not isinstance(model, HfModel):
            raise ConfigurationError(
                f"{wanted}, and model '{model.name}' is trained in 1; it is no Hugging Face model."
            )
        if device not in ("cuda", "cpu"):
            raise ConfigurationError(f"{wanted}, and device is '{device}'; set 'cuda', 'cpu' or 'auto'.")
        if device == "cuda" and torch.cuda.device_count() < settings.processes:
            raise ConfigurationError(f"{wanted}, and this machine has {torch.cuda.device_count()} GPUs for them.")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigurationError(f"{wanted}, and torchrun started this script; start it once, as any other script.")
        self.model, self.settings = model, settings
        self._source, self._device, self._lora = source, device, lora
        self._folder: Path | None = None
        self._torchrun = ChildProgram("torchrun", stop_seconds=STOP_SECONDS)
        self._connections: list[Connection[Any, Any]] = []
        """To the ranks, in their order."""
        self._one_command = threading.Lock()
        """Protects the connections: a cancelled update goes on in its thread while a checkpoint is loaded."""

    def start(self) -> None:
        """Start the processes; returns when they have the model. TrainingError with the last lines of one that ends."""
        self.settings = planned(self.settings, self.model, torch.device(self._device))
        weights = parameters_of(self.model)
        needed = sum(weight.nbytes for weight in weights.values())
        # A learner's state has less than four numbers for each weight that is trained.
        needed += 4 * sum(weight.nbytes for weight in self.model.trainable().values())
        # In memory, if that has room for the weights and a state; containers often give little memory to files.
        is_roomy = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= needed
        try:
            self._folder = folder = Path(tempfile.mkdtemp(prefix="agl-learner-", dir=_MEMORY if is_roomy else None))
            for name, shared in map_weights(folder / WEIGHTS_FILE, weights).items():
                shared.copy_(weights[name].detach())
                weights[name].data = shared
            secret = secrets.token_urlsafe(32)
            self._launch(folder, secret)
            for rank in range(self.settings.processes):
                self._connections.append(self._connected(folder / f"rank-{rank}", secret.encode()))
            self._responses()
            (folder / WEIGHTS_FILE).unlink()  # all have it in their memory; nothing is left of it when they end
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError):
                raise TrainingError(f"The learner's processes cannot be started: {error}") from error
            raise

    def stop(self) -> None:
        """End the processes, whatever they do; harmless if there are none."""
        self._torchrun.stop()  # it ends the ranks; without it they end by themselves
        with self._one_command:
            for connection in self._connections:
                connection.close()
            self._connections = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def update(self, samples: Sequence[Sample], sampled: Sampled | None = None) -> dict[str, float]:
        """Learn from samples once; the metrics of it. TrainingError as of `Learner`, or if a process has ended."""
        if not samples:
            raise TrainingError("There are no samples to learn from.")
        for sample in samples:
            Row.of(sample, self.model)  # raises if it cannot be learned from
        whole = None if sampled is None else asdict(sampled)
        found = self._command("update", samples=[asdict(sample) for sample in samples], sampled=whole)
        metrics: dict[str, float] = found
        return metrics

    def state(self) -> dict[str, Any]:
        """As one process has it: a checkpoint does not know how many there were."""
        self._command("save")
        assert self._folder is not None
        parts = [self._folder / f"{STATE_FILE}.{rank}" for rank in range(self.settings.processes)]
        merged: dict[str, Any] = _merged([torch.load(part, mmap=True, weights_only=True) for part in parts])
        for part in parts:
            part.unlink()
        return merged

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another learner left off, with the weights that are in the model now."""
        if not self._torchrun.is_running():
            return  # no process is left to go on, and the weights are where they belong
        assert self._folder is not None
        path = self._folder / STATE_FILE
        torch.save(dict(state), path)
        self._command("load")
        path.unlink()

    def _launch(self, folder: Path, secret: str) -> None:
        settings = self.settings
        content = {
            "trainer": os.getpid(),
            "secret": secret,
            "source": self._source,
            "device": self._device,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "lora": None if self._lora is None else asdict(self._lora),
            "learning": asdict(settings),
        }
        (folder / SETTINGS_FILE).write_bytes(orjson.dumps(content))
        # The ranks meet by files; its own way is a server that unpickles what it gets, on every network of the machine.
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder / 'rendezvous'}", "--rdzv-conf=store_type=file"]
        torchrun = ["torch.distributed.run", *rendezvous, "--local-addr=127.0.0.1", f"--log-dir={folder}"]
        torchrun += ["--redirects=3", f"--nproc-per-node={settings.processes}", "-m"]
        threads = settings.threads or max(1, (os.cpu_count() or 1) // settings.processes)
        loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        own = {"PYTHONPATH": python_path(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [sys.executable, "-m", *torchrun, "agentlightning.algorithm.grpo.sharded_rank", str(folder)]
        environment = {"OMP_NUM_THREADS": str(threads), **loopback, **os.environ, **own}
        # In a session of its own: Ctrl-C is for the training process, which still needs a checkpoint.
        with open(os.devnull, "rb") as nothing:
            self._torchrun.start(ProgramPlan(command=command, env=environment, marker=None, stdin=nothing))

    def _connected(self, path: Path, secret: bytes) -> "Connection[Any, Any]":
        while not self._torchrun.has_ended(0.05):
            with suppress(FileNotFoundError, ConnectionRefusedError):
                return Client(str(path), "AF_UNIX", authkey=secret)
        raise self._ended([])

    def _command(self, kind: str, **content: Any) -> Any:
        """Have all ranks do something; the response of the first. TrainingError with the error of one."""
        message = orjson.dumps({"kind": kind, **content})
        with self._one_command:
            if not self._connections:
                raise TrainingError("The learner's processes do not run.")
            for connection in self._connections:
                with suppress(OSError):  # its end is noticed below
                    connection.send_bytes(message)
            return self._responses()[0]

    def _responses(self) -> list[dict[str, Any]]:
        """One of every rank."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(self._connections):
            ready = wait([one for rank, one in enumerate(self._connections) if rank not in found])
            ended = []
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    try:
                        found[rank] = json.loads(connection.recv_bytes())
                    except (EOFError, OSError):
                        ended.append(rank)
            if ended:
                raise self._ended(ended)
        errors = [response["error"] for response in found.values() if "error" in response]
        if errors:
            raise TrainingError(str(errors[0]))
        return [found[rank] for rank in sorted(found)]

    def _ended(self, ranks: Sequence[int]) -> TrainingError:
        """The last lines of these ranks, or of torchrun where they wrote nothing, as one that was killed."""
        assert self._folder is not None
        self._torchrun.has_ended(STOP_SECONDS)
        logs = [log for rank in ranks for log in self._folder.glob(f"**/{rank}/stderr.log") if log.stat().st_size]
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:]]
        named = " and ".join(f"rank {rank}" for rank in ranks) or "torchrun"
        shown = "\n".join(lines or self._torchrun.last_lines(LAST_LINES))
        return TrainingError(f"A process of the learner ({named}) has ended. Its last lines:\n{shown}")


def _merged(parts: Sequence[Any]) -> Any:
    """The whole of which every rank has consecutive rows."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    return {name: _merged([one[name] for one in parts]) for name in first} if isinstance(first, Mapping) else first
