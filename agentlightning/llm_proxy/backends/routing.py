"""Which backend a call goes to: the table of models, and the choice among the backends of one.

The calls of one rollout go to one backend, the first of a ranking that depends on the rollout's name and the weights
(rendezvous hashing), so that its prefixes are in the cache there; they go to the next in the ranking only while the
first cannot take them, and when a backend comes or goes only its own rollouts move. Calls of nobody go to the backend
that is least busy for its weight, in turns among equals. Nothing here is left to chance.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from typing import Final

from agentlightning.llm_proxy.backends.backend import WILDCARD
from agentlightning.llm_proxy.backends.errors import UnknownModel, VersionNotServed
from agentlightning.llm_proxy.backends.lane import Lane

__all__ = ["Group", "Table"]

MOST_RANKINGS: Final = 4096
FAIL_FAST_SECONDS: Final = 1.0
"""How long after a failure a model whose backends are all out of use is not tried again."""
_HASH_BYTES: Final = 8
_HASHES: Final = 1 << (8 * _HASH_BYTES)


class Group:
    """Backends that may take each other's calls."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = tuple(lanes)
        self._rankings: dict[str, tuple[Lane, ...]] = {}

    def choose(
        self, who: str, now: float, *, tried: Collection[Lane] = (), unfit: Collection[Lane] = ()
    ) -> Lane | None:
        """The backend for the next try; None if trying any would be in vain right now.

        One that was not tried yet comes before one that was, one that is on hold by its rate limit after all that
        are not, and one that is out of use only when all are.
        """
        lanes = self.lanes
        if not tried and not unfit:  # the common case, made short
            first = self._first(who, now)
            if first is not None:
                return first
        fit = [lane for lane in lanes if lane not in unfit]
        free = [lane for lane in fit if lane.is_free(now)]
        if free:
            return self._best(who, now, [lane for lane in free if lane not in tried] or free)
        held = [lane for lane in fit if lane.breaker.allows(now)]
        if held:
            return min(held, key=lambda lane: lane.gate.closed_for(now))
        rested = [lane for lane in fit if now - lane.breaker.touched_at >= FAIL_FAST_SECONDS]
        return min(rested, key=lambda lane: lane.breaker.opened_at) if rested else None

    def has_other(self, tried: Collection[Lane], unfit: Collection[Lane], now: float) -> bool:
        """Whether a backend that was not tried yet could take the call at once."""
        return any(lane not in tried and lane not in unfit and lane.is_free(now) for lane in self.lanes)

    def _first(self, who: str, now: float) -> Lane | None:
        """The home of a rollout, or the only backend there is, if it is free."""
        if len(self.lanes) == 1:
            home = self.lanes[0]
        elif who:
            home = self._ranking_of(who)[0]
        else:
            return None
        return home if home.is_free(now) else None

    def _best(self, who: str, now: float, lanes: Sequence[Lane]) -> Lane:
        if who:
            return next(lane for lane in self._ranking_of(who) if lane in lanes)
        best = min(lanes, key=lambda lane: (lane.gate.is_full, lane.load(now), lane.turn))
        best.turn += 1.0 / best.backend.weight
        return best

    def _ranking_of(self, who: str) -> tuple[Lane, ...]:
        ranking = self._rankings.get(who)
        if ranking is None:
            if len(self._rankings) >= MOST_RANKINGS:
                self._rankings.clear()
            ranking = tuple(sorted(self.lanes, key=lambda lane: _draw(who, lane), reverse=True))
            self._rankings[who] = ranking
        return ranking


def _draw(who: str, lane: Lane) -> float:
    """The lot a backend draws for a rollout: the highest wins, and wins as often as its weight says."""
    digest = hashlib.blake2b(f"{who}\0{lane.key}".encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    return -lane.backend.weight / math.log((int.from_bytes(digest, "big") + 1) / (_HASHES + 1))


class _Pool:
    """All backends of one model name, in groups of one version of the resources each."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        versions = [lane.backend.resources_id for lane in lanes if lane.backend.resources_id is not None]
        self._pinned = {
            version: Group([lane for lane in lanes if lane.backend.resources_id == version]) for version in versions
        }
        latest = (None, *versions[-1:])
        self._unpinned = Group([lane for lane in lanes if lane.backend.resources_id in latest])

    @property
    def versions(self) -> list[str]:
        """The versions of the resources its backends belong to."""
        return list(self._pinned)

    def find(self, resources_id: str | None) -> Group | None:
        """The backends for calls pinned to a version, or to none; None if that version is not served."""
        if resources_id is None or not self._pinned:
            return self._unpinned
        return self._pinned.get(resources_id)


class Table:
    """Every model of the fleet."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = tuple(lanes)
        names = dict.fromkeys(lane.backend.model_name for lane in lanes)
        self._pools = {name: _Pool([lane for lane in lanes if lane.backend.model_name == name]) for name in names}
        self._patterns = sorted((name for name in names if WILDCARD in name), key=len, reverse=True)

    @property
    def models(self) -> list[str]:
        """The names agents may ask for, patterns as they stand, in the order of the list."""
        return list(self._pools)

    def group_of(self, model: str, resources_id: str | None = None) -> Group:
        """The backends that may serve a call; an error in words if there is none."""
        group = self.find(model, resources_id)
        if group is not None:
            return group
        pool = self._pool_of(model)
        if pool is None:
            known = ", ".join(f"'{name}'" for name in self._pools) or "none"
            raise UnknownModel(f"No backend serves the model '{model}'; the models of this proxy are: {known}.")
        served = ", ".join(f"'{version}'" for version in pool.versions)
        raise VersionNotServed(
            f"Model '{model}' is not served for resources '{resources_id}'; its backends belong to {served}."
        )

    def find(self, model: str, resources_id: str | None = None) -> Group | None:
        """The backends that may serve a call, if there are any."""
        pool = self._pool_of(model)
        return None if pool is None else pool.find(resources_id)

    def _pool_of(self, model: str) -> _Pool | None:
        pool = self._pools.get(model)
        if pool is not None:
            return pool
        for pattern in self._patterns:
            before, _, after = pattern.partition(WILDCARD)
            if len(model) >= len(before) + len(after) and model.startswith(before) and model.endswith(after):
                return self._pools[pattern]
        return None
