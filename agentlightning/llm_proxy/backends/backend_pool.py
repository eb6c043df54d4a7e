"""All backends of a proxy, and the way of a call through them: choose, wait for the limits, send, try again.

A pool lives in one event loop. `send` returns a response as soon as its head is there, or raises an error that says
why no backend gave one. The model list can be replaced at any moment: calls that were sent or are queued stay where
they are, later ones see the new list, and backends in both lists keep their state. A backend whose entry has another
version or another name of the model is the same one; queued calls go out under the new name and version.
"""

import logging
import math
import operator
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

from agentlightning.asgi.bodies import Room
from agentlightning.llm_proxy.backends.backend import (
    WILDCARD,
    Backend,
    DialectNotServed,
    UnknownModel,
    VersionNotServed,
    backend_of,
)
from agentlightning.llm_proxy.backends.backend_call import (
    BackendCall,
    TryAgain,
    is_retryable,
    requested_hold_seconds,
)
from agentlightning.llm_proxy.backends.backend_state import BackendState, Clock
from agentlightning.llm_proxy.backends.connection import (
    MOST_LARGE_ANSWERS,
    BackendResponse,
    HttpSender,
    ResponseHead,
    SendFailure,
)
from agentlightning.utils.deadline import within
from agentlightning.utils.retries import RetryPolicy, retry

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_SECONDS: Final = 600.0
_REDIRECTS: Final = range(300, 400)
_SERVER_ERRORS: Final = 500
_AGAIN: Final = RetryPolicy(
    is_passing=lambda error: isinstance(error, TryAgain),
    delays=(0.0,),
    tries=math.inf,  # a call counts its own, and not all of them
    requested_seconds=lambda error: error.seconds if isinstance(error, TryAgain) else None,
)


class BackendPool:
    """The backends of one proxy.

    Args:
        num_retries: Further tries of a call after failures that may pass.
        deadline_seconds: Time until a response must have begun, for calls that name no deadline; queueing and all
            tries included.
    """

    def __init__(
        self,
        model_list: Iterable[Mapping[str, Any]],
        *,
        num_retries: int = 0,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._num_retries = num_retries
        self._deadline_seconds = deadline_seconds
        self._clock = clock or Clock()
        self._http = HttpSender()
        self._large_answers = Room(MOST_LARGE_ANSWERS)
        self._states: list[BackendState] = []
        self._by_model: dict[str, list[BackendState]] = {}
        self._retired: weakref.WeakSet[BackendState] = weakref.WeakSet()
        self._is_closed = False
        self.replace(model_list)

    # ------------------------------------------------------------------ the model list

    def replace(self, model_list: Iterable[Mapping[str, Any]]) -> frozenset[str]:
        """Serve this list from the next call on; a list that cannot be read changes nothing.

        Returns:
            The names of the backends that stay, under the names they had.
        """
        backends = [backend_of(entry, number) for number, entry in enumerate(model_list)]
        left = list(self._states)
        kept: dict[int, BackendState] = {}
        names: set[str] = set()
        for is_same in (operator.eq, Backend.is_updated_by):  # an equal one is found before one that only resembles it
            for number, backend in enumerate(backends):
                same = None if number in kept else next((one for one in left if is_same(one.backend, backend)), None)
                if same is None:
                    continue
                left.remove(same)
                if same.backend.name == backend.name:
                    names.add(backend.name)
                same.backend = backend
                kept[number] = same
        keys = {state.key for state in kept.values()}
        self._states = [kept.get(number) or self._new_state(backend, keys) for number, backend in enumerate(backends)]
        self._by_model = {}
        for state in self._states:
            self._by_model.setdefault(state.backend.model_name, []).append(state)
        self._retired.update(left)
        return frozenset(names)

    def _new_state(self, backend: Backend, keys: set[str]) -> BackendState:
        state = BackendState(backend, self._clock)
        while state.key in keys:
            state = BackendState(backend, self._clock, nth=state.nth + 1)
        keys.add(state.key)
        state.turn = min((other.turn for other in self._by_model.get(backend.model_name, ())), default=0.0)
        return state

    def models(self) -> list[str]:
        """The names callers may request, in the order of the list."""
        return list(self._by_model)

    def is_versioned(self, model: str) -> bool:
        """Whether the resources of a rollout decide how its calls of this model are served."""
        return any(state.backend.resources_id or state.backend.overrides for state in self._serving(model))

    def describe(self) -> list[dict[str, Any]]:
        """The state of every backend in plain values, without secrets."""
        return [state.describe() for state in self._states]

    def _serving(self, model: str) -> list[BackendState]:
        """The backends of a model; those of its own name, else of the longest pattern that fits."""
        if model in self._by_model:
            return self._by_model[model]
        for pattern in sorted((name for name in self._by_model if WILDCARD in name), key=len, reverse=True):
            before, _, after = pattern.partition(WILDCARD)
            if len(model) >= len(before) + len(after) and model.startswith(before) and model.endswith(after):
                return self._by_model[pattern]
        return []

    def _candidates(self, model: str, resources_id: str | None) -> list[BackendState]:
        """The backends that may serve a call."""
        states = self._serving(model)
        if not states:
            known = ", ".join(f"'{name}'" for name in self._by_model) or "none"
            raise UnknownModel(f"No backend serves the model '{model}'; the models of this proxy are: {known}.")
        versions = [state.backend.resources_id for state in states if state.backend.resources_id is not None]
        if not versions:
            return states
        wanted = (None, versions[-1]) if resources_id is None else (resources_id,)
        candidates = [state for state in states if state.backend.resources_id in wanted]
        if not candidates:
            served = ", ".join(f"'{version}'" for version in dict.fromkeys(versions))
            raise VersionNotServed(
                f"Model '{model}' is not served for resources '{resources_id}'; its backends belong to {served}."
            )
        return candidates

    # ------------------------------------------------------------------ life

    async def close(self) -> None:
        """Close all connections; calls that are queued or in flight end with an error."""
        self._is_closed = True
        for state in (*self._states, *self._retired):
            state.admission.evict()
        await self._http.close()

    # ------------------------------------------------------------------ one call

    async def send(self, call: BackendCall) -> BackendResponse:
        """Have a call answered.

        Raises UnknownModel, VersionNotServed, BackendUnavailable, DeadlineExceeded, or what `prepare` raises. A
        response with an error status that trying again did not mend is a response.
        """
        call.begin(
            self._candidates(call.model, call.resources_id),
            ends_at=self._clock.now() + self._deadline_seconds if call.deadline is None else call.deadline,
            num_retries=self._num_retries,
        )

        async def attempt() -> BackendResponse:
            self._refresh(call)
            return await self._try(call, await self._acquire(call))

        return await retry(attempt, _AGAIN, sleep=self._clock.sleep)

    async def _acquire(self, call: BackendCall) -> BackendState:
        """The backend of the next try, with a place in its limits."""
        now = self._clock.now()
        if self._is_closed:
            raise call.closing()
        if now >= call.ends_at:
            raise call.deadline_exceeded(f"before a backend of '{call.model}' was called")
        state = call.choose(now)
        if state is None:
            raise self._next_try(call)
        if state.admission.try_acquire(now) or await self._wait_for(call, state, now):
            return state
        raise TryAgain(0.0)

    async def _wait_for(self, call: BackendCall, state: BackendState, now: float) -> bool:
        """Wait in a backend's queue; False if another backend may be better now."""
        limited_seconds = state.admission.wait_seconds(now)
        if now + limited_seconds >= call.ends_at:
            raise call.rate_limited(state, limited_seconds)
        try:
            return await state.admission.acquire(call.rollout_id, call.ends_at)
        except TimeoutError:
            queued = state.admission.waiting + 1
            raise call.deadline_exceeded(f"in line for backend '{state}', where {queued} calls were waiting") from None
        finally:
            call.waited_seconds += self._clock.now() - now

    def _refresh(self, call: BackendCall) -> None:
        """See the present list, for a call that was not sent yet or failed; one whose model left it keeps its own."""
        try:
            call.candidates = self._candidates(call.model, call.resources_id)
        except (UnknownModel, VersionNotServed):
            return

    def _next_try(self, call: BackendCall) -> Exception:
        """What to raise so that the call is tried again, or why it shall not be."""
        now = self._clock.now()
        seconds = call.next_pause(now)
        return call.unavailable(now) if seconds is None else TryAgain(seconds)

    async def _try(self, call: BackendCall, state: BackendState) -> BackendResponse:
        """One try; `TryAgain` if there shall be another."""
        began = self._clock.now()
        state.breaker.begin(began)
        try:
            backend = state.backend.named(call.model)
            prepared = call.prepare(backend)
            outcome = await within(call.ends_at - began, self._http.send(backend, prepared))
        except TimeoutError:
            raise self._timed_out(call, state, began) from None
        except DialectNotServed:
            state.abandon()
            call.unfit.append(state)
            if not call.fit:
                raise
            raise TryAgain(0.0) from None
        except BaseException:
            state.abandon()
            raise
        if isinstance(outcome, ResponseHead):
            if outcome.status not in _REDIRECTS:
                return await self._responded(call, state, backend, outcome)
            await outcome.close()
            message = f"redirects elsewhere ({outcome.status}): give the final address as api_base"
            outcome = SendFailure(message, "garbled")
        raise self._failed(call, state, outcome)

    def _timed_out(self, call: BackendCall, state: BackendState, began: float) -> Exception:
        """The deadline passed; that is the backend's failure if it had most of its own time-out."""
        seconds = self._clock.now() - began
        message = f"did not begin to answer within the {seconds:.1f} s left to the call"
        call.note(state, message)
        if seconds >= state.backend.timeout / 2:
            state.fail(message)
            state.admission.release()
        else:
            state.abandon()
        return call.deadline_exceeded(f"while waiting for backend '{state}' to answer")

    def _failed(self, call: BackendCall, state: BackendState, failure: SendFailure) -> Exception:
        """What to raise after a try without a response."""
        call.note(state, failure.message)
        if failure.kind == "stale":
            state.abandon()
        else:
            call.tried.append(state)
            state.fail(failure.message)
            state.admission.release()
        if self._is_closed:
            return call.closing()
        self._refresh(call)
        return TryAgain(0.0) if call.use_free_retry(failure.kind, self._clock.now()) else self._next_try(call)

    async def _responded(
        self, call: BackendCall, state: BackendState, backend: Backend, head: ResponseHead
    ) -> BackendResponse:
        """Hand a response on, or drop it for another try."""
        message = f"answered {head.status} {head.reason}".rstrip()
        call.note(state, message)
        if head.status >= _SERVER_ERRORS:
            state.fail(message)
        else:
            state.breaker.respond()
        if is_retryable(head.status, head.headers):
            now = self._clock.now()
            if head.status < _SERVER_ERRORS:
                state.note_error(message)
            hold_seconds = requested_hold_seconds(head.status, head.headers)
            if hold_seconds > 0:
                state.admission.hold(now + hold_seconds)
            call.tried.append(state)
            pause = call.next_pause(now)
            if pause is not None:
                state.admission.release()
                await head.close()
                raise TryAgain(pause)
        return BackendResponse(head, state, backend=backend, call=call, large_answers=self._large_answers)
