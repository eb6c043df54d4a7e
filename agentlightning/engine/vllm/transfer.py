"""How weights reach a vLLM: through GPU memory that both processes map, by NCCL, as a folder of files, or as adapters.

CUDA IPC needs one buffer on the learner's GPU, which is filled, read by vLLM and filled again until all weights have
passed. It lives as long as the training, so that vLLM opens it once. `/update_weights` returns when vLLM has read all
of it.
"""

import base64
import importlib
import json
import os
import pickle
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from agentlightning.engine.vllm.engine import VllmClient
from agentlightning.engine.weights import PublishedWeights, write_weights
from agentlightning.errors import EngineError
from agentlightning.utils.daemon_threads import in_background
from agentlightning.utils.json_values import JsonObject

BUFFER_BYTES: Final = 512 * 1024**2
"""Of GPU memory; a larger weight gets a larger buffer."""
_MEMORY: Final = Path("/dev/shm")

Share = Callable[[Tensor], tuple[Any, ...]]


class WeightTransfer:
    """A way of weights to a server."""

    def publish(self, version: int, weights: PublishedWeights) -> str | None:
        """Have it sample from these; the name of the adapters, if that is what was sent."""
        raise NotImplementedError

    def undo(self) -> None:
        """Leave the server as it was found, but for full weights."""

    def close(self) -> None:
        """Free memory and files of this process."""


class IpcTransfer(WeightTransfer):
    """Through CUDA IPC, on one GPU."""

    def __init__(
        self,
        client: VllmClient,
        dtype: torch.dtype,
        *,
        share: Share | None = None,
        gpu_id: str | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Prepare; the buffer is made where the first weight lies.

        Args:
            share: Makes the handle of a tensor that another process can open; torch's by default.
            gpu_id: The GPU's UUID, by which vLLM finds the handle; by default that of the weights.
        """
        self._client = client
        self._dtype = dtype
        self._share = share or _cuda_handle
        self._gpu_id = gpu_id
        self._buffer_bytes = buffer_bytes
        self._buffer: Tensor | None = None
        self._handle: str | None = None

    def publish(self, version: int, weights: PublishedWeights) -> None:
        self.send(weights.tensors(self._dtype))

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send all weights."""
        with self._client.updating_in_parts():
            for update in self.updates(tensors):
                self._client.post("/update_weights", {"update_info": update})

    def updates(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[JsonObject]:
        """What `/update_weights` takes, part by part; each must have been read before the next is asked for."""
        part: list[tuple[str, Tensor]] = []
        used = 0
        for name, tensor in tensors:
            size = tensor.nbytes
            room = 0 if self._buffer is None else self._buffer.nbytes
            if part and used + size > room:
                yield self._update(part)
                part, used = [], 0
            if self._buffer is None or size > room:
                self._buffer = torch.empty(max(size, self._buffer_bytes), dtype=torch.uint8, device=tensor.device)
                gpu_id = self._gpu_id or str(torch.cuda.get_device_properties(tensor.device).uuid)
                handles = {gpu_id: self._share(self._buffer)}
                self._handle = base64.b64encode(pickle.dumps(handles)).decode()
            own = self._buffer[used : used + size].view(tensor.dtype).view(tensor.shape)
            own.copy_(tensor)
            part.append((name, own))
            used += size
        if part:
            yield self._update(part)

    def close(self) -> None:
        self._buffer = self._handle = None

    def _update(self, part: list[tuple[str, Tensor]]) -> JsonObject:
        if part[0][1].is_cuda:
            torch.cuda.current_stream(part[0][1].device).synchronize()  # vLLM reads from another process
        return {
            **_described(part),
            "tensor_sizes": [tensor.nbytes for _, tensor in part],
            "packed": True,
            "ipc_handles_pickled": self._handle,
        }


def _described(part: Sequence[tuple[str, Tensor]]) -> JsonObject:
    return {
        "names": [name for name, _ in part],
        "dtype_names": [str(tensor.dtype).rpartition(".")[2] for _, tensor in part],
        "shapes": [list(tensor.shape) for _, tensor in part],
    }


def _cuda_handle(tensor: Tensor) -> tuple[Any, ...]:
    reductions: Any = importlib.import_module("torch.multiprocessing.reductions")  # it has no types
    arguments: tuple[Any, ...] = reductions.reduce_tensor(tensor)[1]
    return arguments


class Group(Protocol):
    """Processes that NCCL connects, of which the learner is the first; vLLM's `PyNcclCommunicator` is one."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Queue a tensor for all others, on the GPU's current stream."""
        ...

    def destroy(self) -> None:
        """Give up what is queued."""
        ...


class NcclTransfer(WeightTransfer):
    """Through NCCL, to the GPUs of vLLM's workers, which may be in another machine.

    Each part is announced to the server by HTTP, in a thread of its own, while its tensors are sent. The group is
    formed with the first update, and again after one that failed.
    """

    def __init__(
        self,
        client: VllmClient,
        dtype: torch.dtype,
        device: torch.device,
        *,
        workers: int,
        connect: Callable[[JsonObject], Group] | None = None,
        part_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Prepare.

        Args:
            device: Of the learner.
            workers: Processes of the server.
            connect: Forms the group, and returns when all are in it; vLLM's way by default.
        """
        self._client = client
        self._dtype = dtype
        self._device = device
        self._workers = workers
        self._connect = connect or _nccl_group
        self._part_bytes = part_bytes
        self._group: Group | None = None

    def publish(self, version: int, weights: PublishedWeights) -> None:
        group = self._group = self._group or self._form_group()
        try:
            with self._client.updating_in_parts(), self._on_device():
                part: list[tuple[str, Tensor]] = []
                for name, tensor in weights.tensors(self._dtype):
                    part.append((name, tensor.contiguous()))
                    if sum(one.nbytes for _, one in part) >= self._part_bytes:
                        self._send(group, part)
                        part = []
                if part:
                    self._send(group, part)
        except BaseException:
            self.close()  # what is queued waits for a server that may never read it
            raise

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.destroy()

    def _send(self, group: Group, part: Sequence[tuple[str, Tensor]]) -> None:
        content = {"update_info": _described(part)}
        answer = in_background("agl-vllm-update", lambda: self._client.post("/update_weights", content))
        for _, tensor in part:
            group.broadcast(tensor, src=0)
        answer.result()

    def _form_group(self) -> Group:
        place = urlsplit(self._client.root)
        port = place.port or (443 if place.scheme == "https" else 80)
        with socket.create_connection((place.hostname, port), 10.0) as connection:
            address = connection.getsockname()[0]
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind((address, 0))
            meeting = {"master_address": address, "master_port": free.getsockname()[1]}
        info: JsonObject = {**meeting, "rank_offset": 1, "world_size": self._workers + 1}

        def connect() -> Group:
            try:
                with self._on_device():
                    return self._connect(info)
            except (ImportError, OSError, RuntimeError, ValueError) as error:
                raise EngineError(
                    f"NCCL does not connect the learner with vLLM at {self._client.root}: {error}"
                ) from error

        # Each waits for the other, so that a failure of one is seen while the other still waits.
        answer = in_background(
            "agl-vllm-joins", lambda: self._client.post("/init_weight_transfer_engine", {"init_info": info})
        )
        group = in_background("agl-vllm-group", connect)
        for done in as_completed([answer, group]):
            done.result()
        return group.result()

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _nccl_group(info: JsonObject) -> Group:
    engine: Any = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine").NCCLWeightTransferEngine
    group: Group = engine.trainer_init(info)
    return group


class FolderTransfer(WeightTransfer):
    """As a folder that vLLM reads, in memory where there is room: for a learner on the CPU."""

    def __init__(self, client: VllmClient, dtype: torch.dtype, source: str) -> None:
        """Prepare.

        Args:
            source: The folder of the model; its small files are copied.
        """
        self._client = client
        self._dtype = dtype
        self._source = Path(source).expanduser()
        self._folder: Path | None = None

    def publish(self, version: int, weights: PublishedWeights) -> None:
        """Write all weights, and have vLLM read them."""
        whole = {name: tensor.to("cpu") for name, tensor in weights.tensors(self._dtype)}
        if self._folder is None:
            self._folder = self._new_folder(sum(tensor.nbytes for tensor in whole.values()))
        path = self._folder / "model.safetensors"
        write_weights(path, whole, metadata={"format": "pt"})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        try:
            with self._client.updating():
                self._client.post("/collective_rpc", reload)
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _new_folder(self, size: int) -> Path:
        # Twice: a file is written beside its place first.
        has_room = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 2 * size
        folder = Path(tempfile.mkdtemp(prefix="agl-vllm-", dir=_MEMORY if has_room else None))
        for pattern in ("*.json", "*.jinja", "*.txt", "*.model"):
            for file in self._source.glob(pattern):
                if not file.name.endswith(".index.json"):  # it lists the files of the old weights
                    shutil.copy(file, folder)
        return folder


class AdapterTransfer(WeightTransfer):
    """Adapters under a name for each version; the one before stays for the calls that use it."""

    def __init__(self, client: VllmClient, name: str, adapters: Iterable[str]) -> None:
        """Unload what another run left under our names.

        Args:
            adapters: That the server has.
        """
        self._client = client
        self._name = name
        self._folder = Path(tempfile.mkdtemp(prefix="agl-vllm-lora-"))
        self._loaded: list[str] = []
        left = [one for one in adapters if re.fullmatch(rf"{re.escape(self._name)}-v\d+", one)]
        for adapter in left:
            self._client.post("/v1/unload_lora_adapter", {"lora_name": adapter})
        if left:  # keys and values are cached by the adapter's name
            self._client.reset_prefix_cache()

    def publish(self, version: int, weights: PublishedWeights) -> str:
        adapters = weights.adapters()
        if adapters is None:
            raise EngineError(f"The model '{self._name}' is trained whole, and this vLLM takes adapters alone.")
        adapter = f"{self._name}-v{version}"
        folder = self._folder / adapter
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(adapters.config, default=str), encoding="utf-8")
        write_weights(folder / "adapter_model.safetensors", adapters.tensors, metadata={"format": "pt"})
        is_known = adapter in self._loaded
        content = {"lora_name": adapter, "lora_path": str(folder), "load_inplace": is_known}
        self._client.post("/v1/load_lora_adapter", content)
        if is_known:
            self._client.reset_prefix_cache()
            self._loaded.remove(adapter)
        self._loaded.append(adapter)
        for old in self._loaded[:-2]:
            self._unload(old)
        return adapter

    def undo(self) -> None:
        for adapter in list(self._loaded):
            self._unload(adapter)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _unload(self, adapter: str) -> None:
        self._client.post("/v1/unload_lora_adapter", {"lora_name": adapter})
        self._loaded.remove(adapter)
        shutil.rmtree(self._folder / adapter, ignore_errors=True)
