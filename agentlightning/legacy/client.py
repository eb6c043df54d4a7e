"""AgentLightningClient: the worker's side of the v0.1 protocol, for synchronous and asynchronous code.

Every operation is written once, synchronously; its asynchronous form runs it in a thread. A server that cannot be
reached, refuses, or answers nonsense makes an operation return None and leaves a line in the log; nothing of that is
raised. Results are sent several times before they are given up.
"""

import asyncio
import inspect
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import quote, urljoin, urlsplit
from weakref import WeakValueDictionary

import requests
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python
from typing_extensions import Self

from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError, InvalidTransition, StoreError, StoreUnavailable
from agentlightning.legacy.results import as_rollout, is_report, rollout_from_result
from agentlightning.types import ResourcesUpdate, RolloutLegacy, RolloutMode, Task, TaskIfAny, TaskInput
from agentlightning.utils.deadline import until
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.json_values import JsonMapping, JsonObject
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import run_in_loop
from agentlightning.utils.once import fork_handlers

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)
OptionsT = ParamSpec("OptionsT")
ResultT = TypeVar("ResultT")
Callback = Callable[[ResourcesUpdate], object]
"""Is called with new resources; if it returns something awaitable, that is awaited."""

RESOURCES_THREAD: Final = "agl-legacy-resources"
RESULT_TRIES: Final = 5
"""How often a result is sent to a server that does not answer, with the poll interval in between."""
_NOT_FOUND: Final = 404
_FAILURES: Final = {410: StoreError, 502: StoreUnavailable, 503: StoreUnavailable, 504: StoreUnavailable}
"""By status: a server of another kind, which will never have a task, and one that is starting, or behind a gateway."""

_POLLED: ContextVar[tuple[tuple[str, ...], Task | None]] = ContextVar("agentlightning_polled", default=((), None))
"""Ids of the tasks that were polled here, and the last of them, of which a caller may hold no more than the input."""


def _in_thread(
    operation: Callable[Concatenate[Any, OptionsT], ResultT],
) -> Callable[Concatenate[Any, OptionsT], Coroutine[Any, Any, ResultT]]:
    """The asynchronous form of an operation, also of one that a subclass overrides."""

    async def run(client: Any, /, *args: OptionsT.args, **kwargs: OptionsT.kwargs) -> ResultT:
        return await asyncio.to_thread(getattr(client, operation.__name__), *args, **kwargs)

    run.__doc__ = f"As `{operation.__name__}`."
    return run


class AgentLightningClient:
    """Fetches tasks and resources from an `AgentLightningServer` and posts results. New code uses a store client."""

    _warning_stacklevel: ClassVar[int] = 3
    """Where the construction warning points: at the caller of `__init__`."""
    _has_server: ClassVar[bool] = True
    """Whether the endpoint is an address that requests are sent to."""
    _closed: threading.Event
    _newest: Task | None
    """Kept alive, for whoever polled it may be gone, as the task of `asyncio.wait_for`."""

    def __init__(
        self, endpoint: str, poll_interval: float = 5.0, timeout: float = 10.0, *, token: str | None = None
    ) -> None:
        """Make a client; nothing is sent yet.

        Args:
            endpoint: Address of the server; a path in it is ignored.
            poll_interval: Seconds between two polls for a task, and between two tries to deliver a result.
            timeout: Seconds one request may take.
            token: What the server asks for; by default the environment's `AGL_STORE_TOKEN`.
        """
        deprecated(
            "AgentLightningClient speaks the v0.1 protocol, which is deprecated; use LightningStoreClient.",
            stacklevel=self._warning_stacklevel,
        )
        if self._has_server:
            _check_address(endpoint)
        self.endpoint = endpoint
        self.poll_interval = poll_interval
        self.timeout = timeout
        self.task_count = 0
        self._resource_cache: dict[str, ResourcesUpdate] = {}
        self._default_headers = {"X-AgentLightning-Client": "true"}
        if shown := resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, token):
            self._default_headers["Authorization"] = f"Bearer {shown}"
        self._set_up()

    # ------------------------------------------------------------------ operations

    def poll_next_task(self, timeout: float | None = None) -> Task | None:
        """Wait until the server has a task, and claim it; None if the client is closed meanwhile.

        Args:
            timeout: Seconds after which the wait ends with None; 0 asks once, None waits for ever. A request that is
                under way then is not cut short, for its answer may be a claimed task.
        """
        pauses = self._pauses(timeout)
        while (task := self._claim()) is None and (pause := next(pauses, 0.0)) > 0.0:
            self._closed.wait(pause)
        return self._polled(task)

    async def poll_next_task_async(self, timeout: float | None = None) -> Task | None:
        """As `poll_next_task`; no thread is taken while it waits."""
        pauses = self._pauses(timeout)
        while (task := await asyncio.to_thread(self._claim)) is None and (pause := next(pauses, 0.0)) > 0.0:
            # A coroutine that pauses looks every so often whether the client was closed.
            await until(self._closed.is_set, timeout_seconds=pause, interval_seconds=0.05)
        return self._polled(task)

    def submit_task(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: JsonObject | None = None,
    ) -> str | None:
        """Have the server queue a task; the id of its rollout, or None if that failed."""
        row = {"sample": sample, "mode": mode, "resources_id": resources_id, "metadata": metadata}
        return (self._exchange("/task", row) or {}).get("rollout_id")

    submit_task_async = _in_thread(submit_task)

    def submit_tasks(
        self, samples: Sequence[TaskInput], mode: RolloutMode | None = None, resources_id: str | None = None
    ) -> list[str] | None:
        """Have the server queue several tasks in one request; the ids of their rollouts, or None if that failed."""
        rows = [{"sample": sample, "mode": mode, "resources_id": resources_id} for sample in samples]
        return (self._exchange("/tasks", rows) or {}).get("rollout_ids")

    submit_tasks_async = _in_thread(submit_tasks)

    def get_resources_by_id(self, resource_id: str | None) -> ResourcesUpdate | None:
        """Resources by their id, asked for once; None if they cannot be had, or if the id is None.

        A task that names no resources takes the latest there are: `get_latest_resources`.
        """
        if resource_id is None or resource_id in self._resource_cache:
            return None if resource_id is None else self._resource_cache[resource_id]
        return self._resources(quote(resource_id, safe=""))

    get_resources_by_id_async = _in_thread(get_resources_by_id)

    def get_latest_resources(self) -> ResourcesUpdate | None:
        """What was published last, asked for each time; None if it cannot be had."""
        return self._resources("latest")

    get_latest_resources_async = _in_thread(get_latest_resources)

    def on_resources_update(self, callback: Callback) -> Callback:
        """Have a function called with the latest resources: with the present ones first, then whenever they change.

        The server is asked at every poll interval. The function is called from a thread of its own, which ends after a
        `close`. Can be used as a decorator.
        """
        threading.Thread(target=self._follow_resources, args=[callback], name=RESOURCES_THREAD, daemon=True).start()
        return callback

    def post_rollout(self, rollout: RolloutLegacy | JsonMapping | object) -> JsonObject | None:
        """Report a result; the server's acknowledgement, or None if it was refused or could not be delivered.

        A result is a `RolloutLegacy`, a mapping of its fields with the `rollout_id` among them, or what an agent
        returned for the task that the same thread or asyncio task polled: see `rollout_from_result`. Who holds several
        tasks names one by `rollout_from_result(task, result)`; a bare result is refused then with InvalidTransition.

        A server that does not answer is tried several times; a result that is lost all the same leaves a warning.
        """
        result = as_rollout(rollout) if is_report(rollout) else rollout_from_result(self._open_task(rollout), rollout)
        return self._deliver([result], is_batch=False)

    post_rollout_async = _in_thread(post_rollout)

    def post_rollouts(self, rollouts: Sequence[RolloutLegacy | JsonMapping]) -> JsonObject | None:
        """Report several results, each with its id, in one request."""
        return self._deliver([as_rollout(rollout) for rollout in rollouts], is_batch=True)

    post_rollouts_async = _in_thread(post_rollouts)

    # ------------------------------------------------------------------ tasks and results

    def _pauses(self, timeout: float | None) -> Iterator[float]:
        """Seconds until the next poll, until the client is closed; none above zero when the time is over."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while not self._closed.is_set():
            yield min(self.poll_interval, ends - time.monotonic())

    def _claim(self) -> Task | None:
        """Ask for a task once."""
        offer = _checked(TaskIfAny, self._request_json("/task"))
        return offer.task if offer is not None and offer.is_available else None

    def _polled(self, task: Task | None) -> Task | None:
        if task is not None:
            self.task_count += 1
            self._open_tasks[task.rollout_id] = self._newest = task
            earlier = [rollout_id for rollout_id in _POLLED.get()[0] if rollout_id in self._open_tasks]
            _POLLED.set(((*earlier, task.rollout_id), task))
            logger.debug("Task %s polled from %s.", task.rollout_id, self.endpoint)
        return task

    def _open_task(self, result: object) -> Task:
        """The task that a bare result belongs to: the one polled in the same thread or asyncio task, else the only one.

        Nothing but an id tells several apart; a task that the caller has dropped does not count. InvalidTransition if
        there is none, or more than one.
        """
        by_id = dict(self._open_tasks)
        tasks = [by_id[rollout_id] for rollout_id in set(_POLLED.get()[0]) if rollout_id in by_id] or [*by_id.values()]
        if len(tasks) == 1:
            return tasks[0]
        which = f"may belong to any of {len(tasks)} polled tasks" if tasks else "belongs to no task that was polled"
        raise InvalidTransition(
            f"post_rollout was given a {type(result).__name__}, which {which}; name the task with "
            "rollout_from_result(task, result)."
        )

    def _deliver(self, rollouts: Sequence[RolloutLegacy], *, is_batch: bool) -> JsonObject | None:
        """Send results, several times to a server that does not answer; they may arrive twice without harm."""
        rows = [rollout.model_dump(mode="json") for rollout in rollouts]
        ids = [rollout.rollout_id for rollout in rollouts]
        path, payload = ("/rollouts", rows) if is_batch else ("/rollout", rows[0])
        answer = self._exchange(path, payload, tries=RESULT_TRIES, lost=f"The result of {', '.join(ids)} ")
        for rollout_id in ids if answer is not None else ():
            self._open_tasks.pop(rollout_id, None)
            logger.debug("Result of rollout %s posted to %s.", rollout_id, self.endpoint)
        return answer

    # ------------------------------------------------------------------ resources

    def _resources(self, name: str) -> ResourcesUpdate | None:
        update = _checked(ResourcesUpdate, self._request_json(f"/resources/{name}"))
        if update is not None:
            self._resource_cache[update.resources_id] = update
            logger.debug("Resources %s received from %s.", update.resources_id, self.endpoint)
        return update

    def _follow_resources(self, callback: Callback) -> None:
        seen: tuple[str, int] | None = None
        while not self._closed.is_set():
            latest = self.get_latest_resources()
            if latest is not None and (latest.resources_id, latest.version) != seen and not self._closed.is_set():
                seen = latest.resources_id, latest.version
                with log_failures(logger, "A callback failed for resources %s.", latest.resources_id):
                    result = callback(latest)
                    if inspect.isawaitable(result):
                        run_in_loop(result, "agl-legacy-callback")
            self._closed.wait(self.poll_interval)

    # ------------------------------------------------------------------ requests

    def _request_json(self, url: str) -> JsonObject | None:
        return self._exchange(url)

    _request_json_async = _in_thread(_request_json)

    def _post_json(self, url: str, payload: JsonObject | list[JsonObject]) -> JsonObject | None:
        return self._exchange(url, payload)

    _post_json_async = _in_thread(_post_json)

    def _exchange(
        self, url: str, payload: JsonObject | list[JsonObject] | None = None, *, tries: int = 1, lost: str = ""
    ) -> JsonObject | None:
        """Send a request, a GET without a payload; None, and a line in the log, if that fails.

        A failed question is a warning once, until the server answers again; anything else is one each time.

        Args:
            url: An address, or a path of the server.
            tries: How often it is sent to a server that does not answer.
            lost: What is lost if it fails, for the log.
        """
        failure = ""
        for number in range(1, tries + 1):
            try:
                answer = self._send(urljoin(self.endpoint, url), payload)
            except StoreUnavailable as error:
                failure = f"{lost and f'{lost}could not be delivered after {number} tries and is lost: '}{error}"
                if number == tries or self._closed.wait(self.poll_interval):
                    break
            except ValueError as error:
                failure = f"{lost and f'{lost}is lost: '}{error}"
                break
            else:
                self._is_in_trouble = False
                return answer
        is_known = payload is None and (self._is_in_trouble or self._closed.is_set())
        self._is_in_trouble = self._is_in_trouble or payload is None
        logger.log(logging.DEBUG if is_known else logging.WARNING, "%s", failure)
        return None

    def _send(self, url: str, payload: JsonObject | list[JsonObject] | None) -> JsonObject | None:
        """The JSON object of an answer; StoreUnavailable if it may come later, ValueError if it is another.

        StoreError of a server that does not speak this protocol.
        """
        if self._closed.is_set():
            raise StoreUnavailable("This client is closed; make a new one.")
        method = "GET" if payload is None else "POST"
        headers = self._default_headers | ({} if payload is None else {"Content-Type": "application/json"})
        body = None if payload is None else json.dumps(to_jsonable_python(payload)).encode()
        try:
            answer = self._session.request(method, url, data=body, headers=headers, timeout=self.timeout)
        except (requests.RequestException, ValueError) as error:
            raise StoreUnavailable(f"{method} {url} got no answer: {str(error) or type(error).__name__}") from error
        # The beginning of a refusal is logged.
        detail = answer.content[:1000].decode(errors="replace")
        if answer.status_code == _NOT_FOUND and urlsplit(url).path.startswith("/resources"):
            logger.debug("%s %s: %s", method, url, detail)  # there are none, which is an answer
            return None
        if not answer.ok:
            kind = _FAILURES.get(answer.status_code, ValueError)
            raise kind(f"{method} {url} was refused with {answer.status_code}: {detail}")
        value: object = json.loads(answer.content or b"null")
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{method} {url} was answered with no JSON object: {detail}")
        return value

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """End callbacks, wake whoever polls, and close all connections; the client cannot be used afterwards."""
        self._closed.set()
        self._session.close()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> JsonObject:
        """Address and settings travel to another process; connections, callbacks and open tasks stay behind."""
        own = ("_closed", "_session", "_is_in_trouble", "_open_tasks", "_newest")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: JsonObject) -> None:
        self.__dict__.update(state)
        self._set_up()

    def _set_up(self) -> None:
        """Make what a copy in another process needs anew."""
        self._is_in_trouble = False
        self._closed = threading.Event()
        self._open_tasks: WeakValueDictionary[str, Task] = WeakValueDictionary()
        self._newest = None
        self._connect()
        fork_handlers().add(self, AgentLightningClient._connect)

    def _connect(self) -> None:
        """Open connections of this process; in a forked child, the parent goes on using its own."""
        self._session = requests.Session()


def _check_address(endpoint: str) -> None:
    """Refuse what is no address of a server, before it is asked in vain."""
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:  # brackets that do not match, or a port beyond the last one
        is_address = False
    if not is_address:
        bare = "" if "://" in endpoint else endpoint.lstrip("/")
        raise ConfigurationError(
            f"'{endpoint}' is not the address of a v0.1 server; it must begin with http:// or https:// and name a "
            f"host, for example http://{bare or '127.0.0.1:8000'}."
        )


def _checked(model: type[ModelT], answer: JsonObject | None) -> ModelT | None:
    """An answer as what it should be; None, and a line in the log, if it is something else."""
    try:
        return None if answer is None else model.model_validate(answer)
    except ValidationError as error:
        logger.debug("The server's answer is not a valid %s: %s", model.__name__, error)
        return None
