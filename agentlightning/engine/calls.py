"""Requests in flight: their choices, and how the event loop learns of what was sampled.

The engine may run in a thread of its own. Its notices are posted to the event loop in one go for all calls that a step
concerns, since waking a loop from another thread costs as much as a small response.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from agentlightning.engine.base import TokenEngine
from agentlightning.engine.codec import ChatCodec, ContentDelta, Delta
from agentlightning.engine.requests import CompletionRequest
from agentlightning.engine.sampling import Generation, GenerationFuture
from agentlightning.engine.stop_text import StoppedParser, TextParser


class CallbackQueue:
    """Runs functions in an event loop, for a thread that has many of them at once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._posted: deque[Callable[[], None]] = deque()
        self._is_due = False

    def post(self, function: Callable[[], None]) -> None:
        """Run a function in the loop; at once, if called in the loop's own thread."""
        if threading.get_ident() == self._thread:
            function()
            return
        self._posted.append(function)  # before the check: `_drain` takes what is there when it begins
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
    """One response to one prompt, and how much of it a stream has sent."""

    def __init__(self, index: int, prompt: list[int], parser: StoppedParser | None, notify: Callable[[], None]) -> None:
        self.index = index
        self.prompt = prompt
        self.parser = parser
        """None where the tokens are parsed when all are there."""
        self.pieces: deque[tuple[int, float, list[Delta]]] = deque()
        """Tokens that were parsed and not sent yet."""
        self.future: GenerationFuture | None = None
        self.deltas: list[Delta] = []
        """Of a stream: everything that was sent."""
        self.sent_tokens = 0
        self.has_begun = self.has_ended = False
        """Of a stream: whether its first and its last chunk were sent."""
        self._notify = notify

    def take(self, token_id: int, logprob: float) -> bool:
        """Take a sampled token; whether it is the last one."""
        assert self.parser is not None
        self.pieces.append((token_id, logprob, self.parser.add(token_id)))
        self._notify()
        return self.parser.is_stopped

    def text_before_stop(self) -> str | None:
        """Of a whole response that a stop string ended."""
        if self.parser is None or not self.parser.is_stopped:
            return None
        deltas = [delta for _, _, deltas in self.pieces for delta in deltas]
        return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))

    @property
    def is_done(self) -> bool:
        return self.future is not None and self.future.done()

    @property
    def generation(self) -> Generation:
        """What was sampled; raises what went wrong."""
        assert self.future is not None
        return self.future.result()


class Call:
    """One request in flight. Lives in the event loop."""

    def __init__(
        self, request: CompletionRequest, engine: TokenEngine, codec: ChatCodec, callbacks: CallbackQueue
    ) -> None:
        self.request = request
        self.version: int | None = None
        """Of the weights that sampled the first token of a stream."""
        self.updated = asyncio.Event()
        """Set when something was sampled, or has ended."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._callbacks = callbacks
        self.choices: list[Choice] = []
        for prompt in request.prompts:
            for _ in range(request.choices):
                parser: StoppedParser | None = None
                if request.is_stream or request.stops:
                    plain = codec.stream(request.tools) if request.is_chat else TextParser(codec)
                    parser = StoppedParser(plain, request.stops)
                self.choices.append(Choice(len(self.choices), prompt, parser, self._notify))
        self._left = len(self.choices)

    def begin(self) -> None:
        """Have all choices sampled; raises InvalidRequest, and none is, if one of them cannot be."""
        try:
            for choice in self.choices:
                sampling = self.request.sampling_of(choice.index % self.request.choices)
                on_token = None if choice.parser is None else choice.take
                choice.future = self._engine.submit(choice.prompt, sampling, on_token=on_token)
        except BaseException:
            self.cancel()
            raise
        for choice in self.choices:
            assert choice.future is not None
            choice.future.add_done_callback(lambda _: self._callbacks.post(self._count_down))

    def _notify(self) -> None:
        if self.version is None:
            self.version = self._engine.version
        if self.request.is_stream:
            self._callbacks.post(self.updated.set)

    def _count_down(self) -> None:
        self._left -= 1
        self.updated.set()
        if not self._left and not self.done.done():
            self.done.set_result(None)

    def cancel(self) -> None:
        """End the sampling: the client has gone."""
        for choice in self.choices:
            if choice.future is not None:
                choice.future.cancel()
