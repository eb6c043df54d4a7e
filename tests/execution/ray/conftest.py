"""A Ray cluster of two nodes on this machine, which all tests of this folder share.

Ray has an environment of its own: `make test-ray` builds it and runs these tests there. Elsewhere they are skipped.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE_SECONDS = 60.0
"""How long a test waits for what must come, on a machine that does other things too."""

if importlib.util.find_spec("ray") is None:
    skipped = pytest.mark.skip(reason="Ray is not installed here; `make test-ray` runs these tests where it is.")
else:
    skipped = pytest.mark.filterwarnings("ignore::ResourceWarning:ray", "ignore::FutureWarning:ray")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skipped)


@pytest.fixture(scope="session", autouse=True)
def quiet_ray() -> Iterator[None]:
    """Ray reports to nobody, and asks its own processes for nothing."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patches.setenv("RAY_AUTH_MODE", "disabled")
        patches.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_STORE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def cluster(quiet_ray: None) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    notices_soon = {"health_check_period_ms": 500}  # that a node is dead, after five looks
    head = {"num_cpus": 4, "include_dashboard": False, "_system_config": notices_soon}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=4)
    yield made
    made.shutdown()


@pytest.fixture
def no_actor_is_left(cluster: Any) -> Iterator[None]:
    """After the test no actor of any program lives in the cluster."""
    yield
    import ray

    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        until(lambda: living_actors() == 0)
    finally:
        ray.shutdown()


def living_actors() -> int:
    """How many actors of the cluster are not dead, as the connected program sees it."""
    from ray._private.state import actors

    return sum(actor["State"] != "DEAD" for actor in actors().values())


def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.02)


def names_in(folder: Path) -> set[str]:
    """Agents leave files in a folder, which all processes of this machine see."""
    return set(os.listdir(folder))
