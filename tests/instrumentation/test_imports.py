"""Being told of an import changes nothing about the import."""

import copy
import importlib
import importlib.resources
import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agentlightning.instrumentation.imports import ImportWatch, is_installed

NAMES = ("watched_plain", "watched_package", "watched_namespace", "watched_broken", "watched_slow")


@pytest.fixture
def watch() -> Iterator[ImportWatch]:
    watch = ImportWatch()
    yield watch
    assert watch not in sys.meta_path, "something is still waited for"


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A few modules that can be imported, and are forgotten afterwards."""
    (tmp_path / "watched_plain.py").write_text("class Thing:\n    size = 1\n\ndef double(x):\n    return 2 * x\n")
    package = tmp_path / "watched_package"
    package.mkdir()
    (package / "__init__.py").write_text("from watched_package.inner import VALUE\n")
    (package / "inner.py").write_text("VALUE = 7\n")
    (package / "notes.txt").write_text("read me")
    (tmp_path / "watched_namespace").mkdir()
    (tmp_path / "watched_namespace" / "part.py").write_text("VALUE = 8\n")
    (tmp_path / "watched_broken.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "watched_slow.py").write_text("import time\ntime.sleep(0.05)\nIS_DONE = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def test_a_module_is_told_of_once_when_it_is_imported(watch: ImportWatch) -> None:
    told: list[ModuleType] = []
    watch.when_imported("watched_plain", told.append)

    assert (told, "watched_plain" in sys.modules) == ([], False)
    module = importlib.import_module("watched_plain")
    importlib.import_module("watched_plain")

    assert told == [module]
    assert module.double(2) == 4


def test_a_module_that_was_imported_before_is_told_of_at_once(watch: ImportWatch) -> None:
    module = importlib.import_module("watched_plain")
    told: list[ModuleType] = []
    watch.when_imported("watched_plain", told.append)
    assert told == [module]


def test_who_cancelled_is_not_told(watch: ImportWatch) -> None:
    told: list[str] = []
    cancel = watch.when_imported("watched_plain", lambda _: told.append("first"))
    watch.when_imported("watched_plain", lambda _: told.append("second"))

    cancel()
    cancel()
    importlib.import_module("watched_plain")

    assert told == ["second"]


def test_a_submodule_is_told_of_before_its_package_goes_on(watch: ImportWatch) -> None:
    told: list[str] = []
    watch.when_imported("watched_package.inner", lambda module: told.append(module.__name__))
    watch.when_imported("watched_package", lambda module: told.append(module.__name__))

    importlib.import_module("watched_package")

    assert told == ["watched_package.inner", "watched_package"]


def test_a_namespace_package_can_be_imported_and_its_modules_watched(watch: ImportWatch) -> None:
    told: list[str] = []
    cancel = watch.when_imported("watched_namespace", lambda module: told.append(module.__name__))
    watch.when_imported("watched_namespace.part", lambda module: told.append(module.__name__))

    assert importlib.import_module("watched_namespace.part").VALUE == 8
    cancel()

    assert "watched_namespace.part" in told


def test_an_import_that_fails_fails_as_ever_and_may_succeed_later(watch: ImportWatch, library: Path) -> None:
    told: list[ModuleType] = []
    watch.when_imported("watched_broken", told.append)

    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        importlib.import_module("watched_broken")
    assert (told, "watched_broken" in sys.modules) == ([], False)
    (library / "watched_broken.py").write_text("VALUE = 1\n")
    importlib.invalidate_caches()

    assert told == [importlib.import_module("watched_broken")]


def test_a_forbidden_module_is_waited_for(watch: ImportWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[ModuleType] = []
    monkeypatch.setitem(sys.modules, "watched_plain", None)

    cancel = watch.when_imported("watched_plain", told.append)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("watched_plain")

    cancel()
    assert told == []


def test_the_loader_of_a_module_is_its_own(watch: ImportWatch) -> None:
    plain = importlib.import_module("watched_plain")
    del sys.modules["watched_plain"]
    watch.when_imported("watched_plain", lambda _: None)

    module = importlib.import_module("watched_plain")

    assert module.__spec__ is not None
    assert plain.__spec__ is not None
    assert type(module.__loader__) is type(plain.__loader__)
    assert module.__spec__.loader is module.__loader__
    assert (module.__file__, module.__spec__.origin) == (plain.__file__, plain.__spec__.origin)


def test_others_may_look_for_the_module_without_importing_it(watch: ImportWatch, library: Path) -> None:
    told: list[ModuleType] = []
    watch.when_imported("watched_plain", told.append)

    spec = importlib.util.find_spec("watched_plain")
    assert spec is not None
    assert spec.loader is not None
    assert (spec.origin, spec.loader.get_source("watched_plain")) == (  # type: ignore[attr-defined]
        str(library / "watched_plain.py"),
        (library / "watched_plain.py").read_text(),
    )
    copy.copy(spec.loader)
    assert told == []

    module = importlib.import_module("watched_plain")
    assert told == [module]


def test_a_copy_that_someone_loads_is_not_the_module(watch: ImportWatch) -> None:
    told: list[ModuleType] = []
    watch.when_imported("watched_plain", told.append)
    spec = importlib.util.find_spec("watched_plain")
    assert spec is not None
    assert spec.loader is not None

    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    assert copied.double(1) == 2

    assert told == []
    module = importlib.import_module("watched_plain")
    assert told == [module]


def test_many_threads_import_at_once_and_it_is_told_of_once(watch: ImportWatch) -> None:
    told: list[ModuleType] = []
    watch.when_imported("watched_slow", told.append)
    begin, seen = threading.Barrier(16), []

    def work() -> None:
        begin.wait()
        seen.append(importlib.import_module("watched_slow").IS_DONE)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert (len(told), seen) == (1, [True] * 16)


def test_who_comes_during_an_import_is_told_after_it(watch: ImportWatch) -> None:
    told: list[bool] = []
    importing = threading.Thread(target=importlib.import_module, args=("watched_slow",))
    importing.start()
    while "watched_slow" not in sys.modules:
        time.sleep(0.001)

    watch.when_imported("watched_slow", lambda module: told.append(module.IS_DONE))
    importing.join()

    assert told == [True]


def test_who_comes_during_an_import_that_fails_waits_for_the_next(watch: ImportWatch, library: Path) -> None:
    (library / "watched_slow.py").write_text("import time\ntime.sleep(0.1)\nraise ImportError('no luck')\n")
    told: list[ModuleType] = []

    def fail() -> None:
        with pytest.raises(ImportError, match="no luck"):
            importlib.import_module("watched_slow")

    importing = threading.Thread(target=fail)
    importing.start()
    while "watched_slow" not in sys.modules:
        time.sleep(0.001)
    watch.when_imported("watched_slow", told.append)
    importing.join()
    (library / "watched_slow.py").write_text("IS_DONE = True\n")
    importlib.invalidate_caches()

    assert told == []
    module = importlib.import_module("watched_slow")
    assert told == [module]


@pytest.mark.parametrize(("package", "there"), [("json", True), ("watched_plain", True), ("watched_absent", False)])
def test_a_package_is_found_without_being_imported(package: str, there: bool) -> None:
    assert is_installed(package) is there
    assert ("watched_plain" in sys.modules) is False


def test_instrumenting_imports_no_library() -> None:
    code = """
import sys
from agentlightning.instrumentation import instrument_all, uninstrument_all
before, finders = set(sys.modules), list(sys.meta_path)
instrument_all()
assert not {"openai", "anthropic", "litellm", "langchain_core", "crewai"} & set(sys.modules), set(sys.modules) - before
import openai
assert openai._base_client.SyncAPIClient.request.__wrapped__
uninstrument_all()
assert not hasattr(openai._base_client.SyncAPIClient.request, "__wrapped__")
assert sys.meta_path == finders, sys.meta_path
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("store", ["", "agl.InMemoryLightningStore()"], ids=["no store", "a store"])
def test_tracer_that_is_open_when_the_interpreter_ends_says_nothing(store: str) -> None:
    script = f"""
import time
import agentlightning as agl
opened = agl.OtelTracer().lifespan({store})
opened.__enter__()
time.sleep(2)  # until its thread has nothing more to do
"""

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)

    assert (ended.stdout, ended.stderr) == ("", "")
