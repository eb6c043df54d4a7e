"""Which tokens' keys and values lie in which slot, so that a prompt that begins alike is not read again.

The rollouts of a group begin with the same prompt, and each turn of a conversation begins with the turns before it.
Tokens are compared in blocks, found by the hash of everything up to the end of the block.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["HeldPrefixes", "Match"]

BLOCK: Final = 32
"""Tokens; fewer in common are not worth the search."""


@dataclass(frozen=True)
class Match:
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
        """A slot holds nothing of use any more."""
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
        """All is of no use any more."""
        self._by_slot.clear()
        self._by_hash.clear()

    def longest(self, token_ids: Sequence[int]) -> Match | None:
        """The slot that has most in common with the beginning of these; of several, the one that was used last."""
        found: _Held | None = None
        for one in _hashes(token_ids):
            same = self._by_hash.get(one)
            if same is None:
                break
            found = same[-1]
        if found is None:
            return None
        length = _common(found.token_ids, token_ids)
        return Match(found.slot, length) if length >= BLOCK else None

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


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
