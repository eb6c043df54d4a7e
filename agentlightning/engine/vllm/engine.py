"""A vLLM seen from training: it serves one model, and takes that model's new weights.

vLLM reports no version of its weights, so the entry for the proxy carries it and the proxy stamps the calls. An update
stands between `/pause?mode=keep` and `/resume`: calls in flight stand still, and go on with the new weights.

`VllmClient` calls the routes of a vLLM that training needs; what an agent calls goes through the proxy instead.
"""

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import requests

from agentlightning.engine.base import EngineRequest
from agentlightning.engine.embedded import ChildProgram
from agentlightning.engine.vllm.options import KEY_VARIABLE, LOOPBACK, ServerCommand, VllmOptions, check_installed
from agentlightning.errors import EngineError
from agentlightning.utils.child_process import ProgramPlan
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.log_failures import announce
from agentlightning.utils.server_launcher import is_loopback

if TYPE_CHECKING:
    import torch

    from agentlightning.engine.vllm.transfer import WeightTransfer
    from agentlightning.engine.weights import PublishedWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """Of any route."""

    status: int
    content: Any

    @property
    def message(self) -> str:
        """What an answer that is an error says."""
        error = self.content.get("error", self.content) if isinstance(self.content, dict) else self.content
        text = error.get("message", error) if isinstance(error, dict) else error
        return str(text)[:500]


@dataclass(frozen=True)
class Served:
    """What a server says it is; None where it does not say."""

    model: str
    """The name of the model beneath all adapters."""
    adapters: tuple[str, ...]
    is_dev: bool = True
    """Whether it has the routes for development."""
    dtype: str | None = None
    has_lora: bool | None = None
    max_lora_rank: int | None = None
    takes_weights: bool | None = None
    """Whether it has a `--weight-transfer-config`."""
    transfer: str | None = None
    """The backend that it names: ipc or nccl."""
    logprobs_mode: str | None = None
    can_sleep: bool | None = None
    workers: int = 1
    """Processes that share the model."""


class VllmClient:
    """Blocks; EngineError in words where vLLM refuses, or does not answer."""

    def __init__(self, root: str, api_key: str | None) -> None:
        self.root = root
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def request(self, method: str, path: str, content: Any = None, *, seconds: float = 300.0) -> Answer:
        """Whatever it answers; EngineError if it does not."""
        try:
            with requests.Session() as session:
                session.trust_env = False  # a proxy for the outside is none for a server nearby
                url = f"{self.root}{path}"
                response = session.request(method, url, json=content, headers=self._headers, timeout=seconds)
        except requests.RequestException as error:
            raise EngineError(f"vLLM at {self.root} does not answer {method} {path}: {error}") from error
        try:
            return Answer(response.status_code, response.json())
        except ValueError:
            return Answer(response.status_code, response.text)

    def post(self, path: str, content: Any = None) -> Any:
        return self._content("POST", path, {} if content is None else content)

    def get(self, path: str) -> Any:
        return self._content("GET", path)

    def _content(self, method: str, path: str, content: Any = None) -> Any:
        answer = self.request(method, path, content)
        if answer.status == requests.codes.unauthorized:
            raise EngineError(
                f"vLLM at {self.root} refuses the key; give the one it was started with as VLLM_API_KEY, or in "
                "VllmOptions(api_key=…)."
            )
        if answer.status != requests.codes.ok:
            raise EngineError(f"vLLM at {self.root} answers {method} {path} with {answer.status}: {answer.message}")
        return answer.content

    def is_healthy(self) -> bool:
        """False if it has ended, or says that its engine has; one that is too busy to say counts as well."""
        try:
            answer = self.request("GET", "/health", seconds=30.0)
        except EngineError as error:
            return isinstance(error.__cause__, requests.Timeout)
        return bool(answer.status == requests.codes.ok)

    # ------------------------------------------------------------------ what it is

    def served(self, name: str) -> Served:
        """What the server says of itself.

        Args:
            name: Preferred where it serves its model under several names.
        """
        models = self.get("/v1/models")["data"]
        names = [model["id"] for model in models if not model.get("parent")]
        adapters = tuple(model["id"] for model in models if model.get("parent"))
        model = name if name in names or not names else names[0]
        answer = self.request("GET", "/server_info?config_format=json")
        if answer.status == requests.codes.not_found:
            return Served(model, adapters, is_dev=False)
        config = answer.content.get("vllm_config") if isinstance(answer.content, dict) else None
        if answer.status != requests.codes.ok or not isinstance(config, dict):
            logger.warning("vLLM at %s does not say how it was started; that it fits is taken on trust.", self.root)
            return Served(model, adapters)
        own, lora = config.get("model_config") or {}, config.get("lora_config")
        transfer = config.get("weight_transfer_config")
        return Served(
            model=model,
            adapters=adapters,
            dtype=str(own["dtype"]).rpartition(".")[2] if own.get("dtype") else None,
            has_lora=lora is not None,
            max_lora_rank=None if lora is None else lora.get("max_lora_rank"),
            takes_weights=transfer is not None,
            transfer=None if transfer is None else transfer.get("backend"),
            logprobs_mode=own.get("logprobs_mode"),
            can_sleep=own.get("enable_sleep_mode"),
            workers=int(self.get("/get_world_size")["world_size"]),
        )

    # ------------------------------------------------------------------ what it does

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A block that replaces weights: calls in flight stand still in it, and go on after it, whatever happened."""
        self.post("/pause?mode=keep")
        try:
            yield
            self.reset_prefix_cache()
        except BaseException:
            try:
                self.post("/resume")
            except EngineError as error:  # the failure in the block is the one to tell
                logger.warning("After a failure, calls could not go on: %s", error)
            raise
        self.post("/resume")

    @contextmanager
    def updating_in_parts(self) -> Iterator[None]:
        """A block that sends weights through `/update_weights`; if it fails, they are incomplete until the next."""
        with self.updating():
            self.post("/start_weight_update", {"is_checkpoint_format": True})
            try:
                yield
            except BaseException:
                try:  # vLLM ends the update itself if it refused a part, and else waits for more
                    self.post("/finish_weight_update")
                except EngineError as error:
                    logger.debug("An update that failed needed no end: %s", error)
                raise
            self.post("/finish_weight_update")

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of the old weights, also of calls in flight: those are read again with the new ones.

        Without `reset_running_requests`, vLLM keeps the whole cache when a call is in flight, and says 200.
        """
        self.post("/reset_prefix_cache?reset_running_requests=true")


# ---------------------------------------------------------------------- vLLM as an engine


_MARKER: Final = "AGL_VLLM_ID"


class VllmEngine:
    """Starts a server, or joins the one at the address of its options."""

    def __init__(self, request: EngineRequest, options: VllmOptions) -> None:
        self._request = request
        self._options = options
        self._process: ChildProgram | None = None
        self._client: VllmClient | None = None
        self._key: str | None = None
        self._served: Served | None = None
        self._transfer: WeightTransfer | None = None
        self._adapter: str | None = None
        """The name of the newest."""
        self._version: int | None = None
        self._is_asleep = False

    # ------------------------------------------------------------------ life

    @property
    def address(self) -> str:
        """Where OpenAI's clients find it."""
        return f"{self._running().root}/v1"

    def start(self) -> None:
        """Serve, or join; EngineError in words where a server cannot be trained with."""
        if self._client is not None:
            raise EngineError("The vLLM of this engine runs already.")
        try:
            self._client = self._join() if self._options.root is not None else self._launch()
            self._served = self._client.served(self._request.name)
            self._check(self._served)
            self._prepare(self._client)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End a server of our own; one that was joined goes on, without what we brought."""
        client, self._client = self._client, None
        try:
            if self._process is None and client is not None and client.is_healthy():
                if self._is_asleep:
                    client.post("/wake_up")
                if self._transfer is not None:
                    self._transfer.undo()
        except EngineError as error:  # a failure here does not end a run
            logger.warning("The vLLM of this engine was not left as it was found: %s", error)
        finally:
            if self._transfer is not None:
                self._transfer.close()
            self._transfer = self._adapter = self._version = None
            self._is_asleep = False
            process, self._process = self._process, None
            if process is not None:
                process.stop()

    def is_running(self) -> bool:
        if self._client is None or (self._process is not None and not self._process.is_running()):
            return False
        return self._client.is_healthy()

    def status(self) -> JsonObject:
        """What it serves; EngineError with its last lines if it has ended."""
        client = self._running()
        if not self.is_running():
            if self._process is not None:
                raise self._process.ended()
            raise EngineError(f"The vLLM at {client.root} has ended, or its engine has; its own log says why.")
        version = client.get("/version")
        return {**version, "address": self.address, "model": self._model(), "weights_version": self._version}

    # ------------------------------------------------------------------ what it does

    def publish(self, version: int, weights: "PublishedWeights") -> None:
        """Sample from these weights; calls in flight go on with them."""
        self._running()
        self.wake()
        if self._transfer is None:
            self._transfer = self._new_transfer(weights.device)
        self._adapter = self._transfer.publish(version, weights)
        self._version = version

    def model_config(self) -> JsonObject:
        """Its entry in the model list of `LLMProxy`, with the version that the proxy stamps calls with."""
        parameters = {"model": f"hosted_vllm/{self._model()}", "api_base": self.address}
        if self._key is not None:
            parameters["api_key"] = self._key
        entry: JsonObject = {"model_name": self._request.name, "litellm_params": parameters}
        if self._version is not None:
            entry["model_info"] = {"version": self._version}
        return entry

    def sleep(self) -> None:
        """Give the GPU's memory to the learner, if the options say so."""
        if self._options.sleep and not self._is_asleep:
            self._is_asleep = True
            self._running().post("/sleep?level=1&mode=keep")

    def wake(self) -> None:
        """Take it again."""
        if self._is_asleep:
            self._running().post("/wake_up")
            self._is_asleep = False

    # ------------------------------------------------------------------ parts

    def _running(self) -> VllmClient:
        if self._client is None:
            raise EngineError("The vLLM of this engine is not running; start it first.")
        return self._client

    def _model(self) -> str:
        """What the server calls what agents talk with."""
        assert self._served is not None
        return self._adapter or self._served.model

    def _launch(self) -> VllmClient:
        request = self._request
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            port = free.getsockname()[1]
        self._key = self._options.api_key or secrets.token_urlsafe(32)
        client = VllmClient(f"http://{LOOPBACK}:{port}", self._key)
        command = ServerCommand(
            model=request.source,
            name=request.name,
            port=port,
            options=self._options,
            max_sequences=request.max_sequences,
            lora_rank=None if request.lora is None else request.lora.rank,
        )
        self._process = ChildProgram("vLLM", stop_seconds=15.0)
        environment = {**command.environment(self._key), _MARKER: secrets.token_hex()}
        announce(logger, f"vLLM loads '{request.source}', which takes a minute or two.")
        with open(os.devnull, "rb") as nothing:
            plan = ProgramPlan(command=command.words(), env=environment, marker=_MARKER, stdin=nothing)
            self._process.start(plan, secrets=(self._key,))
        self._process.await_ready(client.is_healthy, seconds=1200.0, poll_seconds=0.2)
        return client

    def _join(self) -> VllmClient:
        root = self._options.root
        assert root is not None
        self._key = self._options.api_key or os.environ.get(KEY_VARIABLE) or None
        client = VllmClient(root, self._key)
        if not client.is_healthy():
            raise self._refusal(f"No vLLM answers at {root}")
        return client

    def _check(self, served: Served) -> None:
        """EngineError, with the command to start another, for a server that cannot be trained with."""
        rank, root = None if self._request.lora is None else self._request.lora.rank, self._running().root
        problems = {
            "has no routes for new weights (VLLM_SERVER_DEV_MODE=1)": not served.is_dev,
            f"gives {served.logprobs_mode}, which are wrong at temperatures other than 1": served.logprobs_mode
            not in (None, "processed_logprobs"),
            "has --enable-lora, and full weights would end it": rank is None and served.has_lora,
            "has no --weight-transfer-config": rank is None and served.takes_weights is False,
            f"takes weights by {served.transfer}, not by {self._options.transfer}": rank is None
            and self._options.transfer in ("ipc", "nccl")
            and served.transfer not in (None, self._options.transfer),
            "takes no adapters (--enable-lora)": rank is not None and served.has_lora is False,
            f"takes adapters up to rank {served.max_lora_rank}, not {rank}": rank is not None
            and served.max_lora_rank is not None
            and rank > served.max_lora_rank,
            "cannot sleep (--enable-sleep-mode)": self._options.sleep and served.can_sleep is False,
        }
        for problem, is_there in problems.items():
            if is_there:
                raise self._refusal(f"vLLM at {root} {problem}")

    def _refusal(self, reason: str) -> EngineError:
        rank = "" if self._request.lora is None else f" --lora-rank {self._request.lora.rank}"
        port = urlsplit(self._options.address or "").port
        place = "" if port is None else f" --port {port}"
        sleep = " --sleep" if self._options.sleep else ""
        transfer = " --transfer nccl" if self._options.transfer == "nccl" else ""
        command = f"agl vllm {self._request.source} --name {self._request.name}{place}{rank}{sleep}{transfer}"
        return EngineError(f"{reason}; start one that training can use with `{command}`.")

    def _prepare(self, client: VllmClient) -> None:
        """Undo what a training that was killed may have left."""
        assert self._served is not None
        if self._options.root is not None:
            if self._served.can_sleep and client.get("/is_sleeping")["is_sleeping"]:
                client.post("/wake_up")
            if client.get("/is_paused")["is_paused"]:
                client.post("/resume")

    def _new_transfer(self, device: "torch.device") -> "WeightTransfer":
        """The way from the learner's device to the server."""
        import torch

        from agentlightning.engine.vllm.transfer import AdapterTransfer, FolderTransfer, IpcTransfer, NcclTransfer

        client, served, way = self._running(), self._served, self._options.transfer
        assert served is not None
        if self._request.lora is not None:
            return AdapterTransfer(client, self._request.name, served.adapters)
        is_on_gpu = device.type == "cuda"
        if way in ("ipc", "nccl") and not is_on_gpu:
            raise EngineError(f"transfer='{way}' needs a learner on a GPU, and it is on '{device}'; use 'folder'.")
        dtype = getattr(torch, served.dtype or "bfloat16")
        if way == "nccl" or (way == "auto" and is_on_gpu and served.transfer == "nccl"):
            check_installed()  # the learner's side of it is vLLM's too
            if (device.index or 0) in self._options.gpus:
                raise EngineError(
                    f"gpus={list(self._options.gpus)} names the learner's GPU, and NCCL connects different ones; name "
                    "others, or none to share that one."
                )
            return NcclTransfer(client, dtype, device, workers=served.workers)
        is_near = is_loopback(urlsplit(client.root).hostname or "") and served.workers == 1
        if way == "ipc" or (way == "auto" and is_near and is_on_gpu and not device.index):
            client.post("/init_weight_transfer_engine", {"init_info": {}})
            return IpcTransfer(client, dtype)
        logger.info("Weights travel to vLLM as a folder: the learner is on '%s'.", device)
        return FolderTransfer(client, dtype, self._request.source)
