"""How much memory torch gives out on the CPU while something is computed."""

import itertools
from collections.abc import Callable

import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """What torch's allocator gave out at most while some work was done, beyond what was in use before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = work()
    found = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    found.sort(key=lambda event: event.start_ns())
    del kept
    return max(itertools.accumulate(event.nbytes() for event in found))
