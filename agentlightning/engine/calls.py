"""Requests that are being sampled: their choices, those who wait for them, and repetitions that join them.

The engine may run in a thread of its own. What it tells a call is posted to the event loop in one go for all calls
that a step concerns, since waking a loop from another thread costs as much as a small answer.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from agentlightning.engine.asking import Asked
from agentlightning.engine.base import TokenEngine
from agentlightning.engine.codec import ChatCodec, ContentDelta, Delta
from agentlightning.engine.generation import Generation
from agentlightning.engine.sequence import GenerationFuture
from agentlightning.engine.speaking import PlainText, Speech

__all__ = ["Call", "Choice", "Mailbox", "Repetitions"]


class Mailbox:
    """Runs functions in an event loop, for a thread that has many of them at once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._posted: deque[Callable[[], None]] = deque()
        self._is_due = False

    def post(self, function: Callable[[], None]) -> None:
        """Called in the loop's own thread, it runs the function at once."""
        if threading.get_ident() == self._thread:
            function()
            return
        self._posted.append(function)  # before the look: what is there when `_drain` has begun, it takes
        if not self._is_due:
            self._is_due = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._posted.clear()

    def _drain(self) -> None:
        self._is_due = False
        while self._posted:
            self._posted.popleft()()


class Choice:
    """One answer to one prompt."""

    def __init__(self, number: int, prompt: list[int], speech: Speech | None, tell: Callable[[], None] | None) -> None:
        self.number = number
        self.prompt = prompt
        self.speech = speech
        self.pieces: deque[tuple[int, float, list[Delta]]] = deque()
        """Of a stream: tokens that were not sent yet."""
        self.text: list[str] = []
        """Of an answer with stop strings: the text before them."""
        self.future: GenerationFuture | None = None
        self.is_prompt_sent = False
        """Of a stream of completions: whether the ids of the prompt were sent."""
        self._tell = tell

    def take(self, token_id: int, logprob: float) -> bool:
        """A token was sampled; whether it is the last one."""
        assert self.speech is not None
        deltas = self.speech.add(token_id)
        if self._tell is None:
            self.text += [delta.text for delta in deltas if isinstance(delta, ContentDelta)]
        else:
            self.pieces.append((token_id, logprob, deltas))
            self._tell()
        return self.speech.is_stopped

    @property
    def is_done(self) -> bool:
        return self.future is not None and self.future.done()

    @property
    def tops(self) -> list[dict[int, float]] | None:
        """The likeliest tokens at every place so far; None where they were not asked for."""
        return None if self.future is None else self.future.top_logprobs

    @property
    def generation(self) -> Generation:
        """What was sampled; raises what went wrong."""
        assert self.future is not None
        return self.future.result()


class Call:
    """One request on its way. Lives in the event loop."""

    def __init__(self, asked: Asked, engine: TokenEngine, codec: ChatCodec, mailbox: Mailbox) -> None:
        self.asked = asked
        self.engine = engine
        self.codec = codec
        self.version: int | None = None
        """Of the weights that sampled the first token of a stream."""
        self.waiting = 1
        """Clients that want the answer."""
        self.news: asyncio.Event | None = asyncio.Event() if asked.is_stream else None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._mailbox = mailbox
        self._is_telling = False
        self.choices = [
            Choice(place * asked.choices + number, prompt, self._speech(), self._tell if asked.is_stream else None)
            for place, prompt in enumerate(asked.prompts)
            for number in range(asked.choices)
        ]
        self._left = len(self.choices)

    def begin(self) -> None:
        """Have all choices sampled; raises InvalidRequest, and none is, if one of them cannot be."""
        try:
            for choice in self.choices:
                choice.future = self.engine.submit(
                    choice.prompt,
                    self.asked.sampling_of(choice.number % self.asked.choices),
                    on_token=None if choice.speech is None else choice.take,
                )
        except BaseException:
            self._cancel()
            raise
        for choice in self.choices:
            assert choice.future is not None
            choice.future.add_done_callback(self._one_done)

    def leave(self) -> None:
        """A client has gone; with the last one the sampling ends."""
        self.waiting -= 1
        if not self.waiting:
            self._cancel()

    # ------------------------------------------------------------------ parts

    def _speech(self) -> Speech | None:
        """Nothing listens to the tokens of a plain answer: it is parsed when it is complete."""
        asked = self.asked
        if not (asked.is_stream or asked.stops):
            return None
        parser = self.codec.stream(asked.tools) if asked.dialect == "chat" else PlainText(self.codec)
        return Speech(parser, asked.stops)

    def _tell(self) -> None:
        if self.version is None:
            self.version = self.engine.version
        if not self._is_telling:
            self._is_telling = True
            self._mailbox.post(self._set_news)

    def _set_news(self) -> None:
        self._is_telling = False
        if self.news is not None:
            self.news.set()

    def _one_done(self, future: Any) -> None:
        self._mailbox.post(self._count_down)

    def _count_down(self) -> None:
        self._left -= 1
        if self.news is not None:
            self.news.set()
        if not self._left and not self.done.done():
            self.done.set_result(None)

    def _cancel(self) -> None:
        for choice in self.choices:
            if choice.future is not None:
                choice.future.cancel()


class Repetitions:
    """Calls in flight, found by what was asked.

    Clients repeat a call that takes them too long, and say so. A repetition of a call that still runs is given the
    answer of that one, so that a slow model is not asked twice as much for being slow.
    """

    def __init__(self) -> None:
        self._running: dict[bytes, list[Call]] = {}
        self.joined = 0

    def add(self, key: bytes, call: Call) -> None:
        self._running.setdefault(key, []).append(call)

    def remove(self, key: bytes, call: Call) -> None:
        calls = self._running.get(key)
        if calls is not None and call in calls:
            calls.remove(call)
            if not calls:
                del self._running[key]

    def join(self, key: bytes) -> Call | None:
        """The call that is repeated. None when it does not run any more, or several ask the same: rollouts of one task
        do, each wants an answer of its own, and which of them is repeated cannot be told."""
        running = [call for call in self._running.get(key, ()) if call.waiting and not call.done.done()]
        if len(running) != 1:
            return None
        running[0].waiting += 1
        self.joined += 1
        return running[0]
