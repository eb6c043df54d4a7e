"""AgentLightningClient: the worker's side of the v0.1 protocol, for synchronous and asynchronous code.

Every operation is two halves that know nothing of each other: what to send and what an answer means (the functions with
one name), and the sending (one call, or one `await`). A server that cannot be reached, refuses, or answers nonsense
makes an operation return None and leaves a line in the log; nothing of that is raised. Results are sent several times
before they are given up.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
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

    # ------------------------------------------------------------------ tasks

    def poll_next_task(self, timeout: float | None = None) -> Task | None:
        """Wait until the server has a task, and claim it; None if the client is closed meanwhile.

        Args:
            timeout: Seconds after which the wait ends with None; 0 asks once, None waits for ever. A request that is
                under way then is not cut short, for its answer may be a claimed task.
        """
        ends = None if timeout is None else time.monotonic() + timeout
        while not self._closed.is_set():
            task = self._claimed(self._request_json(self._url(self._next_task_uri)))
            pause = self._pause_before(ends)
            if task is not None or pause <= 0.0:
                return task
            self._closed.wait(pause)
        return None

    async def poll_next_task_async(self, timeout: float | None = None) -> Task | None:
        """As `poll_next_task`."""
        ends = None if timeout is None else time.monotonic() + timeout
        while not self._closed.is_set():
            task = self._claimed(await self._request_json_async(self._url(self._next_task_uri)))
            pause = self._pause_before(ends)
            if task is not None or pause <= 0.0:
                return task
            await self._pause_async(pause)
        return None

    def _pause_before(self, ends: float | None) -> float:
        """Seconds until the next poll; none are left once the wait has ended."""
        return self.poll_interval if ends is None else min(self.poll_interval, ends - time.monotonic())

    async def _pause_async(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        left = seconds
        while True:
            await asyncio.sleep(min(left, CLOSE_LOOK_SECONDS))
            left = until - time.monotonic()
            if left <= 0 or self._closed.is_set():  # by any thread
                return

    def _claimed(self, answer: Json | None) -> Task | None:
        offer = _checked(TaskIfAny, answer)
        if offer is None or not offer.is_available or offer.task is None:
            return None
        self.task_count += 1
        self._open_tasks.add(offer.task)
        logger.debug("Task %s polled from %s.", offer.task.rollout_id, self.endpoint)
        return offer.task

    def submit_task(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> str | None:
        """Have the server queue a task; the id of its rollout, or None if that failed."""
        return self._submitted(self._post_json(*self._submission(sample, mode, resources_id, metadata)))

    async def submit_task_async(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> str | None:
        """As `submit_task`."""
        return self._submitted(await self._post_json_async(*self._submission(sample, mode, resources_id, metadata)))

    def _submission(
        self, sample: TaskInput, mode: RolloutMode | None, resources_id: str | None, metadata: dict[str, Any] | None
    ) -> tuple[str, Json]:
        payload = {"sample": sample, "mode": mode, "resources_id": resources_id, "metadata": metadata}
        return self._url(self._next_task_uri), payload

    def _submitted(self, answer: Json | None) -> str | None:
        rollout_id = None if answer is None else answer.get("rollout_id")
        if rollout_id is not None:
            logger.debug("Task %s submitted to %s.", rollout_id, self.endpoint)
        return rollout_id

    # ------------------------------------------------------------------ resources

    def get_resources_by_id(self, resource_id: str | None) -> ResourcesUpdate | None:
        """Resources by their id, asked for once; None if they cannot be had, or if the id is None.

        A task that names no resources takes the latest there are: `get_latest_resources`.
        """
        if resource_id is None:
            return None
        if resource_id in self._resource_cache:
            return self._resource_cache[resource_id]
        return self._cached(self._request_json(self._resources_url(resource_id)))

    async def get_resources_by_id_async(self, resource_id: str | None) -> ResourcesUpdate | None:
        """As `get_resources_by_id`."""
        if resource_id is None:
            return None
        if resource_id in self._resource_cache:
            return self._resource_cache[resource_id]
        return self._cached(await self._request_json_async(self._resources_url(resource_id)))

    def get_latest_resources(self) -> ResourcesUpdate | None:
        """What was published last, asked for each time; None if it cannot be had."""
        return self._cached(self._request_json(self._url(self._latest_resources_uri)))

    async def get_latest_resources_async(self) -> ResourcesUpdate | None:
        """As `get_latest_resources`."""
        return self._cached(await self._request_json_async(self._url(self._latest_resources_uri)))

    def on_resources_update(self, callback: Callback) -> Callback:
        """Have a function called with the latest resources: with the present ones first, then whenever they change.

        It is called from a thread of its own, which `close` ends. Can be used as a decorator.
        """
        if self._watch is None:
            self._watch = ResourcesWatch(self._next_resources, self.poll_interval)
        self._watch.add(callback)
        return callback

    async def _next_resources(self, seen: ResourcesUpdate | None) -> ResourcesUpdate | None:
        query: dict[str, Any] = {"wait": RESOURCES_WAIT_SECONDS}
        if seen is not None:
            query |= {"after": seen.resources_id, "version": seen.version}
        request = self._outgoing("GET", f"{self._url(self._latest_resources_uri)}?{urlencode(query)}")
        patient = replace(request, timeout_seconds=self.timeout + RESOURCES_WAIT_SECONDS)
        latest = self._cached(await self._exchange_async(patient))
        is_seen = latest is not None and seen is not None and _version_of(latest) == _version_of(seen)
        return None if is_seen else latest

    def _cached(self, answer: Json | None) -> ResourcesUpdate | None:
        update = _checked(ResourcesUpdate, answer)
        if update is not None:
            self._resource_cache[update.resources_id] = update
            logger.debug("Resources %s received from %s.", update.resources_id, self.endpoint)
        return update

    def _resources_url(self, resources_id: str) -> str:
        return self._url(f"{self._resources_uri}/{quote(resources_id, safe='')}")

    # ------------------------------------------------------------------ results

    def post_rollout(self, rollout: RolloutLegacy | Mapping[str, Any] | object) -> Json | None:
        """Report a result; the server's acknowledgement, or None if it was refused or could not be delivered.

        A result is a `RolloutLegacy`, a mapping of its fields with the `rollout_id` among them, or what an agent
        returned for the task that was polled last, by the same thread or asyncio task: see `rollout_from_result`. Who
        holds several tasks names the one that is meant by `rollout_from_result(task, result)`.

        A server that does not answer is tried several times; a result that is lost all the same leaves a warning.
        """
        posted = self._result(rollout)
        return self._acknowledged([posted], self._deliver(self._report(posted)))

    async def post_rollout_async(self, rollout: RolloutLegacy | Mapping[str, Any] | object) -> Json | None:
        """As `post_rollout`."""
        posted = self._result(rollout)
        return self._acknowledged([posted], await self._deliver_async(self._report(posted)))

    def post_rollouts(self, rollouts: Sequence[RolloutLegacy | Mapping[str, Any]]) -> Json | None:
        """Report several results, each with its id, in one request."""
        posted = [as_rollout(rollout) for rollout in rollouts]
        return self._acknowledged(posted, self._deliver(self._reports(posted)))

    async def post_rollouts_async(self, rollouts: Sequence[RolloutLegacy | Mapping[str, Any]]) -> Json | None:
        """As `post_rollouts`."""
        posted = [as_rollout(rollout) for rollout in rollouts]
        return self._acknowledged(posted, await self._deliver_async(self._reports(posted)))

    def _result(self, given: object) -> RolloutLegacy:
        return as_rollout(given) if is_report(given) else rollout_from_result(self._open_tasks.only(given), given)

    def _report(self, rollout: RolloutLegacy) -> Outgoing:
        payload = rollout.model_dump(mode="json")
        return self._outgoing("POST", self._url(self._report_rollout_uri), payload, about=rollout.rollout_id)

    def _reports(self, rollouts: Sequence[RolloutLegacy]) -> Outgoing:
        payload = [rollout.model_dump(mode="json") for rollout in rollouts]
        about = ", ".join(rollout.rollout_id for rollout in rollouts)
        return self._outgoing("POST", self._url(self._report_rollouts_uri), payload, about=about)

    def _acknowledged(self, rollouts: Sequence[RolloutLegacy], answer: Json | None) -> Json | None:
        if answer is not None:
            for rollout in rollouts:
                self._open_tasks.remove(rollout.rollout_id)
                logger.debug("Result of rollout %s posted to %s.", rollout.rollout_id, self.endpoint)
        return answer

    # ------------------------------------------------------------------ requests

    def _url(self, uri: str) -> str:
        return urljoin(self.endpoint, uri)

    def _request_json(self, url: str) -> Json | None:
        return self._exchange(self._outgoing("GET", url))

    async def _request_json_async(self, url: str) -> Json | None:
        return await self._exchange_async(self._outgoing("GET", url))

    def _post_json(self, url: str, payload: Json | list[Json]) -> Json | None:
        return self._exchange(self._outgoing("POST", url, payload))

    async def _post_json_async(self, url: str, payload: Json | list[Json]) -> Json | None:
        return await self._exchange_async(self._outgoing("POST", url, payload))

    def _exchange(self, request: Outgoing) -> Json | None:
        try:
            return self._understood(request, self._connections.send(request))
        except StoreUnavailable as error:
            self._report_failure(request, str(error))
            return None

    async def _exchange_async(self, request: Outgoing) -> Json | None:
        try:
            return self._understood(request, await self._connections.send_async(request))
        except StoreUnavailable as error:
            self._report_failure(request, str(error))
            return None

    def _deliver(self, request: Outgoing) -> Json | None:
        """As `_exchange`, but a server that does not answer is tried again; for what may arrive twice without harm."""
        tries = 1
        while True:
            try:
                return self._understood(request, self._connections.send(request))
            except StoreUnavailable as error:
                if tries == RESULT_TRIES or self._closed.wait(self.poll_interval):
                    self._report_loss(request, tries, error)
                    return None
            tries += 1

    async def _deliver_async(self, request: Outgoing) -> Json | None:
        """As `_deliver`."""
        tries = 1
        while True:
            try:
                return self._understood(request, await self._connections.send_async(request))
            except StoreUnavailable as error:
                if tries < RESULT_TRIES:
                    await self._pause_async(self.poll_interval)
                if tries == RESULT_TRIES or self._closed.is_set():
                    self._report_loss(request, tries, error)
                    return None
            tries += 1

    def _report_loss(self, request: Outgoing, tries: int, error: StoreUnavailable) -> None:
        logger.warning(
            "The result of %s could not be delivered after %d tries and is lost: %s", request.about, tries, error
        )

    def _report_failure(self, request: Outgoing, text: str) -> None:
        """Log a failure: what was to be written each time, questions once until the server answers again."""
        is_known = request.body is None and (self._is_in_trouble or self._closed.is_set())
        self._is_in_trouble = self._is_in_trouble or request.body is None
        lost = f"The result of {request.about} is lost: " if request.about else ""
        logger.log(logging.DEBUG if is_known else logging.WARNING, "%s%s", lost, text)

    def _outgoing(
        self, method: str, url: str, payload: Json | list[Json] | None = None, *, about: str = ""
    ) -> Outgoing:
        if payload is None:
            return Outgoing(method, url, self._default_headers, self.timeout)
        headers = {**self._default_headers, "Content-Type": "application/json"}
        body = json.dumps(to_jsonable_python(payload)).encode()
        if self._server_takes_gzip and len(body) > COMPRESS_FROM_BYTES:
            headers["Content-Encoding"] = "gzip"
            body = compressed(body)
        return Outgoing(method, url, headers, self.timeout, body, about)

    def _understood(self, request: Outgoing, answer: Answer) -> Json | None:
        """The JSON object of a successful answer, None for any other; StoreUnavailable if it may succeed later."""
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
