"""The garbage collector of a process that we start for serving.

Decoding requests makes many small objects at once, most of which stay or go without any help. With Python's usual
thresholds the collector looks through them every few requests, which costs a busy server a fifth of its time.
"""

import gc

__all__ = ["calm_collector"]

CALM_THRESHOLDS = (10_000, 20, 50)


def calm_collector() -> None:
    """Let the collector run more rarely from now on, unless it is rarer or off; only in processes of our own."""
    if 0 < gc.get_threshold()[0] < CALM_THRESHOLDS[0]:
        gc.set_threshold(*CALM_THRESHOLDS)
