"""Starting a training with verl's own trainer, or saying what it lacks before anything is started.

verl's task runner makes the trainer and the agent loop in an actor of Ray. It runs on the machine of the program, where
the folder with the program's parts is; verl's workers run wherever Ray has GPUs.

The configuration of a training is our own file, over verl's defaults, under what the user gives.

With verl and Hydra installed the result is complete, and an object of OmegaConf. Without them it holds our file and the
user's values, as a dictionary that can be read the same way; interpolations such as `${data.seed}` stay as they are
written.

A program hands verl's process its data sets, the adapter, the proxy and the store's address. verl's trainer runs in an
actor of Ray, and its configuration holds plain values. The rest lies in a folder that only the user may read; the
configuration names it as `agentlightning.run_folder`.
"""

import copy
import importlib
import importlib.util
import logging
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final, Protocol

from agentlightning.adapter import TraceToTrajectory, TraceToTripletBase
from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm.base import Tasks
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.forwarding import innermost
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import NamedResources
from agentlightning.utils.installation import install_command
from agentlightning.utils.json_values import JsonMapping, JsonObject
from agentlightning.utils.loop_thread import LoopThread

logger = logging.getLogger(__name__)


ROWS_SUFFIX: Final = ".rows"
"""Of files with pickled rows, which this module writes."""
_PARTS_FILE: Final = "parts.pickle"


@dataclass(frozen=True)
class RunParts:
    """The parts of a training that verl's process needs."""

    store: LightningStore
    """A client or a server: in another process it is a client of the same store."""
    adapter: TraceAdapter[Any] | None = None
    llm_proxy: LLMProxy | None = None
    """Not started; None makes one on a free port of this machine."""
    initial_resources: NamedResources | None = None
    run_id: str | None = None
    """The run in the store to which metrics belong."""


@contextmanager
def run_folder(parts: RunParts, train_dataset: Tasks | None, val_dataset: Tasks | None) -> Iterator[dict[str, str]]:
    """A folder for the length of the block; the paths in it, by the name "folder", "train" and "val"."""
    pickling = importlib.import_module("ray.cloudpickle")  # takes what is defined in the user's script
    folder = Path(tempfile.mkdtemp(prefix="agl-verl-"))
    try:
        paths = {"folder": str(folder)}
        (folder / _PARTS_FILE).write_bytes(pickling.dumps(parts))
        for name, dataset in (("train", train_dataset), ("val", val_dataset)):
            if dataset is not None:
                paths[name] = str(folder / f"{name}{ROWS_SUFFIX}")
                rows = [dataset[number] for number in range(len(dataset))]
                Path(paths[name]).write_bytes(pickling.dumps(rows))
        yield paths
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_parts(folder: str) -> RunParts:
    """What `run_folder` was given."""
    parts = importlib.import_module("ray.cloudpickle").loads(Path(folder, _PARTS_FILE).read_bytes())
    assert isinstance(parts, RunParts)
    return parts


def read_rows(paths: Sequence[str]) -> list[Any]:
    """The rows of files: of ours, JSON lines, a JSON list, or Parquet."""
    return [row for path in paths for row in _read(Path(path).expanduser())]


def _read(path: Path) -> list[object]:
    try:
        if path.suffix == ROWS_SUFFIX:
            return list(importlib.import_module("ray.cloudpickle").loads(path.read_bytes()))
        if path.suffix == ".parquet":
            return list(importlib.import_module("pyarrow.parquet").read_table(path).to_pylist())
        json = importlib.import_module("orjson")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
        rows = json.loads(path.read_bytes()) if path.suffix == ".json" else None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The data file '{path}' cannot be read: {error}") from error
    if not isinstance(rows, list):
        raise ConfigurationError(
            f"The data file '{path}' is none that is known; give .parquet, .jsonl, or .json with a list."
        )
    return rows


# ---------------------------------------------------------------------- launch


_PACKAGE: Final = "agentlightning.verl"
_FILE: Final = "config.yaml"


class Configuration(Protocol):
    """Entries by `config["data"]` and by `config.data`; OmegaConf's DictConfig and `VerlConfig` are such."""

    def __getitem__(self, name: str, /) -> Any: ...

    def __getattr__(self, name: str, /) -> Any: ...


class VerlConfig(dict[str, Any]):
    """A dictionary whose entries are attributes too, at every depth; it equals a plain one with the same entries."""

    def __init__(self, entries: JsonMapping | None = None) -> None:
        super().__init__({name: _wrapped(value) for name, value in (entries or {}).items()})

    def __setitem__(self, name: str, value: object) -> None:
        super().__setitem__(name, _wrapped(value))

    def update(self, entries: JsonMapping, /) -> None:  # type: ignore[override] # one form will do
        super().update(VerlConfig(entries))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(map(str, self)) or "nothing"
            raise AttributeError(f"The configuration has no '{name}' here; there is {known}.") from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value


def compose(config: JsonMapping | None = None) -> Configuration:
    """Our configuration with the user's values over it, which may be new ones.

    Raises:
        ConfigurationError: `config` is no mapping, or what verl and the user give does not go together.
    """
    given: object = {} if config is None else config  # OmegaConf's own objects are mappings too
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"config is {given!r:.80}; VERL takes a nested dictionary of verl's settings.")
    if not _is_installed("omegaconf"):
        return VerlConfig(_merged(_own(), given))
    omegaconf = importlib.import_module("omegaconf")
    try:
        defaults = _defaults_of_verl() if _is_installed("hydra") else None
        base = omegaconf.OmegaConf.create(_own()) if defaults is None else _over(defaults)
        omegaconf.OmegaConf.set_struct(base, False)  # noqa: FBT003 # OmegaConf's signature
        composed: Configuration = omegaconf.OmegaConf.merge(base, given)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigurationError(f"verl's configuration cannot be composed: {error}") from error
    return composed


def _own() -> JsonObject:
    """The file, less what is for Hydra."""
    text = files(_PACKAGE).joinpath(_FILE).read_text(encoding="utf-8")
    entries = importlib.import_module("yaml").safe_load(text)
    return {name: value for name, value in entries.items() if name not in ("hydra", "defaults")}


def _defaults_of_verl() -> Path | None:
    """The folder of verl's defaults, found without importing verl, which takes long; None if it is not installed."""
    found = importlib.util.find_spec("verl")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return next((folder for place in places if (folder := Path(place, *("trainer", "config"))).is_dir()), None)


def _over(defaults: Path) -> Any:
    """The file composed by Hydra over verl's defaults; a Hydra that the user has set up is as it was afterwards."""
    hydra = importlib.import_module("hydra")
    state = importlib.import_module("hydra.core.global_hydra").GlobalHydra.instance()
    before, state.hydra = state.hydra, None
    try:
        with (
            as_file(files(_PACKAGE).joinpath(_FILE)) as path,
            hydra.initialize_config_dir(version_base=None, config_dir=str(path.parent)),
        ):
            return hydra.compose(config_name=path.stem, overrides=[f"hydra.searchpath=['file://{defaults}']"])
    except hydra.errors.HydraException as error:
        raise ConfigurationError(f"The defaults of the installed verl cannot be composed: {error}") from error
    finally:
        importlib.import_module("hydra.core.global_hydra").GlobalHydra.instance().hydra = before


def _merged(base: JsonMapping, over: JsonMapping) -> JsonObject:
    """Both, level by level; where they differ, `over`."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[name] = _merged(below, value) if both else value  # type: ignore[arg-type] # both are mappings
    return result


def _wrapped(value: object) -> Any:
    if isinstance(value, Mapping):
        return VerlConfig(value)
    return [_wrapped(one) for one in value] if isinstance(value, list) else value


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# ---------------------------------------------------------------------- launch


class TaskRunnerHere:
    """verl's task runner as verl starts it, placed on the node of this program; it can be killed."""

    def __init__(self) -> None:
        self._options: JsonObject = {}
        self._actor: Any = None

    def options(self, **options: Any) -> "TaskRunnerHere":
        self._options = options
        return self

    def remote(self) -> Any:
        """Start it; verl calls this when Ray is initialised."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        node_id = importlib.import_module("ray").get_runtime_context().get_node_id()
        here = strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        task_runner = importlib.import_module("verl.trainer.main_ppo").TaskRunnerV1
        self._actor = task_runner.options(**self._options, scheduling_strategy=here).remote()
        return self._actor

    def kill(self) -> None:
        """End the training: who waits for it gets an error. Harmless before it has begun."""
        if self._actor is not None:
            importlib.import_module("ray").kill(self._actor)


def run_ppo(
    config: Configuration,
    train_dataset: Tasks | None,
    val_dataset: Tasks | None,
    store: LightningStore | None,
    llm_proxy: LLMProxy | None,
    adapter: TraceAdapter[Any] | None,
    *,
    initial_resources: NamedResources | None = None,
    run_id: str | None = None,
    task_runner: TaskRunnerHere | None = None,
) -> None:
    """Train with verl and return when it is done.

    Args:
        train_dataset: None takes the files that `data.train_files` names; so with `val_dataset` and `data.val_files`.
        store: None makes one and serves it to runners, at `agentlightning.port`.
        llm_proxy: Its address, port and key are taken; it is started in verl's process.
        task_runner: What another thread may kill.

    Raises:
        ConfigurationError: Packages or a GPU are missing, or the parts do not go together. Nothing was started.
        TrainingError: verl's training failed.
    """
    if adapter is not None and not isinstance(adapter, (TraceToTripletBase, TraceToTrajectory)):
        raise ConfigurationError(
            f"VERL learns from triplets or trajectories, but the adapter is a {type(adapter).__name__}; "
            "give the Trainer a TracerTraceToTriplet, a LlmProxyTraceToTriplet or a TraceToTrajectory."
        )
    if missing := missing_for_verl(config):
        *first, last = missing
        listed = f"{', '.join(first)} and {last}" if first else last
        raise ConfigurationError(
            f"VERL trains with verl on GPUs, and this machine lacks {listed}; run "
            f"`{install_command('verl')}` on a machine with NVIDIA GPUs. Nothing was started. GRPO trains without verl."
        )
    config = _with_attention(config)
    _check(config)
    if llm_proxy is not None:  # its settings: in verl's process it gets the store as that is reached there
        llm_proxy = copy.copy(llm_proxy)
        llm_proxy.store = None
    with _reachable(store, config) as served:
        parts = RunParts(served, adapter, llm_proxy, initial_resources, run_id)
        with run_folder(parts, train_dataset, val_dataset) as paths:
            _train(_with_paths(config, paths), task_runner or TaskRunnerHere())


def missing_for_verl(config: Configuration | None = None) -> list[str]:
    """What this machine lacks to run verl, in words; nothing is imported but torch, to ask for a GPU.

    A GPU of this machine is needed unless the configuration names another device, or a cluster of Ray to join.
    """
    missing = [
        f"the package {name}" for name in ("verl", "ray", "transfer_queue") if importlib.util.find_spec(name) is None
    ]
    if importlib.util.find_spec("torch") is None:
        return [*missing, "the package torch"]
    if not missing and config is not None:
        if config["trainer"]["device"] != "cuda" or _joins_cluster(config):
            return []
        if config["actor_rollout_ref"]["rollout"]["name"] == "vllm" and importlib.util.find_spec("vllm") is None:
            missing.append("the package vllm")
    return missing if importlib.import_module("torch").cuda.is_available() else [*missing, "a GPU that torch can use"]


def _joins_cluster(config: Configuration) -> bool:
    return config["ray_kwargs"]["ray_init"].get("address") not in (None, "local")


def _with_attention(config: Configuration) -> Configuration:
    """The configuration with an attention that this machine has.

    verl's default is flash-attn, which its extra `vllm` does not install: its workers would fail when all has started.
    torch's own attention needs padded batches. What the user chose stays, and so does all where the workers run on
    other machines.
    """
    if importlib.util.find_spec("flash_attn") is not None or _joins_cluster(config):
        return config
    config = copy.deepcopy(config)
    models = [model for part in ("actor_rollout_ref", "critic") if (model := config[part].get("model"))]
    is_fsdp = config["actor_rollout_ref"]["actor"]["strategy"].startswith("fsdp")
    changed = [model for model in models if is_fsdp and "attn_implementation" not in model["override_config"]]
    for model in changed:
        model["override_config"]["attn_implementation"], model["use_remove_padding"] = "sdpa", False
    if changed:
        logger.warning(
            "flash-attn is not installed, so the model learns with torch's own attention and padded batches, which is "
            "slower; install flash-attn, or set actor_rollout_ref.model.override_config.attn_implementation."
        )
    return config


def _check(config: Configuration) -> None:
    """Refuse what our agent loop cannot work with, and what verl itself refuses."""
    rollout = config["actor_rollout_ref"]["rollout"]
    for name, value, wanted in (
        ("trainer.use_v1", config["trainer"]["use_v1"], True),
        ("actor_rollout_ref.rollout.calculate_log_probs", rollout["calculate_log_probs"], True),
        ("actor_rollout_ref.rollout.multi_turn.enable", rollout["multi_turn"]["enable"], False),
    ):
        if value != wanted:
            raise ConfigurationError(f"{name} is {value}; VERL needs {wanted}. Leave it away. Nothing was started.")
    settings = importlib.import_module("verl.utils.config")
    needs = importlib.import_module("verl.trainer.ppo.utils")
    of_hydra = importlib.import_module("hydra.errors").HydraException
    of_omegaconf = importlib.import_module("omegaconf.errors").OmegaConfBaseException
    try:
        settings.validate_config(
            config=config,
            use_reference_policy=needs.need_reference_policy(config),
            use_critic=needs.need_critic(config),
        )
    except (AssertionError, ValueError, TypeError, of_hydra, of_omegaconf) as error:
        raise ConfigurationError(f"verl refuses the configuration, and nothing was started: {error}") from error


@contextmanager
def _reachable(store: LightningStore | None, config: Configuration) -> Iterator[LightningStore]:
    """The store in a form that another process finds again; what must be served is, for the length of the block."""
    if isinstance(store, LightningStoreServer):
        yield store
        return
    if store is not None and isinstance(innermost(store), LightningStoreClient):
        yield innermost(store)
        return
    if store is None:
        server = LightningStoreServer(InMemoryLightningStore(), port=config["agentlightning"]["port"])
    else:  # for verl's process alone
        server = LightningStoreServer(store, port=0, token=secrets.token_urlsafe(32))
    thread = LoopThread("agl-verl-store")
    try:
        thread.run(server.start())
        try:
            yield server
        finally:
            thread.run(server.stop())
    finally:
        thread.stop()


def _with_paths(config: Configuration, paths: dict[str, str]) -> Configuration:
    """The configuration that names what lies in the folder; without a data set for validation there is none."""
    config = copy.deepcopy(config)
    config["agentlightning"]["run_folder"] = paths["folder"]
    data, trainer = config["data"], config["trainer"]
    if "train" in paths:
        data["train_files"] = paths["train"]
        if "val" not in paths:  # verl makes the data set all the same
            data["val_files"], data["val_max_samples"] = paths["train"], 1
            trainer["val_before_train"], trainer["test_freq"] = False, -1
    if "val" in paths:
        data["val_files"] = paths["val"]
    return config


def _train(config: Configuration, task_runner: TaskRunnerHere) -> None:
    ray = importlib.import_module("ray")
    main = importlib.import_module("verl.trainer.main_ppo")
    importlib.import_module("verl.utils.device").auto_set_device(config)
    is_ours = not ray.is_initialized()
    try:
        main.run_ppo(config, task_runner_class=task_runner)
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise TrainingError(f"verl's training failed: {lines[-1] if lines else type(error).__name__}") from error
    finally:
        if is_ours:
            ray.shutdown()
