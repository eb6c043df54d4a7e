"""The inference engine: token ids in; sampled ids, their log-probabilities, a reason to end and a weights version out.

Requests come from any thread and are sampled together: between two steps of those that run, new ones are read into free
slots and finished ones leave theirs (continuous batching). New weights are taken over between steps too; sequences that
run go on with the keys and values they have. The engine knows no chat and no HTTP.

Rounds run in a thread of the engine's own, or, where a round costs less than handing it to another thread would, in
the event loop that serves its callers: there, everything that arrived while one round ran takes part in the next.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from typing_extensions import Self

from agentlightning.engine.batch import PREFILL_TOKENS, Batch
from agentlightning.engine.model import CausalModel, is_small
from agentlightning.engine.sampling import GenerationFuture, OnToken, Sampling, SequenceState
from agentlightning.engine.weights import check_finite, check_shapes
from agentlightning.errors import EngineError, InvalidRequest
from agentlightning.utils.json_values import JsonObject

logger = logging.getLogger(__name__)

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
