"""AgentLightningClient: the worker's side of the v0.1 protocol, for synchronous and asynchronous code.

Every operation is written once, as the steps it takes: requests to send and pauses to make. `_run` takes them in
synchronous code, `_run_async` in asynchronous. A server that cannot be reached, refuses, or answers nonsense makes an
operation return None and leaves a line in the log; nothing of that is raised. Results are sent several times before
they are given up.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, urlencode, urljoin, urlsplit

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python
from typing_extensions import Self

from agentlightning.asgi.compression import COMPRESS_FROM_BYTES, compressed
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.legacy.connections import Answer, Connections, Outgoing
from agentlightning.legacy.open_tasks import OpenTasks
from agentlightning.legacy.resources_watch import Callback, ResourcesWatch
from agentlightning.legacy.results import as_rollout, is_report, rollout_from_result
from agentlightning.types import ResourcesUpdate, RolloutLegacy, RolloutMode, Task, TaskIfAny, TaskInput
from agentlightning.utils.deprecation import deprecated

__all__ = ["AgentLightningClient"]

logger = logging.getLogger(__name__)

Json = dict[str, Any]
ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")
Steps = Generator[Outgoing | float, Answer | StoreUnavailable | None, ResultT]
"""An operation: yields requests and pauses in seconds, is sent what came of each request, and returns its result."""

RESOURCES_WAIT_SECONDS = 25.0
"""How long the server is asked to wait for new resources before it answers that there are none."""
RESULT_TRIES = 5
"""How often a result is sent to a server that does not answer, with the poll interval in between."""
_PASSING_STATUSES = (502, 503, 504)
"""What a server that is starting answers, or a gateway before one that is down."""
LONGEST_DETAIL = 1000
"""Bytes of a refusal that are logged."""
CLOSE_LOOK_SECONDS = 0.1
"""How often a coroutine that polls looks whether the client was closed."""


class AgentLightningClient:
    """Fetches tasks and resources from an `AgentLightningServer` and posts results. New code uses a store client."""

    _next_task_uri: ClassVar[str] = "/task"
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
        self._server_takes_gzip = False
        self._is_in_trouble = False
        self._closed = threading.Event()
        self._open_tasks = OpenTasks()
        self._connections = Connections()
        self._watch: ResourcesWatch | None = None

    # ------------------------------------------------------------------ operations

    def poll_next_task(self, timeout: float | None = None) -> Task | None:
        """Wait until the server has a task, and claim it; None if the client is closed meanwhile.

        Args:
            timeout: Seconds after which the wait ends with None; 0 asks once, None waits for ever. A request that is
                under way then is not cut short, for its answer may be a claimed task.
        """
        return self._run(self._poll(timeout))

    async def poll_next_task_async(self, timeout: float | None = None) -> Task | None:
        """As `poll_next_task`."""
        return await self._run_async(self._poll(timeout))

    def submit_task(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> str | None:
        """Have the server queue a task; the id of its rollout, or None if that failed."""
        return self._run(self._submit(sample, mode, resources_id, metadata))

    async def submit_task_async(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> str | None:
        """As `submit_task`."""
        return await self._run_async(self._submit(sample, mode, resources_id, metadata))

    def get_resources_by_id(self, resource_id: str | None) -> ResourcesUpdate | None:
        """Resources by their id, asked for once; None if they cannot be had, or if the id is None.

        A task that names no resources takes the latest there are: `get_latest_resources`.
        """
        return self._run(self._resources(resource_id))

    async def get_resources_by_id_async(self, resource_id: str | None) -> ResourcesUpdate | None:
        """As `get_resources_by_id`."""
        return await self._run_async(self._resources(resource_id))

    def get_latest_resources(self) -> ResourcesUpdate | None:
        """What was published last, asked for each time; None if it cannot be had."""
        return self._run(self._latest_resources())

    async def get_latest_resources_async(self) -> ResourcesUpdate | None:
        """As `get_latest_resources`."""
        return await self._run_async(self._latest_resources())

    def on_resources_update(self, callback: Callback) -> Callback:
        """Have a function called with the latest resources: with the present ones first, then whenever they change.

        It is called from a thread of its own, which `close` ends. Can be used as a decorator.
        """
        if self._watch is None:
            self._watch = ResourcesWatch(self._next_resources, self.poll_interval)
        self._watch.add(callback)
        return callback

    def post_rollout(self, rollout: RolloutLegacy | Mapping[str, Any] | object) -> Json | None:
        """Report a result; the server's acknowledgement, or None if it was refused or could not be delivered.

        A result is a `RolloutLegacy`, a mapping of its fields with the `rollout_id` among them, or what an agent
        returned for the task that was polled last, by the same thread or asyncio task: see `rollout_from_result`. Who
        holds several tasks names the one that is meant by `rollout_from_result(task, result)`.

        A server that does not answer is tried several times; a result that is lost all the same leaves a warning.
        """
        return self._run(self._post(self._result(rollout)))

    async def post_rollout_async(self, rollout: RolloutLegacy | Mapping[str, Any] | object) -> Json | None:
        """As `post_rollout`."""
        return await self._run_async(self._post(self._result(rollout)))

    def post_rollouts(self, rollouts: Sequence[RolloutLegacy | Mapping[str, Any]]) -> Json | None:
        """Report several results, each with its id, in one request."""
        return self._run(self._post_many([as_rollout(rollout) for rollout in rollouts]))

    async def post_rollouts_async(self, rollouts: Sequence[RolloutLegacy | Mapping[str, Any]]) -> Json | None:
        """As `post_rollouts`."""
        return await self._run_async(self._post_many([as_rollout(rollout) for rollout in rollouts]))

    # ------------------------------------------------------------------ their steps

    def _poll(self, timeout: float | None) -> Steps[Task | None]:
        ends = None if timeout is None else time.monotonic() + timeout
        while not self._closed.is_set():
            offer = _checked(
                TaskIfAny, (yield from self._exchange(self._outgoing("GET", self._url(self._next_task_uri))))
            )
            if offer is not None and offer.is_available and offer.task is not None:
                self.task_count += 1
                self._open_tasks.add(offer.task)
                logger.debug("Task %s polled from %s.", offer.task.rollout_id, self.endpoint)
                return offer.task
            pause = self.poll_interval if ends is None else min(self.poll_interval, ends - time.monotonic())
            if pause <= 0.0:
                return None
            yield pause
        return None

    def _submit(
        self, sample: TaskInput, mode: RolloutMode | None, resources_id: str | None, metadata: dict[str, Any] | None
    ) -> Steps[str | None]:
        payload = {"sample": sample, "mode": mode, "resources_id": resources_id, "metadata": metadata}
        answer = yield from self._exchange(self._outgoing("POST", self._url(self._next_task_uri), payload))
        return None if answer is None else answer.get("rollout_id")

    def _resources(self, resource_id: str | None) -> Steps[ResourcesUpdate | None]:
        if resource_id is None or resource_id in self._resource_cache:
            return None if resource_id is None else self._resource_cache[resource_id]
        url = self._url(f"{self._resources_uri}/{quote(resource_id, safe='')}")
        return self._cached((yield from self._exchange(self._outgoing("GET", url))))

    def _latest_resources(self) -> Steps[ResourcesUpdate | None]:
        return self._cached((yield from self._exchange(self._outgoing("GET", self._url(self._latest_resources_uri)))))

    async def _next_resources(self, seen: ResourcesUpdate | None) -> ResourcesUpdate | None:
        query: dict[str, Any] = {"wait": RESOURCES_WAIT_SECONDS}
        if seen is not None:
            query |= {"after": seen.resources_id, "version": seen.version}
        request = self._outgoing("GET", f"{self._url(self._latest_resources_uri)}?{urlencode(query)}")
        patient = replace(request, timeout_seconds=self.timeout + RESOURCES_WAIT_SECONDS)
        latest = self._cached(await self._run_async(self._exchange(patient)))
        is_seen = latest is not None and seen is not None and _version_of(latest) == _version_of(seen)
        return None if is_seen else latest

    def _cached(self, answer: Json | None) -> ResourcesUpdate | None:
        update = _checked(ResourcesUpdate, answer)
        if update is not None:
            self._resource_cache[update.resources_id] = update
            logger.debug("Resources %s received from %s.", update.resources_id, self.endpoint)
        return update

    def _result(self, given: object) -> RolloutLegacy:
        return as_rollout(given) if is_report(given) else rollout_from_result(self._open_tasks.only(given), given)

    def _post(self, rollout: RolloutLegacy) -> Steps[Json | None]:
        url, payload = self._url(self._report_rollout_uri), rollout.model_dump(mode="json")
        return (yield from self._deliver(self._outgoing("POST", url, payload, about=[rollout.rollout_id])))

    def _post_many(self, rollouts: Sequence[RolloutLegacy]) -> Steps[Json | None]:
        url, payload = self._url(self._report_rollouts_uri), [rollout.model_dump(mode="json") for rollout in rollouts]
        about = [rollout.rollout_id for rollout in rollouts]
        return (yield from self._deliver(self._outgoing("POST", url, payload, about=about)))

    # ------------------------------------------------------------------ requests

    def _url(self, uri: str) -> str:
        return urljoin(self.endpoint, uri)

    def _request_json(self, url: str) -> Json | None:
        return self._run(self._exchange(self._outgoing("GET", url)))

    async def _request_json_async(self, url: str) -> Json | None:
        return await self._run_async(self._exchange(self._outgoing("GET", url)))

    def _post_json(self, url: str, payload: Json | list[Json]) -> Json | None:
        return self._run(self._exchange(self._outgoing("POST", url, payload)))

    async def _post_json_async(self, url: str, payload: Json | list[Json]) -> Json | None:
        return await self._run_async(self._exchange(self._outgoing("POST", url, payload)))

    def _run(self, steps: Steps[ResultT]) -> ResultT:
        """Take the steps of an operation."""
        reply: Answer | StoreUnavailable | None = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as done:
                result: ResultT = done.value
                return result
            if not isinstance(step, Outgoing):
                self._closed.wait(step)
                reply = None
                continue
            try:
                reply = self._connections.send(step)
            except StoreUnavailable as error:
                reply = error

    async def _run_async(self, steps: Steps[ResultT]) -> ResultT:
        """As `_run`, on the running loop; a pause ends when the client is closed, by any thread."""
        reply: Answer | StoreUnavailable | None = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as done:
                result: ResultT = done.value
                return result
            reply = None
            if isinstance(step, Outgoing):
                try:
                    reply = await self._connections.send_async(step)
                except StoreUnavailable as error:
                    reply = error
                continue
            until = time.monotonic() + step
            while (left := until - time.monotonic()) > 0 and not self._closed.is_set():  # noqa: ASYNC110 # by any thread
                await asyncio.sleep(min(left, CLOSE_LOOK_SECONDS))

    def _exchange(self, request: Outgoing) -> Steps[Json | None]:
        """Send a request once; None, and a line in the log, if that fails."""
        try:
            return self._understood(request, (yield request))
        except StoreUnavailable as error:
            self._report_failure(request, str(error))
            return None

    def _deliver(self, request: Outgoing) -> Steps[Json | None]:
        """As `_exchange`, but a server that does not answer is tried again; for what may arrive twice without harm."""
        for tries in range(1, RESULT_TRIES + 1):
            try:
                answer = self._understood(request, (yield request))
            except StoreUnavailable as error:
                if tries < RESULT_TRIES:
                    yield self.poll_interval
                if tries == RESULT_TRIES or self._closed.is_set():
                    text = "The result of %s could not be delivered after %d tries and is lost: %s"
                    logger.warning(text, ", ".join(request.about), tries, error)
                    break
            else:
                for rollout_id in request.about if answer is not None else ():
                    self._open_tasks.remove(rollout_id)
                    logger.debug("Result of rollout %s posted to %s.", rollout_id, self.endpoint)
                return answer
        return None

    def _report_failure(self, request: Outgoing, text: str) -> None:
        """Log a failure: what was to be written each time, questions once until the server answers again."""
        is_known = request.body is None and (self._is_in_trouble or self._closed.is_set())
        self._is_in_trouble = self._is_in_trouble or request.body is None
        lost = f"The result of {', '.join(request.about)} is lost: " if request.about else ""
        logger.log(logging.DEBUG if is_known else logging.WARNING, "%s%s", lost, text)

    def _outgoing(
        self, method: str, url: str, payload: Json | list[Json] | None = None, *, about: Sequence[str] = ()
    ) -> Outgoing:
        if payload is None:
            return Outgoing(method, url, self._default_headers, self.timeout)
        headers = {**self._default_headers, "Content-Type": "application/json"}
        body = json.dumps(to_jsonable_python(payload)).encode()
        if self._server_takes_gzip and len(body) > COMPRESS_FROM_BYTES:
            headers["Content-Encoding"] = "gzip"
            body = compressed(body)
        return Outgoing(method, url, headers, self.timeout, body, about)

    def _understood(self, request: Outgoing, answer: Answer | StoreUnavailable | None) -> Json | None:
        """The JSON object of a successful answer, None for any other; StoreUnavailable if it may succeed later."""
        if isinstance(answer, StoreUnavailable):
            raise answer
        assert answer is not None
        # Servers of the 0.2 release do not unpack bodies; one that does says so with every answer (RFC 7694).
        self._server_takes_gzip = self._server_takes_gzip or "gzip" in answer.headers.get("accept-encoding", "")
        what = f"{request.method} {request.url}"
        if not answer.is_success:
            text = f"{what} was refused with {answer.status}: {answer.body[:LONGEST_DETAIL].decode(errors='replace')}"
            if answer.status in _PASSING_STATUSES:
                raise StoreUnavailable(text)
            if answer.status == 404 and self._is_about_resources(request):
                logger.debug("%s", text)  # there are none, which is an answer
                return None
            self._report_failure(request, text)
            return None
        try:
            value = json.loads(answer.body) if answer.body else None
        except ValueError as error:
            self._report_failure(request, f"{what} was answered with no JSON: {error}")
            return None
        if value is not None and not isinstance(value, dict):
            self._report_failure(request, f"{what} was answered with a JSON {type(value).__name__}, no object.")
            return None
        self._is_in_trouble = False
        return value

    def _is_about_resources(self, request: Outgoing) -> bool:
        return request.body is None and urlsplit(request.url).path.startswith(self._resources_uri)

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """End callbacks, wake whoever polls, and close all connections; the client cannot be used afterwards."""
        self._closed.set()
        if self._watch is not None:
            self._watch.close()
        self._connections.close()

    async def aclose(self) -> None:
        """As `close`."""
        self._closed.set()
        if self._watch is not None:
            await asyncio.to_thread(self._watch.close)  # joins a thread, which may be in the middle of a callback
        await self._connections.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __getstate__(self) -> dict[str, Any]:
        """Address and settings travel to another process; connections and callbacks stay behind."""
        own = ("_closed", "_connections", "_is_in_trouble", "_open_tasks", "_watch")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up()
        self.__dict__.update(state)


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


def _version_of(update: ResourcesUpdate) -> tuple[str, int]:
    return update.resources_id, update.version
