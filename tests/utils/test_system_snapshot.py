"""A snapshot always has all its keys, whatever the machine can tell."""

import json
from pathlib import Path

import psutil
import pytest

from agentlightning.utils.system_snapshot import system_snapshot

KEYS = [
    *("timestamp", "host", "os", "cpu_name", "cpu_cores", "cpu_threads", "cpu_usage_pct"),
    *("mem_used_gb", "mem_total_gb", "mem_pct", "disk_used_gb", "disk_total_gb", "disk_pct"),
    *("bytes_sent_mb", "bytes_recv_mb"),
]


def _refuse(*_arguments: object, **_options: object) -> object:
    raise PermissionError("not in this sandbox")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def _write_nvidia_smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_snapshot_has_every_key_in_order() -> None:
    snapshot = system_snapshot()

    assert list(json.loads(json.dumps(snapshot))) == KEYS
    assert 0 < snapshot["mem_used_gb"] < snapshot["mem_total_gb"]


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("cpu_count", {"cpu_cores", "cpu_threads"}),
        ("cpu_percent", {"cpu_usage_pct"}),
        ("virtual_memory", {"mem_used_gb", "mem_total_gb", "mem_pct"}),
        ("disk_usage", {"disk_used_gb", "disk_total_gb", "disk_pct"}),
        ("net_io_counters", {"bytes_sent_mb", "bytes_recv_mb"}),
    ],
)
def test_refused_figures_are_none_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch, function: str, missing: set[str]
) -> None:
    expected = {key for key, value in system_snapshot().items() if value is None} | missing
    monkeypatch.setattr(psutil, function, _refuse)

    snapshot = system_snapshot()

    assert {key for key, value in snapshot.items() if value is None} == expected


def test_gpus_are_read_from_nvidia_smi(path: Path) -> None:
    assert system_snapshot(include_gpu=True)["gpus"] == []
    _write_nvidia_smi(path, "echo '0, NVIDIA H200, 37, 2048, 143771, 41'; echo '1, GB10, [N/A], [N/A], [N/A], 41'")

    first, second = system_snapshot(include_gpu=True)["gpus"]

    assert (second["usage_pct"], second["mem_used_gb"], second["temperature_c"]) == (None, None, 41.0)
    assert [first] == [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "usage_pct": 37.0,
            "mem_used_gb": 2.0,
            "mem_total_gb": 140.4,
            "temperature_c": 41.0,
        }
    ]


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'"], ids=["failing", "babbling"])
def test_gpus_are_none_when_nvidia_smi_cannot_tell(path: Path, script: str) -> None:
    _write_nvidia_smi(path, script)
    assert system_snapshot(include_gpu=True)["gpus"] is None
