"""The sequences that are sampled together, each in a slot of the model's cache.

Slots without gaps are what makes a step one call: the model reads the slots 0 to n-1. New sequences take the gaps that
finished ones left, and what is left of the gaps is closed with sequences from the end. A step that fails fails the
sequences that took part in it, and no other.

Where the model can go on reading after a prefix, what a finished sequence left in its slot stays there until the slot
is needed, and a prompt that begins as another did reads only what is new. The rollouts of a group begin with the same
prompt, and each turn of a conversation begins with the turns before it. Tokens are compared in blocks, found by the
hash of everything up to the end of the block.

The next token of every row is chosen by the row's own wishes, in a few operations for all. A row draws one number from
its own source and takes the token where the summed probabilities pass it. So a request with a seed gets the same tokens
whichever requests share the batch with it, as long as the logits are the same.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from agentlightning.engine.model import CausalModel
from agentlightning.engine.sampling import SequenceState
from agentlightning.errors import EngineError

logger = logging.getLogger(__name__)

PREFILL_TOKENS: Final = 8192
"""Of prompts, padding included, that are read in one call; a longer one is read alone."""
BLOCK: Final = 32
"""Tokens; fewer in common are not worth the search."""


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
        self._cache: object = None
        self._is_cache_bad = False
        """Whether it holds values that are no numbers; a mask does not keep them from who takes their slot next."""
        self._occupied: list[SequenceState | None] = []
        self._held = HeldPrefixes()

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
                self._release(slot, sequence)
                sequence.finish("cancelled")
                dropped += 1
        return dropped

    def forget_prefixes(self) -> None:
        """What slots hold is of other weights than those that read next; sequences that run go on with it."""
        self._held.clear()
        for sequence in self._occupied:
            if sequence is not None:
                sequence.is_of_current_weights = False

    def admit(self, arriving: Sequence[SequenceState], version: int) -> None:
        """Read the prompts of new sequences, and sample their first tokens; there must be slots for all of them."""
        if self._is_cache_bad:
            self._drop_cache()
        while arriving:
            first, arriving = self._first_readers(arriving)
            for sequence in first:
                match = self._held.longest(sequence.prompt[:-1])
                sequence.shared = 0 if match is None else match.length
            for group in _grouped(first):
                self._admit_group(group, version)

    def _admit_group(self, group: Sequence[SequenceState], version: int) -> None:
        slots: list[int] = []
        with self._failing(slots, group):
            if self._cache is None:
                self._cache = self.model.new_cache(self.slots, self.length)
            for sequence in group:
                slots.append(self._take_slot(sequence))  # noqa: PERF401 # those before one that fails are known
            logits = self._read(group, slots)
            if self.model.shares_prefixes:
                for slot, sequence in zip(slots, group, strict=True):
                    self._held.hold(slot, sequence.prompt)
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
        with self._failing(slots):
            tokens = torch.tensor([sequence.token_ids[-1] for sequence in sequences])
            positions = torch.tensor([sequence.cached for sequence in sequences])
            logits = self.model.decode(tokens, positions, self._cache, count)
            self._sample(logits, slots, version)

    def fail_all(self, error: Exception) -> None:
        """End everything with an error."""
        for sequence in self._occupied:
            if sequence is not None:
                sequence.fail(error)
        self._occupied.clear()

    def _first_readers(self, arriving: Sequence[SequenceState]) -> tuple[list[SequenceState], list[SequenceState]]:
        """Those to read now, and those that share so much with one of them that it pays to read it first."""
        if not self.model.shares_prefixes or len(arriving) == 1:
            return list(arriving), []
        # A prompt with which others of the round have so many tokens in common is read first; they go on after it.
        least = BLOCK if self.model.device.type == "cpu" else 256
        first: list[SequenceState] = []
        later: list[SequenceState] = []
        prompts = HeldPrefixes()
        for number, sequence in enumerate(arriving):
            prompt = sequence.prompt[:-1]
            held, among_them = self._held.longest(prompt), prompts.longest(prompt)
            gain = 0 if among_them is None else among_them.length - (0 if held is None else held.length)
            if gain >= least:
                later.append(sequence)
            else:
                first.append(sequence)
                prompts.hold(number, sequence.prompt)
        return first, later

    def _read(self, group: Sequence[SequenceState], slots: Sequence[int]) -> Tensor:
        """Read what is new of the prompts."""
        lengths = [len(sequence.prompt) - sequence.shared for sequence in group]
        longest = max(lengths)
        rows = [
            [*sequence.prompt[sequence.shared :], *[0] * (longest - length)]
            for sequence, length in zip(group, lengths, strict=True)
        ]
        self.read += sum(lengths)
        starts = [sequence.shared for sequence in group]
        return self.model.prefill(
            torch.tensor(rows),
            torch.tensor(lengths),
            self._cache,
            torch.tensor(slots),
            torch.tensor(starts) if any(starts) else None,
        )

    def _sample(self, logits: Tensor, slots: Sequence[int], version: int) -> None:
        sequences = self._at(slots)
        picked = sample_tokens(logits, sequences)
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
                self._release(slot, sequence)
                sequence.finish(reason)

    def _at(self, slots: Sequence[int]) -> list[SequenceState]:
        sequences = [self._occupied[slot] for slot in slots]
        return [sequence for sequence in sequences if sequence is not None]

    def _take_slot(self, sequence: SequenceState) -> int:
        """A slot without a gap before it, with as much of the prompt in it as is known."""
        occupied = self._occupied
        place = next((slot for slot, one in enumerate(occupied) if one is None), len(occupied))
        match = self._held.longest(sequence.prompt[:-1]) if sequence.shared else None
        sequence.shared = 0 if match is None else match.length
        if match is not None and self._is_free(match.slot):
            if match.slot != place:
                self._swap(match.slot, place)
        else:
            if place in self._held:
                self._vacate(place)
            if match is not None:
                self.model.move(self._cache, [match.slot], [place], match.length)
        if place == len(occupied):
            occupied.append(sequence)
        else:
            occupied[place] = sequence
        return place

    def _is_free(self, slot: int) -> bool:
        return slot >= len(self._occupied) or self._occupied[slot] is None

    def _vacate(self, place: int) -> None:
        """Keep what a free slot holds in the free slot that can best do without what it holds."""
        other = self._held.least_recent(slot for slot in range(self.slots) if self._is_free(slot))
        if other != place:
            self._held.drop(other)
            self.model.move(self._cache, [place], [other], self._held.length(place))
            self._held.swap(place, other)
        self._held.drop(place)

    def _close_gaps(self) -> None:
        occupied = self._occupied
        for slot in range(len(occupied)):
            while occupied and occupied[-1] is None:
                occupied.pop()
            if slot >= len(occupied):
                return
            last = occupied[-1]
            if occupied[slot] is None and last is not None:
                self._swap(len(occupied) - 1, slot, last.cached)
                occupied[slot] = last
                occupied.pop()

    def _swap(self, source: int, target: int, length: int = 0) -> None:
        """Move a slot to another place, and what the other holds to its own if that is of use.

        Args:
            length: Positions of the source that are in use, if more than it holds.
        """
        length = max(length, self._held.length(source))
        if target in self._held:
            both = [source, target]
            self.model.move(self._cache, both, both[::-1], max(length, self._held.length(target)))
        else:
            self.model.move(self._cache, [source], [target], length)
        self._held.swap(source, target)

    def _release(self, slot: int, sequence: SequenceState) -> None:
        """The sequence has ended; what its slot holds may be of use to others."""
        self._occupied[slot] = None
        if not self.model.shares_prefixes or not sequence.token_ids:
            return
        if sequence.is_of_current_weights:
            self._held.hold(slot, [*sequence.prompt, *sequence.token_ids[:-1]])
        else:
            self._held.drop(slot)

    def _drop_cache(self) -> None:
        self._cache, self._is_cache_bad = None, False
        self._held.clear()

    def _end(self, slot: int, error: EngineError) -> None:
        sequence = self._occupied[slot]
        self._occupied[slot] = None
        self._held.drop(slot)
        self.failed += 1
        if sequence is not None:
            sequence.fail(error)

    @contextmanager
    def _failing(self, slots: Sequence[int], group: Sequence[SequenceState] = ()) -> Iterator[None]:
        """What goes wrong in the block fails the sequences in these slots, and those of the group without a slot."""
        try:
            yield
        except Exception as error:
            logger.warning("A step of the model failed for %d sequences.", len(slots), exc_info=error)
            failure = EngineError(f"A step of the model failed: {error!r}")
            failure.__cause__ = error
            for slot in slots:
                self._end(slot, failure)
            for sequence in group[len(slots) :]:
                sequence.fail(failure)
            if not self.running:
                self._drop_cache()  # whatever state the failure left it in


def _grouped(arriving: Sequence[SequenceState]) -> Iterator[list[SequenceState]]:
    """Sequences that are read in one call: of similar length, and not too many at once."""
    group: list[SequenceState] = []
    tokens = 0
    for sequence in sorted(arriving, key=_unread):
        length = _unread(sequence)
        area = length * (len(group) + 1)
        padding = area - tokens - length
        # Padding costs less than another call up to 1,024 tokens, or to half of those of the prompts.
        if group and (area > PREFILL_TOKENS or padding > max(1024, 0.5 * (tokens + length))):
            yield group
            group, tokens = [], 0
        group.append(sequence)
        tokens += length
    if group:
        yield group


def _unread(sequence: SequenceState) -> int:
    return len(sequence.prompt) - sequence.shared


# ---------------------------------------------------------------------- prefixes


@dataclass(frozen=True)
class PrefixMatch:
    """A slot that holds the beginning of a prompt."""

    slot: int
    length: int
    """Tokens that it has in common with the prompt."""


@dataclass(eq=False)
class _Held:
    slot: int
    token_ids: Sequence[int]
    hashes: list[int]


class HeldPrefixes:
    """What each slot holds. A slot that holds nothing of use is not listed."""

    def __init__(self) -> None:
        self._by_slot: dict[int, _Held] = {}  # in the order of their last use
        self._by_hash: dict[int, list[_Held]] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._by_slot

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        held = self._by_slot.get(slot)
        return 0 if held is None else len(held.token_ids)

    def hold(self, slot: int, token_ids: Sequence[int]) -> None:
        """A slot holds these now, and nothing else."""
        self.drop(slot)
        held = _Held(slot, token_ids, list(_hashes(token_ids)))
        self._by_slot[slot] = held
        for one in held.hashes:
            self._by_hash.setdefault(one, []).append(held)

    def drop(self, slot: int) -> None:
        held = self._by_slot.pop(slot, None)
        if held is None:
            return
        for one in held.hashes:
            same = self._by_hash[one]
            same.remove(held)
            if not same:
                del self._by_hash[one]

    def swap(self, first: int, second: int) -> None:
        """Two slots have exchanged what they hold."""
        for slot, held in ((second, self._by_slot.pop(first, None)), (first, self._by_slot.pop(second, None))):
            if held is not None:
                held.slot = slot
                self._by_slot[slot] = held

    def clear(self) -> None:
        self._by_slot.clear()
        self._by_hash.clear()

    def longest(self, token_ids: Sequence[int]) -> PrefixMatch | None:
        """The slot that has most in common with the beginning of these; of several, the one that was used last."""
        found: _Held | None = None
        for one in _hashes(token_ids):
            same = self._by_hash.get(one)
            if same is None:
                break
            found = same[-1]
        if found is None:
            return None
        pairs = zip(found.token_ids, token_ids, strict=False)
        shorter = min(len(found.token_ids), len(token_ids))
        length = next((number for number, (one, other) in enumerate(pairs) if one != other), shorter)
        return PrefixMatch(found.slot, length) if length >= BLOCK else None

    def least_recent(self, slots: Iterable[int]) -> int:
        """Of these, one that holds nothing, or else the one that was used longest ago; there must be one."""
        free = set(slots)
        empty = free - self._by_slot.keys()
        return min(empty) if empty else next(slot for slot in self._by_slot if slot in free)


def _hashes(token_ids: Sequence[int]) -> Iterator[int]:
    """Of every whole block and all before it."""
    before = 0
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        before = hash((before, *token_ids[end - BLOCK : end]))
        yield before


# ---------------------------------------------------------------------- choosing tokens


_NEVER: Final = float("-inf")


@dataclass(frozen=True)
class SampledTokens:
    """What was chosen, row by row."""

    token_ids: list[int]
    logprobs: list[float]
    """In softmax(logits / temperature), before anything was left out of the choice."""
    top_logprobs: list[dict[int, float]] | None
    """The likeliest tokens, as many as the row that asked for most; None when none asked."""


def sample_tokens(logits: Tensor, rows: Sequence[SequenceState]) -> SampledTokens:
    """Choose from the logits [n, vocab] of n rows."""
    logits = logits.float()
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    logprobs = logits.log_softmax(-1)
    choosable = _without_early_ends(logprobs, rows)
    choosable = _truncated(choosable, rows)
    is_greedy = [row.sampling.temperature == 0 for row in rows]
    if all(is_greedy):
        token_ids = choosable.argmax(-1)
    else:
        token_ids = _drawn(choosable, rows)
        if any(is_greedy):
            greedy = torch.tensor(is_greedy, device=logits.device)
            token_ids = torch.where(greedy, choosable.argmax(-1), token_ids)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    ids, likelihoods = torch.stack([token_ids.double(), chosen.double()]).tolist()  # the device is waited for once
    return SampledTokens([int(number) for number in ids], likelihoods, _likeliest(logprobs, rows))


def _without_early_ends(logprobs: Tensor, rows: Sequence[SequenceState]) -> Tensor:
    """Tokens that end a row are left out while it has fewer than it was asked for."""
    early = [number for number, row in enumerate(rows) if len(row.token_ids) < row.sampling.min_new_tokens]
    if not early:
        return logprobs
    places = [(number, token) for number in early for token in rows[number].stop_ids]
    left_out = torch.tensor(places, dtype=torch.long).reshape(-1, 2).to(logprobs.device)
    choosable = logprobs.clone()
    choosable[left_out[:, 0], left_out[:, 1]] = _NEVER
    return choosable


def _truncated(choosable: Tensor, rows: Sequence[SequenceState]) -> Tensor:
    """Only the likeliest tokens stay, in the rows that ask for top-k or top-p; the very likeliest always does."""
    asking = [n for n, row in enumerate(rows) if row.sampling.top_k or row.sampling.top_p < 1]
    if not asking:
        return choosable
    device, vocabulary = choosable.device, choosable.shape[1]
    numbers = torch.tensor(asking, device=device)
    ordered, order = choosable[numbers].sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(vocabulary, device=device).unsqueeze(0)
    top_k = torch.tensor([rows[n].sampling.top_k or vocabulary for n in asking], device=device).unsqueeze(1)
    top_p = torch.tensor([rows[n].sampling.top_p for n in asking], device=device).unsqueeze(1)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    is_out = ((ranks >= top_k) | ((before >= top_p) & (top_p < 1))) & (ranks > 0)
    kept = ordered.masked_fill(is_out, _NEVER)
    return choosable.index_copy(0, numbers, torch.empty_like(kept).scatter_(1, order, kept))


def _drawn(choosable: Tensor, rows: Sequence[SequenceState]) -> Tensor:
    sums = choosable.exp().cumsum(-1, dtype=torch.float64)
    # Whatever rounding does, a drawn number stays below the sum of the probabilities.
    numbers = torch.tensor([[row.draw() * (1 - 1e-12)] for row in rows], dtype=torch.float64, device=choosable.device)
    token_ids = torch.searchsorted(sums, numbers * sums[:, -1:], right=True).squeeze(1)
    return token_ids.clamp_(max=choosable.shape[1] - 1)  # beyond the end only where a row is not a number


def _likeliest(logprobs: Tensor, rows: Sequence[SequenceState]) -> list[dict[int, float]] | None:
    count = max(row.sampling.top_logprobs for row in rows)
    if not count:
        return None
    values, order = logprobs.topk(min(count, logprobs.shape[1]), -1)
    return [dict(zip(ids, row, strict=True)) for ids, row in zip(order.tolist(), values.tolist(), strict=True)]
