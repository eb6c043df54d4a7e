"""One of the processes that train a model together: FSDP2 splits weights, gradients and moments among them.

Every rank gets the same samples, shuffles them alike and takes its share of each minibatch, so what it computes is part
of the sum that one process alone would compute. The optimiser sees plain tensors, the rows of each weight that this
rank holds, and works as it does alone.

The whole weights lie in a file that the training process and all ranks map into their memory. A rank holds consecutive
rows of a weight, so each copies its own rows there and back, without a collective.

torchrun starts this module once for each rank. Its only argument is the private folder of the `ShardedLearner`, where
it finds its settings, listens on a socket, and carries out orders, which all ranks get alike. An error that all ranks
find together is an answer; any other ends the process, upon which torchrun ends the others. It ends, too, when the
training process is gone, however that ended.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, Final, NoReturn

import orjson
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from agentlightning.algorithm.grpo.learner import Figures, Learner
from agentlightning.algorithm.grpo.packing import Pack, Row
from agentlightning.algorithm.grpo.samples import Sample, Sampled
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.token_logprobs import TokenLogprobs
from agentlightning.engine.checkpoint import load
from agentlightning.engine.hf import HfModel
from agentlightning.engine.model import LoraOptions
from agentlightning.errors import AgentLightningError
from agentlightning.logging import setup
from agentlightning.utils.child_process import leave_with_parent

SETTINGS_FILE: Final = "settings.json"
STATE_FILE: Final = "state"
"""Of a learner; a rank's part has its number behind it."""
WEIGHTS_FILE: Final = "weights"
_ALIGNMENT_BYTES: Final = 64


def parameters_of(model: HfModel) -> dict[str, Parameter]:
    """Every weight of a model, trained or not, in the same order in every process."""
    return dict(model.network.named_parameters())


def map_weights(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors shaped like these in a file that processes share; OSError where the disk has no room for it."""
    bytes_of = {name: weight.numel() * weight.element_size() for name, weight in weights.items()}
    starts = [0, *accumulate(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in bytes_of.values())]
    if hasattr(os, "posix_fallocate") and not path.exists():
        with path.open("wb") as file:  # a page that finds no room when it is touched would end the process
            os.posix_fallocate(file.fileno(), 0, starts[-1])
    memory = torch.from_file(str(path), shared=True, size=starts[-1], dtype=torch.uint8)
    return {
        name: memory[start : start + bytes_of[name]].view(weight.dtype).view(weight.shape)
        for start, (name, weight) in zip(starts, weights.items(), strict=False)
    }


class _Root(nn.Module):
    """FSDP gathers the weights that are in no layer, such as those of the embeddings, while this computes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


def split(model: HfModel, mesh: DeviceMesh, *, in_16_bits: bool) -> FSDPModule:
    """Keep this rank's rows of every weight; what computes with the model must be called by what is returned."""
    # Autocast would round a layer's weights when it uses them; with this they are rounded before they travel. Those in
    # no layer stay in 32 bits, and with them the sums that go from layer to layer, as in a single process.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if in_16_bits:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in _layers(model.network):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(_Root(model.network), mesh=mesh)


def _layers(network: nn.Module) -> Iterator[nn.Module]:
    """The modules in the outermost lists: the layers of a decoder."""
    for child in network.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


class RankLearner(Learner):
    """Learns together with the other ranks, all of which must be called alike."""

    def __init__(self, model: HfModel, settings: LearnerSettings, *, root: FSDPModule, weights_file: Path) -> None:
        """Take the weights from a file that the training process has made, and charge of this rank's rows.

        Args:
            root: What `split` made of the model.
        """
        self._root: Any = root
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._parameters = parameters_of(model)
        self._shared = map_weights(weights_file, self._parameters)
        self._is_finite = True
        """Whether all losses of this rank are, in the step under way."""
        self._take_weights()
        super().__init__(model, settings)

    def update(self, samples: Sequence[Sample], sampled: Sampled | None = None) -> dict[str, float]:
        """As a single process does; the file has the new weights when all ranks have returned."""
        metrics = super().update(samples, sampled)
        for name, weight in self._weights.items():
            self._rows(self._shared[name]).copy_(weight.detach())
        return metrics

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the weights from the file, and of a whole state what belongs to this rank's rows."""
        self._take_weights()
        super().load_state(self._rows_of_state(state))

    # ------------------------------------------------------------------ this rank's rows

    def _rows(self, whole: Tensor) -> Tensor:
        each = -(-whole.shape[0] // self._ranks)
        return whole[self._rank * each : (self._rank + 1) * each]

    def _rows_of_state(self, state: Any) -> Any:
        if isinstance(state, Mapping):
            return {name: self._rows_of_state(one) for name, one in state.items()}
        return self._rows(state) if isinstance(state, Tensor) else state

    def _take_weights(self) -> None:
        self._root.reshard()
        for name, parameter in self._parameters.items():
            _local(parameter).copy_(self._rows(self._shared[name]))

    def _save_memory(self, model: HfModel) -> None:
        choose = super()._save_memory  # which tries the model
        self._root(lambda: choose(model))

    def _trainable(self) -> dict[str, Parameter]:
        return {name: Parameter(_local(weight)) for name, weight in self.model.trainable().items()}

    @contextmanager
    def _as_reference(self, reference: Mapping[str, Tensor]) -> Iterator[None]:
        own = {name: weight.detach().clone() for name, weight in self._weights.items()}
        try:
            self._set_weights(reference)
            yield
        finally:
            self._set_weights(own)

    def _set_weights(self, values: Mapping[str, Tensor]) -> None:
        self._root.reshard()  # what was gathered is of the weights before
        for name, weight in self._weights.items():
            weight.data.copy_(values[name])

    # ------------------------------------------------------------------ this rank's share of the work

    def _packs(self, rows: Sequence[Row]) -> Iterator[Pack]:
        """A rank that has fewer packs than another computes for nothing at the end, since all must gather weights."""
        if not rows:
            return
        own = list(super()._packs(_shares(rows, self._ranks)[self._rank]))
        most = torch.tensor(len(own))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for self._pack in own:
            yield self._pack
        shortest = min(rows, key=lambda row: row.length)
        for _ in range(int(most.item()) - len(own)):
            nothing = self._logprobs(next(super()._packs([shortest]))).logprobs.sum() * 0
            if nothing.requires_grad:
                nothing.backward()  # type: ignore[no-untyped-call]  # torch has not annotated it

    def evaluated(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Tensor]]:
        """All rows on every rank, for another rank may learn from a row than evaluates it."""
        own = {id(row): logprobs for row, logprobs in super().evaluated(rows)}
        if rows:
            found = torch.cat([own.get(id(row), torch.zeros(row.n_chosen)).double() for row in rows])
            dist.all_reduce(found)  # sums of one number and zeros
            yield from zip(rows, torch.split(found, [row.n_chosen for row in rows]), strict=True)

    def _rounded_copy(self) -> None:
        """FSDP rounds the parts it gathers itself, to the nearest."""

    def _logprobs(self, pack: Pack) -> TokenLogprobs:
        compute = super()._logprobs
        # FSDP finds tensors in dicts, not in dataclasses.
        return TokenLogprobs(**self._root(lambda: vars(compute(pack))))

    def _finite(self, value: Tensor, name: str) -> float:
        """A loss is only noted: who raised alone would leave the others waiting; with the gradient all raise."""
        if name != "loss":
            return super()._finite(value, name)
        number = float(value.item())
        self._is_finite = self._is_finite and abs(number) < float("inf")
        return number

    def _clip_gradients(self) -> Tensor:
        for name, weight in self.model.trainable().items():
            # FSDP gives the mean of the ranks, of which each has a part of the sum.
            mean, weight.grad = weight.grad, None
            self._weights[name].grad = mean.to_local() if isinstance(mean, DTensor) else None
        weights = list(self._weights.values())
        gradients = [one.grad for one in weights if one.grad is not None]
        torch._foreach_mul_(gradients, self._ranks)
        square = torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square().sum().cpu()
        if not self._is_finite:
            square.fill_(float("nan"))
        self._is_finite = True
        dist.all_reduce(square)
        norm = square.sqrt()
        if self.settings.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(weights, self.settings.max_grad_norm, norm)
        return norm

    def _combined(self, figures: Figures) -> Figures:
        everybody: list[Any] = [None] * self._ranks
        dist.all_gather_object(everybody, figures)
        for other in (one for rank, one in enumerate(everybody) if rank != self._rank):
            figures.merge(other)
        return figures


def _local(weight: Tensor) -> Tensor:
    """The rows of it that are here; the same memory."""
    assert isinstance(weight, DTensor)
    rows: Tensor = weight.to_local().detach()
    return rows


def _shares(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """The rows in as many parts, which have about the same number of tokens."""
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        least = tokens.index(min(tokens))
        shares[least].append(row)
        tokens[least] += row.length
    return shares


# ---------------------------------------------------------------------- the process


def main() -> NoReturn:
    """Carry out orders until the training process ends this one, or is gone."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    settings = orjson.loads((folder / SETTINGS_FILE).read_bytes())
    setup("WARNING")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process says when to leave
    launcher = os.getppid()
    is_orphaned = partial(_is_orphaned, launcher, settings["trainer"])
    leave_with_parent(partial(_leave, launcher, folder), is_orphaned=is_orphaned)
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


def _is_orphaned(launcher: int, trainer: int) -> bool:
    """Whether the training process, which is the parent of torchrun, or torchrun itself is gone."""
    try:
        return os.getppid() != launcher or psutil.Process(launcher).ppid() != trainer
    except psutil.Error:
        return True


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


def _carry_out(
    learner: RankLearner,
    folder: Path,
    *,
    kind: str,
    samples: Sequence[Any] = (),
    sampled: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    if kind == "update":
        return learner.update([Sample(**one) for one in samples], None if sampled is None else Sampled(**sampled))
    if kind == "save":
        torch.save(learner.state(), folder / f"{STATE_FILE}.{dist.get_rank()}")
    else:
        learner.load_state(torch.load(folder / STATE_FILE, map_location="cpu", mmap=True, weights_only=True))
    return {}


if __name__ == "__main__":
    main()
