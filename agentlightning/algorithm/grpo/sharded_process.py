"""What torchrun starts for a `ShardedLearner`, once for each rank: `-m agentlightning.algorithm.grpo.sharded_process`.

Its only argument is the private folder of the learner. It finds its settings there, listens on a socket there, and
carries out orders, which all ranks get alike. An error that all ranks find together is an answer; any other ends the
process, upon which torchrun ends the others. It ends, too, when the training process is gone, however that ended.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, Final, NoReturn

import orjson
import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.sharded_rank import RankLearner, split
from agentlightning.engine.hf import HfModel
from agentlightning.engine.loading import load
from agentlightning.engine.lora import LoraOptions
from agentlightning.errors import AgentLightningError
from agentlightning.logging import setup

__all__ = ["SETTINGS_FILE", "STATE_FILE", "WEIGHTS_FILE", "main"]

SETTINGS_FILE: Final = "settings.json"
STATE_FILE: Final = "state"
"""Of a learner; a rank's part has its number behind it."""
WEIGHTS_FILE: Final = "weights"
WATCH_SECONDS: Final = 0.5
"""Between two looks at the training process."""


def main() -> NoReturn:
    """Carry out orders until the training process ends this one, or is gone."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    settings = orjson.loads((folder / SETTINGS_FILE).read_bytes())
    setup("WARNING")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process says when to leave
    launcher = os.getppid()
    watched = (launcher, settings["trainer"], folder)
    threading.Thread(target=_leave_after, args=watched, name="agl-trainer-watch", daemon=True).start()
    with Listener(str(folder / f"rank-{rank}"), "AF_UNIX", authkey=settings["secret"].encode()) as listener:
        orders = listener.accept()
    try:
        learner = _learner(settings, folder)
    except AgentLightningError as error:
        sys.exit(str(error))  # on standard error, which the training process reads
    orders.send_bytes(b"{}")
    with suppress(EOFError, ConnectionError):
        while True:
            order = orjson.loads(orders.recv_bytes())
            try:
                answer = _carry_out(learner, folder, **order)
            except AgentLightningError as error:
                if isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise  # of one rank, while the others wait for it
                answer = {"error": str(error)}
            orders.send_bytes(json.dumps(answer).encode())  # which keeps what is not finite
    _leave(launcher, folder)


def _leave_after(launcher: int, trainer: int, folder: Path) -> None:
    """End with the training process, which is the parent of torchrun."""
    # Its id, and not the end of the connection alone, which is inherited by what else it forks, and stays open.
    with suppress(psutil.Error):
        while os.getppid() == launcher and psutil.Process(launcher).ppid() == trainer:
            time.sleep(WATCH_SECONDS)
    _leave(launcher, folder)


def _leave(launcher: int, folder: Path) -> NoReturn:
    """End torchrun, which would wait for its files, and do what the training process cannot do any more."""
    with suppress(ProcessLookupError):
        if os.getppid() == launcher:
            os.kill(launcher, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _learner(settings: dict[str, Any], folder: Path) -> RankLearner:
    device, lora, learning = settings["device"], settings["lora"], settings["learning"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=(folder / "group").as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    adapters = None if lora is None else LoraOptions(**lora)
    # One after the other, since each has the whole model in the computer's memory before it keeps its part of it.
    for turn in range(mesh.size()):
        if turn == mesh.get_rank():
            loaded, _ = load(settings["source"], device="cpu", dtype=settings["dtype"], lora=adapters)
            assert isinstance(loaded, HfModel)
            model = loaded
            root = split(model, mesh, in_16_bits=learning["precision"] == "bf16")
        dist.all_reduce(torch.zeros(()))
    chosen = LearnerSettings(**{**learning, "betas": tuple(learning["betas"])})
    return RankLearner(model, chosen, root=root, weights_file=folder / WEIGHTS_FILE)


def _carry_out(learner: RankLearner, folder: Path, *, kind: str, samples: Sequence[Any] = ()) -> dict[str, Any]:
    if kind == "update":
        return learner.update([Sample(**sample) for sample in samples])
    if kind == "save":
        torch.save(learner.state(), folder / f"{STATE_FILE}.{dist.get_rank()}")
    else:
        learner.load_state(torch.load(folder / STATE_FILE, map_location="cpu", mmap=True, weights_only=True))
    return {}


if __name__ == "__main__":
    main()
