"""What a run in the store says of the training it was: enough to tell two of them apart, and no secret."""

import asyncio
import json
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl


def one(task: Any) -> float:
    return 1.0


@dataclass(frozen=True)
class Schedule:
    warmup: int = 3
    rate: float = 0.1
    client: Any = field(default=None, repr=False)


class Search(agl.FastAlgorithm):
    """An algorithm of one's own, with settings."""

    def __init__(self, *, width: int = 4, seed: int = 7, schedule: Schedule | None = None, **options: Any) -> None:
        self.width = width
        self._seed = seed
        self.schedule = schedule or Schedule()

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        return None


def config_of(algorithm: Any, **options: Any) -> dict[str, Any]:
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(
        algorithm=algorithm, store=store, strategy="shm", progress="off", initial_resources={}, **options
    )
    trainer.fit(one, train_dataset=["a", "b"], val_dataset=["c"])
    (run,) = asyncio.run(store.query_runs())
    return run.config


def test_the_run_keeps_the_settings_of_an_algorithm_of_ones_own() -> None:
    config = config_of(Search(width=9, schedule=Schedule(warmup=5)))

    assert config["algorithm"].endswith("Search")
    assert config["settings"]["algorithm"] == {"width": 9, "seed": 7, "schedule": {"warmup": 5, "rate": 0.1}}
    assert (config["seed"], config["n_train"], config["n_val"]) == (7, 2, 1)


def test_the_run_keeps_the_settings_of_every_part() -> None:
    config = config_of(Search(), runner={"poll_interval": 0.25}, adapter={"agent_match": "solver"})

    settings = config["settings"]
    assert settings["runner"]["poll_interval"] == 0.25
    assert settings["adapter"]["agent_match"] == "solver"
    assert settings["strategy"]["n_runners"] == 1
    assert "tracer" in settings


def test_the_run_keeps_what_it_ran_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    config = config_of(Search())

    assert (config["version"], config["python"], config["git"]) == (agl.__version__, platform.python_version(), None)


def test_the_run_keeps_the_revision_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("first")
    who = ["-c", "user.name=n", "-c", "user.email=e@localhost"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "First"]):
        subprocess.run(["git", *command], check=True)
    revision = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    clean = config_of(Search())["git"]
    (tmp_path / "train.py").write_text("second")
    changed = config_of(Search())["git"]

    assert clean == {"revision": revision, "is_dirty": False}
    assert changed == {"revision": revision, "is_dirty": True}


def test_no_secret_enters_the_run() -> None:
    class Client:
        def __init__(self) -> None:
            self.key = "sk-0123456789abcdef0123"

    class Calling(Search):
        def __init__(self, api_key: str, headers: dict[str, str], address: str, client: Any, note: str) -> None:
            self.api_key = api_key
            self.headers = headers
            self.address = address
            self.client = client
            self.note = note

    secret = "sk-0123456789abcdef0123"
    address = f"https://user:{secret}@host/v1?api_key={secret}&size=3"
    config = config_of(Calling(secret, {"X-Mine": secret}, address, Client(), f"use {secret}"))

    settings = config["settings"]["algorithm"]
    assert secret not in json.dumps(config)
    assert settings["address"] == "https://***@host/v1?api_key=***&size=3"
    assert settings["client"].endswith("Client")


def test_large_settings_are_cut() -> None:
    config = config_of(Search(width=["x" * 5000] * 5000, seed={str(n): "y" * 900 for n in range(1000)}))  # type: ignore[arg-type] # on purpose

    assert len(json.dumps(config)) <= 64 * 1024
    assert config["settings"]["algorithm"]["schedule"] == {"warmup": 3, "rate": 0.1}


def test_the_summary_keeps_what_the_algorithm_measured() -> None:
    class Measuring(Search):
        def run_summary(self) -> dict[str, Any]:
            return {"best": 0.75}

    store = agl.InMemoryLightningStore()
    agl.Trainer(algorithm=Measuring(), store=store, strategy="shm", progress="off").fit(one, train_dataset=["a"])

    (run,) = asyncio.run(store.query_runs())
    assert run.summary["best"] == 0.75
