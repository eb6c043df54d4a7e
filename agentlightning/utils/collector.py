"""The garbage collector, made calmer while a server runs.

Decoding requests makes many small objects at once, most of which stay or go without any help. With Python's usual
thresholds the collector looks through them every few requests, which costs a busy server a fifth of its time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["calm_collector"]

CALM_THRESHOLDS = (10_000, 20, 50)


@contextmanager
def calm_collector() -> Iterator[None]:
    """Let the collector run more rarely for the length of the block, unless it is rarer or off already."""
    before = gc.get_threshold()
    if not 0 < before[0] < CALM_THRESHOLDS[0]:
        yield
        return
    gc.set_threshold(*CALM_THRESHOLDS)
    try:
        yield
    finally:
        if gc.get_threshold() == CALM_THRESHOLDS:
            gc.set_threshold(*before)
