"""What the machine is doing right now: the figures a worker sends with its heartbeat.

A snapshot is plain JSON data. Every key is always present; a figure this system cannot give (no disk access in a
sandbox, no network counters in a container) is None, so a heartbeat never fails for the sake of a number.
"""

import csv
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["container_memory_limits", "system_snapshot"]

_MIB: Final = 2**20
_GIB: Final = 2**30
_MIB_PER_GIB: Final = 1024
_GPU_QUERY: Final = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu"
_UNAVAILABLE: Final = (OSError, RuntimeError, AttributeError, LookupError, ValueError, subprocess.SubprocessError)
"""What the sources of figures raise where a system does not have them."""


def system_snapshot(include_gpu: bool = False) -> dict[str, Any]:
    """Figures of this machine; sizes are binary (GB = 2**30, MB = 2**20), traffic counts from boot.

    `cpu_usage_pct` is the average since the previous snapshot, and 0.0 in the first one. With `include_gpu`, `gpus`
    lists the NVIDIA GPUs: empty without `nvidia-smi`, None when it did not answer.
    """
    import psutil

    def figures(keys: Sequence[str], read: Callable[[], Sequence[object]]) -> dict[str, object]:
        """The figures under their keys, or None under each when they cannot be read."""
        try:
            return dict(zip(keys, read(), strict=True))
        except (*_UNAVAILABLE, psutil.Error):
            return dict.fromkeys(keys)

    def space(found: Any) -> tuple[float, float, float]:
        return round(found.used / _GIB, 2), round(found.total / _GIB, 2), found.percent

    def traffic() -> tuple[float, float]:
        # None on a machine without network cards, whatever the stubs say; the AttributeError then means "unavailable".
        counters = psutil.net_io_counters()
        return round(counters.bytes_sent / _MIB, 2), round(counters.bytes_recv / _MIB, 2)

    root = os.path.abspath(os.sep)
    counts = lambda: (psutil.cpu_count(logical=False), psutil.cpu_count(logical=True))  # noqa: E731
    snapshot: dict[str, object] = {
        "timestamp": time.time(),
        **figures(("host",), lambda: (socket.gethostname(),)),
        **figures(("os",), lambda: (f"{platform.system()} {platform.release()}",)),
        **figures(("cpu_name",), lambda: (_cpu_name(),)),
        **figures(("cpu_cores", "cpu_threads"), counts),
        **figures(("cpu_usage_pct",), lambda: (psutil.cpu_percent(interval=None),)),
        **figures(("mem_used_gb", "mem_total_gb", "mem_pct"), lambda: space(psutil.virtual_memory())),
        **figures(("disk_used_gb", "disk_total_gb", "disk_pct"), lambda: space(psutil.disk_usage(root))),
        **figures(("bytes_sent_mb", "bytes_recv_mb"), traffic),
    }
    if include_gpu:
        snapshot |= figures(("gpus",), lambda: (_gpus(),))
    return snapshot


def _cpu_name() -> str | None:
    if platform.system() == "Linux":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.machine() or None
    return platform.processor() or platform.machine() or None


def _gpus() -> list[dict[str, object]]:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return []
    answer = subprocess.run(
        [nvidia_smi, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True,
        check=True,
        text=True,
        timeout=3.0,
    )
    rows = [row for row in csv.reader(answer.stdout.splitlines(), skipinitialspace=True) if row]
    return [
        {
            "index": int(index),
            "name": name,
            "usage_pct": _number(usage),
            "mem_used_gb": _number(used_mib, divisor=_MIB_PER_GIB),
            "mem_total_gb": _number(total_mib, divisor=_MIB_PER_GIB),
            "temperature_c": _number(temperature),
        }
        for index, name, usage, used_mib, total_mib, temperature in rows
    ]


def _number(text: str, *, divisor: float = 1.0) -> float | None:
    """None for what a GPU does not report, which `nvidia-smi` prints as words such as `[N/A]`."""
    try:
        return round(float(text) / divisor, 2)
    except ValueError:
        return None


def container_memory_limits(root: Path) -> Iterator[int]:
    """Limits of the control groups that this process is in, of both versions; a group counts for those beneath it."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, of which only the top is to be seen.
        group = top / path.strip("/")
        for folder in {top, group, *(parent for parent in group.parents if top in parent.parents)}:
            try:
                text = (folder / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if text.isdecimal():  # else it is "max"
                yield int(text)
