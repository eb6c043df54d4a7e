"""All backends of a proxy, and the way of a call through them: choose, wait for a place, send, try again.

A fleet lives in one event loop. `ask` gives an answer as soon as its head is there, or says in words why no backend
gave one. The list of models can be replaced at any moment: calls that were sent or stand in line stay where they are,
later ones see the new list, and backends that are in both keep what is known of them. A backend whose entry has another
version or another name of the model is the same one; calls in line for it go out under the new name and version.
"""

import operator
import random
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

from agentlightning.llm_proxy.backends.admission import Admission
from agentlightning.llm_proxy.backends.answer import Answer, Reply
from agentlightning.llm_proxy.backends.asking import Ask
from agentlightning.llm_proxy.backends.backend import Backend
from agentlightning.llm_proxy.backends.clock import Clock
from agentlightning.llm_proxy.backends.course import Course
from agentlightning.llm_proxy.backends.errors import DialectNotServed
from agentlightning.llm_proxy.backends.health import HealthWatch
from agentlightning.llm_proxy.backends.lane import Lane
from agentlightning.llm_proxy.backends.litellm_library import LibrarySender
from agentlightning.llm_proxy.backends.providers import backend_of
from agentlightning.llm_proxy.backends.retries import is_passing, wished_hold_seconds
from agentlightning.llm_proxy.backends.routing import Table
from agentlightning.llm_proxy.backends.sending import Failure, Sender
from agentlightning.utils.deadline import within

__all__ = ["Fleet"]

DEFAULT_DEADLINE_SECONDS: Final = 600.0
_REDIRECTS: Final = range(300, 400)
_SERVER_ERRORS: Final = 500


class Fleet:
    """The backends of one proxy."""

    def __init__(
        self,
        model_list: Iterable[Mapping[str, Any]],
        *,
        num_retries: int = 0,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """
        Args:
            num_retries: Further tries of a call after failures that may pass.
            deadline_seconds: Time until an answer must have begun, for calls that name no deadline; waiting in line
                and all tries included.
            chance: Where the jitter of pauses comes from.
        """
        self._num_retries = num_retries
        self._deadline_seconds = deadline_seconds
        self._clock = clock or Clock()
        self._chance = chance or random.Random()
        self._sender = Sender()
        self._library = LibrarySender()
        self._retired: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._table = Table([])
        self._watch = HealthWatch(self._sender, self._clock, lambda: self._table.lanes)
        self._is_closed = False
        self.replace(model_list)

    # ------------------------------------------------------------------ the list

    def replace(self, model_list: Iterable[Mapping[str, Any]]) -> frozenset[str]:
        """Serve this list from the next call on; a list that cannot be read changes nothing.

        Returns:
            The names of the backends that stay, under the names they had.
        """
        backends = [backend_of(entry, number) for number, entry in enumerate(model_list)]
        left = list(self._table.lanes)
        kept: dict[int, Lane] = {}
        names: set[str] = set()
        for is_same in (operator.eq, Backend.is_updated_by):  # an equal one is found before one that only resembles it
            for number, backend in enumerate(backends):
                same = None if number in kept else next((lane for lane in left if is_same(lane.backend, backend)), None)
                if same is None:
                    continue
                left.remove(same)
                if same.backend.name == backend.name:
                    names.add(backend.name)
                same.update(backend)
                kept[number] = same
        keys = {lane.key for lane in kept.values()}
        lanes = [kept.get(number) or self._new_lane(backend, keys) for number, backend in enumerate(backends)]
        self._retired.update(left)
        self._table = Table(lanes)
        return frozenset(names)

    def models(self) -> list[str]:
        """The names agents may ask for, in the order of the list."""
        return self._table.models

    def describe(self) -> list[dict[str, Any]]:
        """The state of every backend in plain values, without secrets."""
        return [lane.describe() for lane in self._table.lanes]

    def backends(self) -> list[Backend]:
        """Every backend, in the order of the list."""
        return [lane.backend for lane in self._table.lanes]

    async def close(self) -> None:
        """Close all connections; calls in line or in flight end with an error."""
        self._is_closed = True
        for lane in (*self._table.lanes, *self._retired):
            lane.gate.send_away()
        await self._watch.close()
        await self._sender.close()

    async def __aenter__(self) -> "Fleet":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _new_lane(self, backend: Backend, keys: set[str]) -> Lane:
        lane = Lane(backend, self._clock, on_open=lambda _: self._look_after())
        while lane.key in keys:
            lane = Lane(backend, self._clock, on_open=lambda _: self._look_after(), nth=lane.nth + 1)
        keys.add(lane.key)
        lane.turn = min(
            (other.turn for other in self._table.lanes if other.backend.model_name == backend.model_name), default=0.0
        )
        return lane

    def _look_after(self) -> None:
        if not self._is_closed:
            self._watch.start()

    # ------------------------------------------------------------------ one call

    async def ask(self, ask: Ask) -> Answer:
        """Have a call answered.

        Raises UnknownModel, VersionNotServed, BackendUnavailable, DeadlineExceeded, or what `prepare` raises. An
        answer with an error status that trying again did not mend is an answer.
        """
        now = self._clock.now()
        deadline = now + self._deadline_seconds if ask.deadline is None else ask.deadline
        course = Course(ask, deadline, self._num_retries, self._table.group_of(ask.model, ask.resources_id))
        while True:
            lane = await self._admitted(course)
            answer = await self._try(course, lane)
            if answer is not None:
                return answer

    async def _admitted(self, course: Course) -> Lane:
        """The backend of the next try, entered."""
        ask = course.ask
        while True:
            now = self._clock.now()
            if self._is_closed:
                raise course.closing()
            if now >= course.deadline:
                raise course.too_late(f"before a backend of '{ask.model}' was asked")
            lane = course.choose(now)
            if lane is None:
                pause = course.pause(now, self._chance)
                if pause is None:
                    raise course.unavailable(now)
                await self._clock.sleep(pause)
                self._look_again(course)
            elif lane.gate.enter_at_once(now) or await self._waited(course, lane, now) is Admission.ENTERED:
                return lane
            else:
                self._look_again(course)

    async def _waited(self, course: Course, lane: Lane, now: float) -> Admission:
        """How it ended to stand in line for a backend."""
        gate = lane.gate
        closed_seconds = gate.closed_for(now)
        if now + closed_seconds >= course.deadline:
            raise course.on_hold(lane, closed_seconds)
        try:
            admission = await gate.enter(course.ask.who, course.deadline)
        finally:
            course.waited_seconds += self._clock.now() - now
        if admission is Admission.EXPIRED:
            raise course.too_late(f"in line for backend '{lane}', where {gate.waiting + 1} calls were waiting")
        return admission

    def _look_again(self, course: Course) -> None:
        """See the present list, for a call that was not sent yet or failed; one that left the list keeps its own."""
        course.group = self._table.find(course.ask.model, course.ask.resources_id) or course.group

    async def _try(self, course: Course, lane: Lane) -> Answer | None:
        """One try at a backend that was entered: the answer, or None if there shall be another try."""
        now = self._clock.now()
        lane.breaker.begin(now)
        sender = self._sender if lane.backend.provider != "litellm" else self._library
        try:
            backend = lane.called(course.ask.model)
            outgoing = course.ask.prepare(backend)
            outcome = await within(course.deadline - now, sender.send(lane, backend, outgoing))
        except TimeoutError:
            outcome = None
        except DialectNotServed:
            self._gave_back(lane)
            course.unfit.append(lane)
            if not course.has_fit:
                raise
            return None
        except BaseException:
            self._gave_back(lane)
            raise
        if outcome is None:
            raise self._out_of_time(course, lane, now)
        if isinstance(outcome, Reply):
            if outcome.status not in _REDIRECTS:
                return await self._replied(course, lane, backend, outcome)
            await outcome.body.close()
            outcome = Failure(f"redirects elsewhere ({outcome.status}): give the final address as api_base", "garbled")
        await self._failed(course, lane, outcome)
        return None

    def _gave_back(self, lane: Lane) -> None:
        """Leave a backend of which nothing was learned."""
        lane.breaker.abandoned(self._clock.now())
        lane.gate.leave()

    def _out_of_time(self, course: Course, lane: Lane, began: float) -> Exception:
        """A backend that was silent until the deadline; for most of its own time-out, that is a failure of it."""
        words = f"did not begin to answer within the {self._clock.now() - began:.1f} s left to the call"
        course.note(lane, words)
        if self._clock.now() - began >= lane.backend.timeout / 2:
            lane.failed(words, curable=False)
            lane.gate.leave()
        else:
            self._gave_back(lane)
        return course.too_late(f"while waiting for backend '{lane}' to answer")

    async def _failed(self, course: Course, lane: Lane, failure: Failure) -> None:
        """Prepare the next try after one without an answer, or raise."""
        course.note(lane, failure.words)
        if failure.kind == "stale":
            self._gave_back(lane)
        else:
            course.tried.append(lane)
            lane.failed(failure.words, curable=failure.is_curable)
            lane.gate.leave()
        if self._is_closed:
            raise course.closing()
        now = self._clock.now()
        self._look_again(course)
        if course.takes_spare(failure.kind, now):
            return
        pause = course.pause(now, self._chance)
        if pause is None:
            raise course.unavailable(now)
        if pause > 0:
            await self._clock.sleep(pause)

    async def _replied(self, course: Course, lane: Lane, backend: Backend, reply: Reply) -> Answer | None:
        """Hand an answer on, or drop it for another try."""
        words = f"answered {reply.status} {reply.reason}".rstrip()
        course.note(lane, words)
        now = self._clock.now()
        if reply.status >= _SERVER_ERRORS:
            lane.failed(words, curable=False)
        else:
            lane.breaker.answered()
        if is_passing(reply.status, reply.headers):
            if reply.status < _SERVER_ERRORS:
                lane.note(words)
            hold_seconds = wished_hold_seconds(reply.status, reply.headers)
            if hold_seconds > 0:
                lane.gate.hold(now + hold_seconds)
            course.tried.append(lane)
            pause = course.pause(now, self._chance)
            if pause is not None:
                lane.gate.leave()
                await reply.body.close()
                if pause > 0:
                    await self._clock.sleep(pause)
                self._look_again(course)
                return None
        return Answer(reply, lane, backend=backend, tries=course.tries, waited_seconds=course.waited_seconds)
