"""Patches are applied for the first user and undone for the last, in whatever threads and processes they are."""

import importlib
import importlib.metadata
import logging
import multiprocessing
import pickle
import pkgutil
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import anthropic
import openai
import pytest
from anthropic import _base_client as anthropic_base
from openai import _base_client as openai_base

from agentlightning.instrumentation import instrument_all, uninstrument_all
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.registry import Instrumentation, instrumentation
from agentlightning.tracer import OtelTracer
from agentlightning.utils.once import once
from tests.stub_model.server import StubModel

ORIGINALS = {
    (base, name): vars(getattr(base, name))["request"]
    for base in (openai_base, anthropic_base)
    for name in ("SyncAPIClient", "AsyncAPIClient")
}
USER: Any = [{"role": "user", "content": "Hello there"}]


def is_patched() -> bool:
    """Whether the SDKs are changed; all of them or none."""
    answers = {vars(getattr(base, name))["request"] is not found for (base, name), found in ORIGINALS.items()}
    assert len(answers) == 1
    return answers.pop()


class Counting(Patch):
    """Says how often it was applied and undone."""

    name, module = "threading", "threading"

    def __init__(self) -> None:
        super().__init__()
        self.applied = self.undone = 0

    def change(self, module: ModuleType) -> None:
        self.applied += 1
        self.when_undone(self.count_undone)

    def count_undone(self) -> None:
        self.undone += 1


@pytest.mark.parametrize(("version", "is_told"), [("1.2.1", True), ("0.9.0", False), (None, False)])
def test_a_newer_ag2_is_told_when_it_is_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str | None,
    is_told: bool,
) -> None:
    if version is None and list(importlib.metadata.distributions(name="ag2")):
        pytest.skip("ag2 is installed, and has a version")
    (tmp_path / "ag2.py").touch()
    if version is not None:
        (tmp_path / f"ag2-{version}.dist-info").mkdir()
        (tmp_path / f"ag2-{version}.dist-info" / "METADATA").write_text(f"Name: ag2\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ag2", raising=False)

    with caplog.at_level(logging.WARNING), OtelTracer().lifespan():
        importlib.import_module("ag2")
    monkeypatch.delitem(sys.modules, "ag2")

    assert ("ag2 1.2.1 is not as expected" in caplog.text) is is_told
    assert ("its own steps are not recorded" in caplog.text) is is_told


class Unfit(Counting):
    """Does half of its work and fails."""

    def change(self, module: ModuleType) -> None:
        super().change(module)
        raise LookupError("the library has no such thing")


def found(patches: Instrumentation) -> tuple[str, ...]:
    """Names of the libraries that are imported and changed."""
    return tuple(patch.name for patch in patches.patches if patch.is_applied)


def test_the_first_user_applies_and_the_last_undoes() -> None:
    patch = Counting()
    patches = Instrumentation((patch,))

    patches.acquire()
    patches.acquire()
    patches.release()
    assert (patches.is_on, patch.applied, patch.undone, found(patches)) == (True, 1, 0, ("threading",))
    patches.release()
    patches.release()

    assert (patches.is_on, patch.applied, patch.undone, found(patches)) == (False, 1, 1, ())


def test_users_in_many_threads_are_counted() -> None:
    patch = Counting()
    patches = Instrumentation((patch,))

    def work() -> None:
        for _ in range(300):
            patches.acquire()
            assert patch.is_applied
            patches.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not patches.is_on
    assert patch.applied == patch.undone > 0


def test_a_patch_that_does_not_fit_says_so_once_and_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    first, unfit, last = Counting(), Unfit(), Counting()
    patches = Instrumentation((first, unfit, last))

    patches.acquire()
    assert (first.is_applied, unfit.is_applied, last.is_applied) == (True, False, True)
    assert (unfit.applied, unfit.undone) == (1, 1)
    patches.release()

    assert (unfit.applied, unfit.undone, last.undone) == (1, 1, 1)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_every_patch_of_the_table_is_applied_and_undone() -> None:
    instrument_all()
    instrument_all()
    try:
        assert {"openai", "anthropic"} <= set(found(instrumentation()))
    finally:
        uninstrument_all()
    assert is_patched()
    uninstrument_all()

    assert not is_patched()
    assert found(instrumentation()) == ()


# ---------------------------------------------------------------------- tracers


def test_initialising_twice_is_harmless() -> None:
    tracer = OtelTracer()

    tracer.init_worker(0)
    tracer.init_worker(0)
    assert is_patched()
    tracer.teardown_worker(0)

    assert not is_patched()
    tracer.teardown_worker(0)
    assert not is_patched()


def test_a_tracer_that_does_not_instrument_leaves_the_sdks_alone() -> None:
    with OtelTracer(instrument=False).lifespan():
        assert not is_patched()


def test_a_tracer_travels_without_its_patches() -> None:
    tracer = OtelTracer()
    with tracer.lifespan():
        copy = pickle.loads(pickle.dumps(tracer))
        assert is_patched()
        copy.teardown_worker(0)
        assert is_patched()

    assert not is_patched()
    with copy.lifespan():
        assert is_patched()


def test_a_call_that_outlives_the_patch_is_recorded_to_its_end(stub_model: StubModel) -> None:
    tracer = OtelTracer()
    with openai.OpenAI(base_url=stub_model.openai_url, api_key="any") as client:
        tracer.init_worker(0)
        with tracer._trace_context_sync() as recorder:
            stream = client.chat.completions.create(model="stub-model", messages=USER, stream=True)
            tracer.teardown_worker(0)
            assert len(list(stream)) == 4

    assert [(span.attributes or {})["gen_ai.completion.0.content"] for span in recorder.spans()] == ["Hello there"]


# ---------------------------------------------------------------------- processes


def names_of_a_call(tracer: OtelTracer, url: str, answers: Any) -> None:
    """In another process: one call of each SDK under this tracer."""
    with tracer.lifespan(), tracer._trace_context_sync() as recorder:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
            client.chat.completions.create(model="stub-model", messages=USER)
        with anthropic.Anthropic(base_url=url, api_key="any") as other:
            other.messages.create(model="stub-model", messages=USER, max_tokens=9)
        names = [span.name for span in recorder.spans()]
    answers.put((names, is_patched()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_process_records_its_own_calls(stub_model: StubModel) -> None:
    context = multiprocessing.get_context("fork")
    answers, tracer, bystander = context.Queue(), OtelTracer(), OtelTracer()
    bystander.init_worker(0)

    child = context.Process(target=names_of_a_call, args=(tracer, stub_model.url, answers))
    child.start()
    names, was_patched = answers.get(timeout=60)
    child.join(60)
    bystander.teardown_worker(0)

    assert (names, child.exitcode) == (["openai.chat.completion", "anthropic.messages"], 0)
    assert was_patched


@pytest.mark.parametrize(
    "address",
    [
        "instrumentation.registry:instrumentation",
        "tracer.otel:_thread_context",
        "tracer.binding:observations",
        "tracer.trace_shipper:trace_shippers",
    ],
)
def test_threads_that_begin_together_share_what_a_process_has_one_of(address: str) -> None:
    """Two sets of patches would be applied one over the other, and record everything twice."""
    assert isinstance(pkgutil.resolve_name(f"agentlightning.{address}"), once)
