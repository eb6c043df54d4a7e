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
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote, urljoin, urlsplit
from weakref import WeakKeyDictionary, ref

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

Json = dict[str, Any]
ModelT = TypeVar("ModelT", bound=BaseModel)
OptionsT = ParamSpec("OptionsT")
ResultT = TypeVar("ResultT")
Callback = Callable[[ResourcesUpdate], object]
"""Is called with new resources; if it returns something awaitable, that is awaited."""

RESOURCES_THREAD = "agl-legacy-resources"
RESULT_TRIES = 5
"""How often a result is sent to a server that does not answer, with the poll interval in between."""
CLOSE_LOOK_SECONDS = 0.05
"""How often a coroutine that pauses looks whether the client was closed."""
LONGEST_DETAIL = 1000
"""Bytes of a refusal that are logged."""
_PASSING_STATUSES = (502, 503, 504)
"""What a server that is starting answers, or a gateway before one that is down."""
_NOT_FOUND, _GONE = 404, 410


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

    _next_task_uri: ClassVar[str] = "/task"
    _submit_tasks_uri: ClassVar[str] = "/tasks"
    _resources_uri: ClassVar[str] = "/resources"
    _latest_resources_uri: ClassVar[str] = "/resources/latest"
    _report_rollout_uri: ClassVar[str] = "/rollout"
    _report_rollouts_uri: ClassVar[str] = "/rollouts"

    _warning_stacklevel: ClassVar[int] = 3
    """Where the construction warning points: at the caller of `__init__`."""
    _has_server: ClassVar[bool] = True
    """Whether the endpoint is an address that requests are sent to."""

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

    def _set_up(self) -> None:
        """What a copy in another process needs anew."""
        self._is_in_trouble = False
        self._closed = threading.Event()
        self._open_tasks = _OpenTasks()
        self._session = requests.Session()
        fork_handlers().add(self, _leave_behind)

    # ------------------------------------------------------------------ operations

    def poll_next_task(self, timeout: float | None = None) -> Task | None:
        """Wait until the server has a task, and claim it; None if the client is closed meanwhile.

        Args:
            timeout: Seconds after which the wait ends with None; 0 asks once, None waits for ever. A request that is
                under way then is not cut short, for its answer may be a claimed task.
        """
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while not self._closed.is_set():
            task = self._claim()
            pause = min(self.poll_interval, ends - time.monotonic())
            if task is not None or pause <= 0.0:
                return self._polled(task)
            self._closed.wait(pause)
        return None

    async def poll_next_task_async(self, timeout: float | None = None) -> Task | None:
        """As `poll_next_task`."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while not self._closed.is_set():
            task = await asyncio.to_thread(self._claim)
            pause = min(self.poll_interval, ends - time.monotonic())
            if task is not None or pause <= 0.0:
                return self._polled(task)
            await until(self._closed.is_set, timeout_seconds=pause, interval_seconds=CLOSE_LOOK_SECONDS)
        return None

    def submit_task(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: JsonObject | None = None,
    ) -> str | None:
        """Have the server queue a task; the id of its rollout, or None if that failed."""
        payload = {"sample": sample, "mode": mode, "resources_id": resources_id, "metadata": metadata}
        answer = self._post_json(self._url(self._next_task_uri), payload)
        return None if answer is None else answer.get("rollout_id")

    submit_task_async = _in_thread(submit_task)

    def submit_tasks(
        self, samples: Sequence[TaskInput], mode: RolloutMode | None = None, resources_id: str | None = None
    ) -> list[str] | None:
        """Have the server queue several tasks in one request; the ids of their rollouts, or None if that failed."""
        rows: list[Json] = [{"sample": sample, "mode": mode, "resources_id": resources_id} for sample in samples]
        answer = self._post_json(self._url(self._submit_tasks_uri), rows)
        return None if answer is None else answer.get("rollout_ids")

    submit_tasks_async = _in_thread(submit_tasks)

    def get_resources_by_id(self, resource_id: str | None) -> ResourcesUpdate | None:
        """Resources by their id, asked for once; None if they cannot be had, or if the id is None.

        A task that names no resources takes the latest there are: `get_latest_resources`.
        """
        if resource_id is None or resource_id in self._resource_cache:
            return None if resource_id is None else self._resource_cache[resource_id]
        return self._cached(self._request_json(self._url(f"{self._resources_uri}/{quote(resource_id, safe='')}")))

    get_resources_by_id_async = _in_thread(get_resources_by_id)

    def get_latest_resources(self) -> ResourcesUpdate | None:
        """What was published last, asked for each time; None if it cannot be had."""
        return self._cached(self._request_json(self._url(self._latest_resources_uri)))

    get_latest_resources_async = _in_thread(get_latest_resources)

    def on_resources_update(self, callback: Callback) -> Callback:
        """Have a function called with the latest resources: with the present ones first, then whenever they change.

        The server is asked at every poll interval. The function is called from a thread of its own, which ends after a
        `close`. Can be used as a decorator.
        """
        threading.Thread(target=self._follow_resources, args=[callback], name=RESOURCES_THREAD, daemon=True).start()
        return callback

    def post_rollout(self, rollout: RolloutLegacy | JsonMapping | object) -> Json | None:
        """Report a result; the server's acknowledgement, or None if it was refused or could not be delivered.

        A result is a `RolloutLegacy`, a mapping of its fields with the `rollout_id` among them, or what an agent
        returned for the task that the same thread or asyncio task polled: see `rollout_from_result`. Who holds several
        tasks names one by `rollout_from_result(task, result)`; a bare result is refused then with InvalidTransition.

        A server that does not answer is tried several times; a result that is lost all the same leaves a warning.
        """
        return self._deliver([self._result(rollout)], is_batch=False)

    async def post_rollout_async(self, rollout: RolloutLegacy | JsonMapping | object) -> Json | None:
        """As `post_rollout`."""
        return await asyncio.to_thread(self._deliver, [self._result(rollout)], is_batch=False)

    def post_rollouts(self, rollouts: Sequence[RolloutLegacy | JsonMapping]) -> Json | None:
        """Report several results, each with its id, in one request."""
        return self._deliver([as_rollout(rollout) for rollout in rollouts], is_batch=True)

    post_rollouts_async = _in_thread(post_rollouts)

    def _claim(self) -> Task | None:
        """Ask for a task once."""
        offer = _checked(TaskIfAny, self._request_json(self._url(self._next_task_uri)))
        return offer.task if offer is not None and offer.is_available else None

    def _polled(self, task: Task | None) -> Task | None:
        if task is not None:
            self.task_count += 1
            self._open_tasks.add(task)
            logger.debug("Task %s polled from %s.", task.rollout_id, self.endpoint)
        return task

    def _result(self, given: object) -> RolloutLegacy:
        return as_rollout(given) if is_report(given) else rollout_from_result(self._open_tasks.only(given), given)

    def _deliver(self, rollouts: Sequence[RolloutLegacy], *, is_batch: bool) -> Json | None:
        """Send results, several times to a server that does not answer; they may arrive twice without harm."""
        rows = [rollout.model_dump(mode="json") for rollout in rollouts]
        url = self._url(self._report_rollouts_uri if is_batch else self._report_rollout_uri)
        ids = [rollout.rollout_id for rollout in rollouts]
        answer = self._exchange(url, rows if is_batch else rows[0], tries=RESULT_TRIES, about=", ".join(ids))
        for rollout_id in ids if answer is not None else ():
            self._open_tasks.remove(rollout_id)
            logger.debug("Result of rollout %s posted to %s.", rollout_id, self.endpoint)
        return answer

    def _cached(self, answer: Json | None) -> ResourcesUpdate | None:
        update = _checked(ResourcesUpdate, answer)
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

    def _url(self, uri: str) -> str:
        return urljoin(self.endpoint, uri)

    def _request_json(self, url: str) -> Json | None:
        return self._exchange(url)

    _request_json_async = _in_thread(_request_json)

    def _post_json(self, url: str, payload: Json | list[Json]) -> Json | None:
        return self._exchange(url, payload)

    _post_json_async = _in_thread(_post_json)

    def _exchange(
        self, url: str, payload: Json | list[Json] | None = None, *, tries: int = 1, about: str = ""
    ) -> Json | None:
        """Send a request, a GET without a payload; None, and a line in the log, if that fails.

        Args:
            tries: How often it is sent to a server that does not answer.
            about: The rollouts whose results are lost if it fails.
        """
        for number in range(1, tries + 1):
            try:
                return self._send(url, payload)
            except StoreUnavailable as error:
                if number < tries and not self._closed.wait(self.poll_interval):
                    continue
                lost = f"The result of {about} could not be delivered after {number} tries and is lost: "
                self._log_failure(f"{lost if about else ''}{error}", is_question=payload is None)
                return None
            except ValueError as refused:
                lost = f"The result of {about} is lost: " if about else ""
                self._log_failure(f"{lost}{refused}", is_question=payload is None)
                return None
        return None

    def _send(self, url: str, payload: Json | list[Json] | None) -> Json | None:
        """The JSON object of an answer; StoreUnavailable if it may come later, ValueError if it is another.

        StoreError of a server that does not speak this protocol.
        """
        if self._closed.is_set():
            raise StoreUnavailable("This client is closed; make a new one.")
        method, headers, body = "GET", self._default_headers, None
        if payload is not None:
            method, headers = "POST", {**headers, "Content-Type": "application/json"}
            body = json.dumps(to_jsonable_python(payload)).encode()
        request = f"{method} {url}"
        try:
            answer = self._session.request(method, url, data=body, headers=headers, timeout=self.timeout)
        except (requests.RequestException, ValueError) as error:
            raise StoreUnavailable(f"{request} got no answer: {str(error) or type(error).__name__}") from error
        if not answer.ok:
            detail = answer.content[:LONGEST_DETAIL].decode(errors="replace")
            text = f"{request} was refused with {answer.status_code}: {detail}"
            if answer.status_code in _PASSING_STATUSES:
                raise StoreUnavailable(text)
            if answer.status_code == _GONE:  # a server of another kind, which will never have a task
                raise StoreError(text)
            if answer.status_code != _NOT_FOUND or not urlsplit(url).path.startswith(self._resources_uri):
                raise ValueError(text)
            logger.debug("%s", text)  # there are no resources, which is an answer
            return None
        try:
            value = json.loads(answer.content) if answer.content else None
        except ValueError as error:
            raise ValueError(f"{request} was answered with no JSON: {error}") from error
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{request} was answered with a JSON {type(value).__name__}, no object.")
        self._is_in_trouble = False
        return value

    def _log_failure(self, text: str, *, is_question: bool) -> None:
        """Log a failure: what was to be written each time, questions once until the server answers again."""
        is_known = is_question and (self._is_in_trouble or self._closed.is_set())
        self._is_in_trouble = self._is_in_trouble or is_question
        logger.log(logging.DEBUG if is_known else logging.WARNING, "%s", text)

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
        """Address and settings travel to another process; connections and callbacks stay behind."""
        own = ("_closed", "_session", "_is_in_trouble", "_open_tasks")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: JsonObject) -> None:
        self.__dict__.update(state)
        self._set_up()


class _OpenTasks:
    """The tasks that were polled and not reported, so that a bare result finds the task it belongs to: the one that the
    same thread or asyncio task polled and still holds, else the only one there is. Nothing but an id tells several
    apart; a task that the caller has dropped does not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the fields below
        self._polled: list[tuple[ref[object], ref[Task]]] = []  # who polled, and what
        # Kept alive until the next poll, because a caller may hold no more than the input of a task: the last one of
        # each caller, and the newest of all, whose caller may be gone, such as the task of `asyncio.wait_for`.
        self._last: WeakKeyDictionary[object, Task] = WeakKeyDictionary()
        self._newest: Task | None = None

    def add(self, task: Task) -> None:
        caller = _caller()
        with self._lock:
            self._last[caller] = self._newest = task
            self._polled = [(who, one) for who, one in self._polled if one() is not None]
            self._polled.append((ref(caller), ref(task)))

    def remove(self, rollout_id: str) -> None:
        with self._lock:
            self._polled = [
                (who, one) for who, one in self._polled if (task := one()) and task.rollout_id != rollout_id
            ]
            for caller in [caller for caller, task in self._last.items() if task.rollout_id == rollout_id]:
                del self._last[caller]
            if self._newest is not None and self._newest.rollout_id == rollout_id:
                self._newest = None

    def only(self, result: object) -> Task:
        """The task that a bare result belongs to; InvalidTransition if there is none, or more than one."""
        caller = _caller()
        with self._lock:
            held = [(who(), task) for who, one in self._polled if (task := one()) is not None]
        tasks = [task for who, task in held if who is caller] or [task for _, task in held]
        if len(tasks) == 1:
            return tasks[0]
        which = f"may belong to any of {len(tasks)} polled tasks" if tasks else "belongs to no task that was polled"
        raise InvalidTransition(
            f"post_rollout was given a {type(result).__name__}, which {which}; name the task with "
            "rollout_from_result(task, result)."
        )


def _caller() -> object:
    """The asyncio task that runs, or else the thread."""
    try:
        running = asyncio.current_task()
    except RuntimeError:  # no event loop in this thread
        running = None
    return running or threading.current_thread()


def _leave_behind(client: AgentLightningClient) -> None:
    """In a forked child: the parent goes on using its sockets, so the child opens its own."""
    client._session = requests.Session()


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


def _checked(model: type[ModelT], answer: Json | None) -> ModelT | None:
    """An answer as what it should be; None, and a line in the log, if it is something else."""
    if answer is None:
        return None
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        logger.debug("The server's answer is not a valid %s: %s", model.__name__, error)
        return None
