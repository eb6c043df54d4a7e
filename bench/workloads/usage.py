"""What a process uses: processor time and memory."""

import psutil


def cpu_seconds(pid: int) -> float:
    """Processor time the process has used so far, by all its threads, in its own code and in the system's."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def rss_mb(pid: int) -> float:
    """Memory the process holds now, in MB."""
    return psutil.Process(pid).memory_info().rss / 1e6
