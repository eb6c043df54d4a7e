"""Calls to the routes of a vLLM that training needs; what an agent calls goes through the proxy instead."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import requests

from agentlightning.errors import EngineError

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
