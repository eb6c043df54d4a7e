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
from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["system_snapshot"]

_MIB: Final = 2**20
_GIB: Final = 2**30
_MIB_PER_GIB: Final = 1024
_NVIDIA_SMI_TIMEOUT_SECONDS: Final = 3.0
_GPU_QUERY: Final = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu"
_UNAVAILABLE: Final = (OSError, RuntimeError, AttributeError, LookupError, ValueError, subprocess.SubprocessError)
"""What the sources of figures raise where a system does not have them."""


def system_snapshot(include_gpu: bool = False) -> dict[str, Any]:
    """Figures of this machine; sizes are binary (GB = 2**30, MB = 2**20), traffic counts from boot.

    `cpu_usage_pct` is the average since the previous snapshot, and 0.0 in the first one. With `include_gpu`, `gpus`
    lists the NVIDIA GPUs: empty without `nvidia-smi`, None when it did not answer.
    """
    snapshot: dict[str, Any] = {
        "timestamp": time.time(),
        **_figures(("host",), lambda: (socket.gethostname(),)),
        **_figures(("os",), lambda: (f"{platform.system()} {platform.release()}",)),
        **_figures(("cpu_name",), lambda: (_cpu_name(),)),
        **_figures(("cpu_cores", "cpu_threads"), _cpu_counts),
        **_figures(("cpu_usage_pct",), _cpu_usage),
        **_figures(("mem_used_gb", "mem_total_gb", "mem_pct"), _memory),
        **_figures(("disk_used_gb", "disk_total_gb", "disk_pct"), _disk),
        **_figures(("bytes_sent_mb", "bytes_recv_mb"), _traffic),
    }
    if include_gpu:
        snapshot |= _figures(("gpus",), lambda: (_gpus(),))
    return snapshot


def _figures(keys: Sequence[str], read: Callable[[], Sequence[object]]) -> dict[str, object]:
    """The figures under their keys, or None under each when they cannot be read."""
    import psutil

    try:
        return dict(zip(keys, read(), strict=True))
    except (*_UNAVAILABLE, psutil.Error):
        return dict.fromkeys(keys)


def _cpu_name() -> str | None:
    if platform.system() == "Linux":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.machine() or None
    return platform.processor() or platform.machine() or None


def _cpu_counts() -> tuple[int | None, int | None]:
    import psutil

    return psutil.cpu_count(logical=False), psutil.cpu_count(logical=True)


def _cpu_usage() -> tuple[float]:
    import psutil

    return (psutil.cpu_percent(interval=None),)


def _memory() -> tuple[float, float, float]:
    import psutil

    memory = psutil.virtual_memory()
    return round(memory.used / _GIB, 2), round(memory.total / _GIB, 2), memory.percent


def _disk() -> tuple[float, float, float]:
    import psutil

    disk = psutil.disk_usage(os.path.abspath(os.sep))
    return round(disk.used / _GIB, 2), round(disk.total / _GIB, 2), disk.percent


def _traffic() -> tuple[float, float]:
    import psutil

    # None on a machine without network cards, whatever the stubs say; the AttributeError then means "unavailable".
    counters = psutil.net_io_counters()
    return round(counters.bytes_sent / _MIB, 2), round(counters.bytes_recv / _MIB, 2)


def _gpus() -> list[dict[str, Any]]:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return []
    answer = subprocess.run(
        [nvidia_smi, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True,
        check=True,
        text=True,
        timeout=_NVIDIA_SMI_TIMEOUT_SECONDS,
    )
    return [_gpu(row) for row in csv.reader(answer.stdout.splitlines(), skipinitialspace=True) if row]


def _gpu(row: Sequence[str]) -> dict[str, Any]:
    index, name, usage, used_mib, total_mib, temperature = row
    return {
        "index": int(index),
        "name": name,
        "usage_pct": _number(usage),
        "mem_used_gb": _number(used_mib, divisor=_MIB_PER_GIB),
        "mem_total_gb": _number(total_mib, divisor=_MIB_PER_GIB),
        "temperature_c": _number(temperature),
    }


def _number(text: str, *, divisor: float = 1.0) -> float | None:
    """None for what a GPU does not report, which `nvidia-smi` prints as words such as `[N/A]`."""
    try:
        return round(float(text) / divisor, 2)
    except ValueError:
        return None
