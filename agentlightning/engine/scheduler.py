"""The inference engine: token ids in; sampled ids, their log-probabilities, a reason to end and a weights version out.

Requests come from any thread and are sampled together: between two steps of those that run, new ones are read into free
slots and finished ones leave theirs (continuous batching). New weights are taken over between steps too; sequences that
run go on with the keys and values they have. The engine knows no chat and no HTTP.

Rounds run in a thread of the engine's own, or, where a round costs less than handing it to another thread would, in the
event loop that serves its callers: there, everything that arrived while one round ran takes part in the next.

`Call` is a request in flight: its choices, and how the event loop learns of what was sampled. Where the engine runs in
a thread of its own, its notices are posted to the event loop in one go for all calls that a step concerns, since waking
a loop from another thread costs as much as a small response.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from typing_extensions import Self

from agentlightning.dialects import CHAT
from agentlightning.engine.base import TokenEngine
from agentlightning.engine.batch import PREFILL_TOKENS, Batch
from agentlightning.engine.codec import ChatCodec, ContentDelta, Delta, StoppedParser, TextParser
from agentlightning.engine.model import CausalModel, is_small
from agentlightning.engine.sampling import Generation, GenerationFuture, OnToken, Sampling, SequenceState
from agentlightning.engine.weights import check_finite, check_shapes
from agentlightning.errors import EngineError, InvalidRequest
from agentlightning.utils.json_values import JsonObject

if TYPE_CHECKING:
    from agentlightning.engine.completions import CompletionRequest

logger = logging.getLogger(__name__)


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
        self, request: "CompletionRequest", engine: TokenEngine, codec: ChatCodec, callbacks: CallbackQueue
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
                    plain = codec.stream(request.tools) if request.dialect is CHAT else TextParser(codec)
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


# ---------------------------------------------------------------------- scheduler


JOIN_SECONDS: Final = 30.0
"""How long the last round may take when the engine is closed."""
SHORTEST_LENGTH: Final = 2
"""A token of the prompt and one of the response."""


@dataclass(frozen=True)
class _NewWeights:
    version: int
    tensors: Mapping[str, Tensor]
    taken: "Future[None]" = field(default_factory=Future)


class InferenceEngine:
    """Samples from one model for many callers. `start` it, and `close` it."""

    def __init__(self, model: CausalModel, *, max_sequences: int = 64, max_length: int | None = None) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            model: Belongs to the engine from now on.
            max_sequences: Sampled together at most; others wait.
            max_length: Tokens of prompt and answer together, if fewer than the model can take; EngineError for more.
        """
        if max_sequences < 1:
            raise EngineError(f"max_sequences is {max_sequences}; at least 1 is needed.")
        self.max_length = model.max_length if max_length is None else max_length
        if not SHORTEST_LENGTH <= self.max_length <= model.max_length:
            raise EngineError(
                f"max_length is {self.max_length}; model '{model.name}' takes {SHORTEST_LENGTH} to {model.max_length} "
                "tokens of prompt and answer together."
            )
        self.model = model
        self.max_sequences = max_sequences
        self.version = 0
        """Of the weights that are sampled from; 0 until `load_weights`."""
        self._batch = Batch(model, slots=max_sequences, length=self.max_length)
        self._shapes = model.state_shapes()
        self._draw = random.Random().random
        self._changing = threading.Condition()  # protects what follows, and tells the thread of arrivals
        self._arrived: deque[SequenceState] = deque()
        self._weights: deque[_NewWeights] = deque()
        self._is_closed = False
        self._waiting: deque[SequenceState] = deque()  # of the rounds alone
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._is_round_due = False
        self._requests = self._cancelled = self._loads = 0
        self._busy_seconds = 0.0

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> GenerationFuture:
        """Sample from a prompt; returns at once. InvalidRequest where that cannot be done.

        Args:
            prompt_ids: What is read; at least one token of the model's vocabulary.
            on_token: Called with every token and its log-probability in the thread of the rounds; must be quick.

        Returns:
            The generation. `cancel()` ends it at the next step with what there is, as `finish_reason` "cancelled".
        """
        self._check(prompt_ids, sampling)
        stop_ids = self.model.end_ids | sampling.stop_ids
        limit = min(sampling.max_new_tokens, self.max_length - len(prompt_ids))
        sequence = SequenceState(
            prompt_ids, sampling, stop_ids=stop_ids, limit=limit, draw=self._draw, on_token=on_token
        )
        with self._changing:
            self._refuse_if_closed()
            self._arrived.append(sequence)
            self._requests += 1
            self._wake()
        return sequence.future

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> "Future[None]":
        """Sample from other weights, from the next step on; EngineError in the future, and nothing changed, if they
        do not fit the model. They are looked through here, which for large models takes a while, and not in a round."""
        new = _NewWeights(version, tensors)
        try:
            check_shapes(tensors, self._shapes)
            check_finite(tensors)
        except EngineError as error:
            new.taken.set_exception(error)
            return new.taken
        with self._changing:
            self._refuse_if_closed()
            self._weights.append(new)
            self._wake()
        return new.taken

    def statistics(self) -> JsonObject:
        """Counts since the start, and how it is now."""
        batch = self._batch
        with self._changing:
            return {
                "weights_version": self.version,
                "weights_loads": self._loads,
                "requests": self._requests,
                "running": batch.running,
                "waiting": len(self._waiting) + len(self._arrived),
                "cancelled": self._cancelled,
                "failed": batch.failed,
                "steps": batch.steps,
                "prompt_tokens": batch.read,
                "sampled_tokens": batch.sampled,
                "busy_seconds": self._busy_seconds,
                "max_sequences": self.max_sequences,
                "max_length": self.max_length,
            }

    # ------------------------------------------------------------------ life

    @property
    def name(self) -> str:
        return self.model.name

    def start_serving(self) -> None:
        """Run rounds in the running event loop, between its looks at its sockets, if the model's steps are short."""
        if not is_small(self.model):
            self.start()
            return
        self._refuse_if_started()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        with self._changing:
            if self._has_work():
                self._wake()

    def start(self) -> None:
        """Run rounds in a thread of the engine's own."""
        self._refuse_if_started()
        self._thread = threading.Thread(target=self._run, name="agl-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; requests that have no answer yet get an EngineError. In loop mode, called in that loop."""
        with self._changing:
            self._is_closed = True
            self._changing.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                raise EngineError(f"The engine's last step did not end within {JOIN_SECONDS:g} s.")
            self._thread = None
        self._loop = None
        error = EngineError("The engine was closed before the answer was complete.")
        self._batch.fail_all(error)
        for sequence in (*self._waiting, *self._arrived):
            sequence.fail(error)
        for new in self._weights:
            new.taken.set_exception(error)
        for left in (self._waiting, self._arrived, self._weights):
            left.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ rounds

    def _run(self) -> None:
        while True:
            with self._changing:
                while not (self._is_closed or self._has_work()):
                    self._changing.wait()
                if self._is_closed:
                    return
            self._round()

    def _run_in_loop(self) -> None:
        self._is_round_due = False
        if self._is_closed or self._loop is None:
            return
        self._round()
        with self._changing:
            if self._has_work():
                self._wake()

    def _round(self) -> None:
        """Take over weights, let sequences in and out, and sample one token for each."""
        began = time.monotonic()
        try:
            self._take_weights()
            with torch.inference_mode():
                self._cancelled += self._batch.drop_cancelled()
                arriving = self._admissible()
                if arriving:
                    self._batch.admit(arriving, self.version)
                self._batch.step(self.version)
        except Exception as error:  # a mistake of ours: its victims hear of it, the next ones are served
            logger.exception("A round of the engine failed.")
            self._batch.fail_all(EngineError(f"A round of the engine failed: {error!r}"))
        self._busy_seconds += time.monotonic() - began

    def _take_weights(self) -> None:
        while self._weights:
            with self._changing:
                new = self._weights.popleft()
            try:
                with torch.no_grad():
                    self.model.load_state(new.tensors)
                if self.model.device.type == "cuda":
                    torch.cuda.synchronize(self.model.device)  # the memory may be the trainer's, which goes on then
            except Exception as error:  # noqa: BLE001 # is raised where the weights came from
                failure = EngineError(f"The weights of version {new.version} could not be loaded: {error}")
                failure.__cause__ = error
                new.taken.set_exception(failure)
            else:
                self.version = new.version
                self._loads += 1
                new.taken.set_result(None)
            finally:
                self._batch.forget_prefixes()

    def _admissible(self) -> list[SequenceState]:
        """Those who find a slot now, first come, first served; only so many that the others do not wait long."""
        with self._changing:
            self._waiting.extend(self._arrived)
            self._arrived.clear()
        admitted: list[SequenceState] = []
        free, tokens = self._batch.free, 0
        while self._waiting and len(admitted) < free and tokens < PREFILL_TOKENS:
            sequence = self._waiting.popleft()
            if sequence.future.is_cancel_requested:
                self._cancelled += 1
                sequence.finish("cancelled")
                continue
            admitted.append(sequence)
            tokens += len(sequence.prompt)
        return admitted

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """An id that is no token would fail the step of all sequences that share it."""
        if not prompt_ids:
            raise InvalidRequest("The prompt is empty; at least one token is needed.")
        if len(prompt_ids) >= self.max_length:
            raise InvalidRequest(
                f"The prompt has {len(prompt_ids)} tokens; the context of {self.max_length} tokens leaves no room "
                "for an answer."
            )
        size = self.model.vocab_size
        if min(prompt_ids) < 0 or max(prompt_ids) >= size:
            raise InvalidRequest(f"The prompt holds ids outside the vocabulary of {size} tokens.")
        for token in sampling.stop_ids:
            if not 0 <= token < size:
                raise InvalidRequest(f"The stop token {token} is outside the vocabulary of {size} tokens.")

    def _has_work(self) -> bool:
        return bool(self._arrived or self._weights or self._waiting) or self._batch.running > 0

    def _wake(self) -> None:
        """Have a round run; the caller holds the lock."""
        if self._loop is None:
            self._changing.notify_all()
        elif not self._is_round_due:
            self._is_round_due = True
            if threading.get_ident() == self._loop_thread:
                self._loop.call_soon(self._run_in_loop)
            else:
                self._loop.call_soon_threadsafe(self._run_in_loop)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError("The engine is closed.")

    def _refuse_if_started(self) -> None:
        self._refuse_if_closed()
        if self._thread is not None or self._loop is not None:
            raise EngineError("The engine runs already.")
