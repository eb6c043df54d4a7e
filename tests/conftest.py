"""What all tests share: a clock they can turn, and spans they can add."""

import asyncio
import gc
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from agentlightning.types import AttemptedRollout, OtelResource, Span, TraceStatus
from tests import postgres, warm_python
from tests.stub_model.server import StubModel, running

# The same examples each time, however long one takes: a test that fails must fail again. More of them look closer.
EXAMPLES = int(os.environ.get("AGL_TEST_EXAMPLES", "30"))
settings.register_profile("same", derandomize=True, deadline=None, max_examples=EXAMPLES, database=None)
settings.load_profile("same")

# Hundreds of tests start Python: where compiled code is not kept, each of them compiles the package anew. This is read
# by the first process before it starts its workers, which start all the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Thousands of tests make, sync and remove small files, which takes milliseconds each on a disk.
MEMORY_FOLDER = Path("/dev/shm")
if (
    MEMORY_FOLDER.is_dir()
    and not os.statvfs(MEMORY_FOLDER).f_flag & os.ST_NOEXEC
    and shutil.disk_usage(MEMORY_FOLDER).free > 8 * 2**30
):
    os.environ.setdefault("TMPDIR", str(MEMORY_FOLDER))
    tempfile.tempdir = None


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        postgres.choose_folder()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        postgres.stop_shared_cluster()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write the promises that a test proves into the report, where `scripts/claims.py` reads them.

    What trains Hugging Face models for long is left to `make test-models`.
    """
    is_left_out = "AGL_TEST_MODELS" not in os.environ
    for item in items:
        if is_left_out and item.get_closest_marker("models") is not None:
            item.add_marker(pytest.mark.skip(reason="trains models for long: make test-models"))
        numbers = {number for mark in item.iter_markers("claim") for number in mark.args}
        item.user_properties += [("claim", number) for number in sorted(numbers)]


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look at it whenever a test asks what is left in memory."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Commands set up the logging of the process; the next test finds it as it was."""
    loggers = [logging.getLogger(name) for name in (None, "agentlightning")]
    before = [(logger, logger.level, logger.propagate, logger.disabled, list(logger.handlers)) for logger in loggers]
    yield
    changed = [(logger, level) for logger, level, *_ in before if logger.level != level]
    for name, one in list(logging.Logger.manager.loggerDict.items()):
        if name.startswith("agentlightning.") and isinstance(one, logging.Logger) and one.level != logging.NOTSET:
            changed.append((one, logging.NOTSET))
    for logger, level in changed:  # to set a level makes logging look at every logger there is
        logger.setLevel(level)
    for logger, _, propagate, disabled, handlers in before:
        logger.propagate, logger.disabled = propagate, disabled
        if logger.name == "agentlightning":
            logger.handlers[:] = handlers


@pytest.fixture(scope="session", autouse=True)
def quick_engines() -> Iterator[None]:
    """An engine's process is a fork of one that has imported torch, which takes two seconds."""
    if sys.platform == "linux":
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(asyncio.unix_events, "subprocess", warm_python.fork_engines())
            yield
    else:
        yield


@pytest.fixture(scope="module", autouse=True)
def one_certificate() -> Iterator[None]:
    """Every HTTP client reads all certificates of the world when it is made, in 25 ms; here is one, of nobody's."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("SSL_CERT_FILE", str(Path(__file__).parent / "certificate.pem"))
        yield


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


MakeSpan = Callable[..., Span]


@pytest.fixture
def make_span() -> MakeSpan:
    """Builds a span of an attempt; every one has an id of its own."""
    numbers = itertools.count(1)

    def make(rollout: AttemptedRollout, sequence_id: int = 1, **changes: Any) -> Span:
        fields: dict[str, Any] = {
            "rollout_id": rollout.rollout_id,
            "attempt_id": rollout.attempt.attempt_id,
            "sequence_id": sequence_id,
            "trace_id": f"{1:032x}",
            "span_id": f"{next(numbers):016x}",
            "parent_id": None,
            "name": "step",
            "status": TraceStatus(status_code="OK"),
            "attributes": {"text": "hello", "tokens": [1, 2, 3]},
            "events": [],
            "links": [],
            "start_time": 1.0,
            "end_time": 2.0,
            "context": None,
            "parent": None,
            "resource": OtelResource(attributes={}, schema_url=""),
        }
        return Span(**{**fields, **changes})

    return make


@pytest.fixture
def stub_model() -> Iterator[StubModel]:
    """A served stub model that repeats the last message; a test gives it a `script` of its own."""
    with running() as model:
        yield model
