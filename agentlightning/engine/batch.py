"""The sequences that are sampled together, each in a slot of the model's cache.

Slots without gaps are what makes a step one call: the model reads the slots 0 to n-1. New sequences take the gaps that
finished ones left, and what is left of the gaps is closed with sequences from the end. A step that fails fails the
sequences that took part in it, and no other.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from agentlightning.engine.model import CausalModel
from agentlightning.engine.picking import pick
from agentlightning.engine.sequence import Running
from agentlightning.errors import EngineError

__all__ = ["Batch"]

logger = logging.getLogger(__name__)

PREFILL_TOKENS: Final = 8192
"""Of prompts, padding included, that are read in one call; a longer one is read alone."""
_CHEAP_PADDING: Final = 1024
"""Tokens of padding that cost less than another call."""
_PADDING_SHARE: Final = 0.5
"""Of the tokens of the prompts, that may be padding beyond that."""


class Batch:
    """Belongs to the thread that runs the engine's rounds."""

    def __init__(self, model: CausalModel, *, slots: int, length: int) -> None:
        self.model = model
        self.slots = slots
        self.length = length
        self.sampled = 0
        self.read = 0
        """Tokens of prompts."""
        self.steps = 0
        self.failed = 0
        """Sequences whose step failed."""
        self._cache: Any = None
        self._is_cache_bad = False
        """Whether it holds values that are no numbers; a mask does not keep them from who takes their slot next."""
        self._occupied: list[Running | None] = []

    @property
    def running(self) -> int:
        return sum(sequence is not None for sequence in self._occupied)

    @property
    def free(self) -> int:
        """Slots for new sequences; none while those that run hold on to a cache that must be made anew."""
        running = self.running
        return 0 if self._is_cache_bad and running else self.slots - running

    def drop_cancelled(self) -> int:
        """End the sequences nobody waits for any more; how many they were."""
        dropped = 0
        for slot, sequence in enumerate(self._occupied):
            if sequence is not None and sequence.future.is_cancel_requested:
                sequence.finish("cancelled")
                self._occupied[slot] = None
                dropped += 1
        return dropped

    def admit(self, arriving: Sequence[Running], version: int) -> None:
        """Read the prompts of new sequences, and sample their first tokens; there must be slots for all of them."""
        if self._is_cache_bad:
            self._cache, self._is_cache_bad = None, False
        for group in _grouped(arriving):
            slots = self._take_slots(group)
            try:
                logits = self._read(group, slots)
            except Exception as error:  # noqa: BLE001 # whatever went wrong belongs to the callers of this step
                self._fail(slots, error)
            else:
                self._sample(logits, slots, version)

    def step(self, version: int) -> None:
        """Sample one more token for every sequence."""
        self._close_gaps()
        count = len(self._occupied)
        if not count:
            return
        self.steps += 1
        slots = range(count)
        sequences = self._at(slots)
        device = self.model.device
        try:
            tokens = torch.tensor([sequence.token_ids[-1] for sequence in sequences], device=device)
            positions = torch.tensor([sequence.cached for sequence in sequences], device=device)
            logits = self.model.decode(tokens, positions, self._cache, count)
        except Exception as error:  # noqa: BLE001 # as above
            self._fail(slots, error)
        else:
            self._sample(logits, slots, version)

    def fail_all(self, error: Exception) -> None:
        """End everything with an error."""
        for sequence in self._occupied:
            if sequence is not None:
                sequence.fail(error)
        self._occupied.clear()

    # ------------------------------------------------------------------ parts

    def _read(self, group: Sequence[Running], slots: Sequence[int]) -> Tensor:
        device = self.model.device
        if self._cache is None:
            self._cache = self.model.new_cache(self.slots, self.length)
        longest = max(len(sequence.prompt) for sequence in group)
        rows = [[*sequence.prompt, *[0] * (longest - len(sequence.prompt))] for sequence in group]
        lengths = torch.tensor([len(sequence.prompt) for sequence in group], device=device)
        self.read += sum(len(sequence.prompt) for sequence in group)
        return self.model.prefill(
            torch.tensor(rows, device=device), lengths, self._cache, torch.tensor(slots, device=device)
        )

    def _sample(self, logits: Tensor, slots: Sequence[int], version: int) -> None:
        sequences = self._at(slots)
        try:
            picked = pick(logits, sequences)
        except Exception as error:  # noqa: BLE001 # as above
            self._fail(slots, error)
            return
        self.sampled += len(sequences)
        for number, (slot, sequence) in enumerate(zip(slots, sequences, strict=True)):
            logprob = picked.logprobs[number]
            if logprob != logprob:
                self._is_cache_bad = True
                self._end(slot, EngineError(f"The weights of version {version} give no numbers for this prompt (NaN)."))
                continue
            if sequence.top_logprobs is not None and picked.top_logprobs is not None:
                likeliest = picked.top_logprobs[number].items()
                sequence.top_logprobs.append(dict(list(likeliest)[: sequence.sampling.top_logprobs]))
            try:
                reason = sequence.add(picked.token_ids[number], logprob, version)
            except Exception as error:  # noqa: BLE001 # of the caller's own function
                self._end(slot, EngineError(f"The function that takes the tokens failed: {error!r}"))
                continue
            if reason is not None:
                self._occupied[slot] = None
                sequence.finish(reason)

    def _at(self, slots: Sequence[int]) -> list[Running]:
        sequences = [self._occupied[slot] for slot in slots]
        return [sequence for sequence in sequences if sequence is not None]

    def _take_slots(self, group: Sequence[Running]) -> list[int]:
        gaps = (slot for slot, sequence in enumerate(self._occupied) if sequence is None)
        taken = []
        for sequence in group:
            slot = next(gaps, len(self._occupied))
            if slot == len(self._occupied):
                self._occupied.append(sequence)
            else:
                self._occupied[slot] = sequence
            taken.append(slot)
        return taken

    def _close_gaps(self) -> None:
        occupied = self._occupied
        for slot in range(len(occupied)):
            while occupied and occupied[-1] is None:
                occupied.pop()
            if slot >= len(occupied):
                return
            last = occupied[-1]
            if occupied[slot] is None and last is not None:
                self.model.move(self._cache, len(occupied) - 1, slot, last.cached)
                occupied[slot] = last
                occupied.pop()

    def _end(self, slot: int, error: EngineError) -> None:
        sequence = self._occupied[slot]
        self._occupied[slot] = None
        self.failed += 1
        if sequence is not None:
            sequence.fail(error)

    def _fail(self, slots: Sequence[int], error: Exception) -> None:
        logger.warning("A step of the model failed for %d sequences.", len(slots), exc_info=error)
        for slot in slots:
            failure = EngineError(f"A step of the model failed: {error!r}")
            failure.__cause__ = error
            self._end(slot, failure)
        if not self.running:
            self._cache = None  # whatever state the failure left it in


def _grouped(arriving: Sequence[Running]) -> Iterator[list[Running]]:
    """Sequences that are read in one call: of similar length, and not too many at once."""
    group: list[Running] = []
    tokens = 0
    for sequence in sorted(arriving, key=lambda sequence: len(sequence.prompt)):
        length = len(sequence.prompt)
        area = length * (len(group) + 1)
        padding = area - tokens - length
        if group and (area > PREFILL_TOKENS or padding > max(_CHEAP_PADDING, _PADDING_SHARE * (tokens + length))):
            yield group
            group, tokens = [], 0
        group.append(sequence)
        tokens += length
    if group:
        yield group
