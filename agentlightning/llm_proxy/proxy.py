"""LLMProxy: a gateway to models that records every call under its rollout and attempt.

It runs in a thread of its own. `start`, `stop` and `restart` do their work when they are called, and return something
that may be awaited, so that code written for a plain or an asynchronous proxy runs.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, Literal
from urllib.parse import quote

from typing_extensions import NotRequired, TypedDict

from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.attribution import Authenticator
from agentlightning.llm_proxy.backends import DEFAULT_DEADLINE_SECONDS, backend_of
from agentlightning.llm_proxy.budgets import Budget, Budgets
from agentlightning.llm_proxy.gateway import Gateway, GatewaySettings
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM, ProxyLLM
from agentlightning.types.records import CURRENT_RUN
from agentlightning.types.resources import derive_attempt_key
from agentlightning.utils.loop_thread import LoopThread
from agentlightning.utils.once import fork_handlers, once
from agentlightning.utils.server_launcher import is_loopback
from agentlightning.utils.spelling import suggests_arguments

logger = logging.getLogger(__name__)

_LOCALHOST: Final = "127.0.0.1"
_EVERYWHERE: Final = ("0.0.0.0", "::")
_CALLBACKS: Final = ("return_token_ids", "logprobs", "opentelemetry")


@once
def _active() -> "list[LLMProxy]":
    """The proxy of this process; empty before the first start."""
    return []


def get_active_llm_proxy() -> "LLMProxy":
    """The proxy that was started last in this process; ValueError if there was none."""
    if not _active():
        raise ValueError("No LLM proxy was started in this process; create an LLMProxy and call its start().")
    return _active()[0]


def set_active_llm_proxy(proxy: "LLMProxy") -> None:
    """Make it the proxy of this process."""
    _active()[:] = [proxy]


class ModelConfig(TypedDict):
    """One entry of the list of models, as LiteLLM writes it."""

    model_name: str
    litellm_params: dict[str, Any]
    model_info: NotRequired[dict[str, Any]]
    """What is known of the backend: `version`, `resources_id`, `overrides`, `gives_token_ids`, `gives_logprobs`,
    `dialects`."""


class _Done:
    """Work that is done, or that a thread does in the background; to be awaited or not."""

    def __init__(self, work: threading.Thread | None = None) -> None:
        self._work = work

    def __await__(self) -> Generator[object, None, None]:
        if self._work is not None:
            yield from asyncio.to_thread(self._work.join).__await__()


@suggests_arguments
class LLMProxy:
    """A gateway to models.

    Args:
        port: None or 0 takes a free one, which `port` tells once it runs.
        model_list: Backends, in LiteLLM's form: `[{"model_name": "m", "litellm_params": {"model": "hosted_vllm/m",
            "api_base": "http://127.0.0.1:8000/v1"}}]`. Several entries of one name share its calls.
        store: Where calls are recorded; may be set later.
        host: Address to bind; None is this machine only.
        litellm_config: Of its settings, `litellm_settings.num_retries` and `.request_timeout` are heeded.
        num_retries: How often a call that failed before its answer began is tried again.
        callbacks: Names of what is asked of backends besides the answer: "return_token_ids", "logprobs". Both, where
            the backend can give them, if left out.
        middlewares: ASGI middlewares around the gateway, as functions of an application. Names of middlewares
            are accepted and ignored: what they stand for is always there.
        api_key: If set, only those are served who show it, or the key of an attempt that runs.
        access_host: Address in the endpoints of agents; by default the bound one.
        rollout_budget: What each rollout may spend; then calls of no rollout that runs need the `api_key`.
        run_budget: What all calls together may spend.
        deadline_seconds: How long a call may wait for its answer to begin, retries included; by default the
            `request_timeout` of `litellm_config`, or 600.
        replay: Answer calls that an earlier attempt of the rollout made from the record; see `llm_proxy.replay`.
        raw_spans: Also store the bodies of each call as they were sent and received, in a span `raw_gen_ai_request`
            beneath the call's. A proxy that replays needs them, and stores them always.
        max_request_bytes: Larger requests are refused.
        max_response_bytes: Larger answers of backends are cut off.
    """

    _run_id: str | None = None  # of the run that started it, and will stop it

    def __init__(
        self,
        port: int | None = None,
        model_list: Sequence[ModelConfig] | None = None,
        store: LightningStore | None = None,
        host: str | None = None,
        litellm_config: Mapping[str, Any] | None = None,
        num_retries: int = 0,
        _add_return_token_ids: bool = True,
        *,
        num_workers: int = 1,
        launch_mode: Literal["asyncio", "thread", "mp"] = "thread",
        launcher_args: Any = None,
        middlewares: Sequence[str | Callable[[Any], Any]] | None = None,
        callbacks: Sequence[str] | None = None,
        api_key: str | None = None,
        access_host: str | None = None,
        rollout_budget: Budget | None = None,
        run_budget: Budget | None = None,
        deadline_seconds: float | None = None,
        replay: bool = False,
        raw_spans: bool = False,
        max_request_bytes: int = GatewaySettings.max_request_bytes,
        max_response_bytes: int = GatewaySettings.max_response_bytes,
    ) -> None:
        self.port = port or 0
        self.model_list: list[ModelConfig] = list(model_list or [])
        self.store = store
        self.host = host or _LOCALHOST
        self.access_host = access_host
        litellm_settings = {"num_retries": num_retries, **((litellm_config or {}).get("litellm_settings") or {})}
        self.litellm_config: dict[str, Any] = {**(litellm_config or {}), "litellm_settings": litellm_settings}
        self.num_retries = num_retries
        self.api_key = api_key
        self._authenticator = Authenticator(api_key)
        _check_names("middleware", middlewares or (), ("rollout_attempt", "stream_conversion", "message_inspection"))
        default_deadline = litellm_settings.get("request_timeout", DEFAULT_DEADLINE_SECONDS)
        _check_names("callback", callbacks or (), _CALLBACKS)
        self._settings = GatewaySettings(
            authenticator=self._authenticator,
            budgets=Budgets(rollout_budget, run_budget),
            deadline_seconds=float(default_deadline if deadline_seconds is None else deadline_seconds),
            num_retries=int(litellm_settings["num_retries"]),
            replays=replay,
            raw_spans=raw_spans or replay,
            middlewares=[one for one in middlewares or () if not isinstance(one, str)],
            max_request_bytes=max_request_bytes,
            max_response_bytes=max_response_bytes,
            asks_for_ids=_add_return_token_ids and (callbacks is None or "return_token_ids" in callbacks),
            asks_for_logprobs=callbacks is None or "logprobs" in callbacks,
        )
        self._last_status: dict[str, object] = {}
        self._reset()
        _check_models(self.model_list)
        if num_workers != 1 or launch_mode != "thread" or launcher_args is not None:
            logger.debug("The proxy runs in one thread; num_workers, launch_mode and launcher_args change nothing.")
        if not is_loopback(self.host) and api_key is None:
            logger.warning(
                "The LLM proxy will listen on %s and serve everybody who reaches it; give it an api_key.", self.host
            )

    def _reset(self) -> None:
        self._starting = threading.RLock()  # protects what follows
        self._running: tuple[Gateway, LoopThread] | None = None
        self._stopping: threading.Thread | None = None
        self._parents: object = None

    # ------------------------------------------------------------------ store, port, models

    def get_store(self) -> LightningStore | None:
        return self.store

    def set_store(self, store: LightningStore) -> None:
        """Record in another store; a proxy that runs is restarted for it."""
        if store is self.store:
            return
        self.store = store
        if self.is_running():
            self.restart()

    def update_port(self, port: int) -> None:
        """Takes effect with the next start."""
        self.port = port

    def update_model_list(self, model_list: Sequence[ModelConfig]) -> None:
        """Replace all backends; no call is dropped: those in flight finish where they are."""
        _check_models(model_list)
        with self._starting:
            self.model_list = list(model_list)
            if self._running is not None and self.is_running():
                gateway, thread = self._running
                thread.run(gateway.replace_models(self.model_list))

    # ------------------------------------------------------------------ life

    def is_running(self) -> bool:
        """Whether it serves; a forked child has the object, and serves nothing."""
        running = self._running
        return running is not None and running[0].is_serving

    def initialize(self) -> None:
        """Make this the proxy of the process; ValueError without a store."""
        if self.store is None:
            raise ConfigurationError("The LLM proxy has no store to record in; give it one, or call set_store.")
        set_active_llm_proxy(self)

    def start(self) -> _Done:
        """Serve, from when this returns; a proxy that runs is restarted. RuntimeError if the port is taken."""
        with self._starting:
            closing = None
            if self._running is not None:
                gateway, thread = self._running
                try:
                    thread.run(gateway.stop_serving())  # which frees the port
                finally:
                    closing = self._shut_down()
            else:
                self._run_id = CURRENT_RUN.get()
            self._await_stop()
            self.initialize()
            thread = LoopThread("agl-llm-proxy")
            try:
                gateway = thread.run(self._started())
            except BaseException:
                thread.stop()
                raise
            self._running = gateway, thread
            fork_handlers().add(self, LLMProxy._leave_to_parent)
            self.port = gateway.port
        return _Done(closing)

    async def _started(self) -> Gateway:
        assert self.store is not None
        gateway = Gateway(self._settings, self.store, self.model_list, host=self.host, port=self.port)
        await gateway.start()
        return gateway

    def stop(self) -> _Done:
        """Finish the calls in flight, store what they left, and stop. Calls get a few seconds to finish.

        Within a running event loop that goes on in the background, since the store may need the loop: await the result.
        """
        with self._starting:
            if self._running is None:
                logger.warning("The LLM proxy is not running, so there is nothing to stop.")
                return _Done(self._stopping)
            self._await_stop()
            self._stopping = self._shut_down()
            return _Done(self._stopping)

    def restart(self, *, _port: int | None = None) -> _Done:
        """Stop and start again, on another port if one is named; it serves when this returns."""
        with self._starting:
            if _port is not None:
                self.update_port(_port)
            return self.start()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all answered calls are stored; False if that took too long."""
        with self._starting:
            running = self._running
        if running is None or not self.is_running():
            return True
        gateway, thread = running
        return thread.run(gateway.recorder.flush(timeout=timeout))

    def status(self) -> dict[str, Any]:
        """Backends, calls and budgets, as the route `/agl/status` reports them.

        Of one that has stopped, the last state; empty before it has run.
        """
        with self._starting:
            if self._running is None or not self.is_running():
                return dict(self._last_status)
            gateway, thread = self._running
            return thread.run(gateway.reported_status())

    def _shut_down(self) -> threading.Thread | None:
        """Close at once; where the caller is a running loop, which the store may need, in a thread that is returned."""
        assert self._running is not None
        gateway, thread = self._running
        self._running = None

        def close() -> None:
            try:
                thread.run(gateway.close())
            finally:
                thread.stop()
                self._last_status = gateway.status()

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            close()
            return None
        closing = threading.Thread(target=close, name="agl-llm-proxy-stop")
        closing.start()
        return closing

    def _await_stop(self) -> None:
        if self._stopping is not None:
            self._stopping.join()
            self._stopping = None

    def __getstate__(self) -> dict[str, object]:
        """Another process gets the configuration; what runs, runs here."""
        left_out = {"_starting", "_running", "_stopping", "_parents"}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._reset()

    def _leave_to_parent(self) -> None:
        """Called in a forked child: it does not run here."""
        parents = self._running, self._stopping, self._parents
        self._reset()
        self._parents = parents  # kept, since clearing them away would close connections of the parent

    # ------------------------------------------------------------------ resources

    @property
    def endpoint(self) -> str:
        """The address for agents; ValueError as long as the port is not known."""
        if not self.port:
            raise ConfigurationError("The LLM proxy takes a free port when it starts; start it first, or name a port.")
        host = self.access_host or (_LOCALHOST if self.host in _EVERYWHERE else self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def attempt_key(self, rollout_id: str, attempt_id: str, agent: str | None = None) -> str:
        """An API key that stands for an attempt, for clients that cannot take its path."""
        return derive_attempt_key(self._authenticator.secret, rollout_id, attempt_id, agent)

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, object] | None = None,
        *,
        agent: str | None = None,
    ) -> LLM:
        """The proxy as a resource: for all attempts, or with both ids for one."""
        model = model or self._only_model()
        parameters = dict(sampling_parameters or {})
        if rollout_id is None and attempt_id is None:
            key = self._authenticator.secret if self.api_key is not None else None
            return ProxyLLM(
                endpoint=self.endpoint,
                model=model,
                sampling_parameters=parameters,
                api_key=key,
                run_id=self._run_id,
            )
        if rollout_id is None or attempt_id is None:
            raise ValueError("Give both rollout_id and attempt_id, or neither.")
        path = f"/rollout/{quote(rollout_id, safe='')}/attempt/{quote(attempt_id, safe='')}"
        path += "" if agent is None else f"/agent/{quote(agent, safe='')}"
        key = self.attempt_key(rollout_id, attempt_id, agent) if self.api_key is not None else None
        return LLM(endpoint=self.endpoint + path, model=model, sampling_parameters=parameters, api_key=key)

    def _only_model(self) -> str:
        names = {entry["model_name"] for entry in self.model_list}
        if len(names) == 1:
            return names.pop()
        found = f"has several models ({', '.join(sorted(names))})" if names else "has no models"
        raise ValueError(f"The LLM proxy {found}; say which with model=.")


def _check_models(model_list: Sequence[ModelConfig]) -> None:
    for number, entry in enumerate(model_list):
        backend_of(entry, number)


def _check_names(kind: str, given: Sequence[object], known: Sequence[str]) -> None:
    for name in given:
        if isinstance(name, str) and name not in known:
            raise ConfigurationError(f"There is no {kind} '{name}'; known are {', '.join(known)}.")
