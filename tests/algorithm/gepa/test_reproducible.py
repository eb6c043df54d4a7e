"""The same seed is the same evolution, whatever finishes first; another seed is another."""

from typing import Any

from tests.algorithm.gepa.evolving import evolve


def told(seed: int) -> Any:
    """All that an evolution on the simulated model came to."""
    few: dict[str, Any] = {"validation_tasks": 24, "test_tasks": 1}
    done = evolve(0, search_seed=seed, is_steady=True, proposals=2, iterations=3, **few)
    rows = [(one.version, one.parent, one.template, one.scores, one.fate) for one in done.gepa.candidates]
    return rows, done.result.best, done.result.challenges, done.result.spent


def test_evolution_follows_from_the_seed() -> None:
    first, again, other = told(1), told(1), told(2)

    assert len(first[0]) > 2
    assert first == again
    assert first[0] != other[0]
