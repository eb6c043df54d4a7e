"""A patch changes a library and leaves no trace of it, whatever else happens to that library meanwhile."""

import asyncio
import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentlightning.instrumentation.patch import _WATCH, Patch, PatchedCall

LIBRARY = "library_for_test_patch"


class Base:
    def greet(self, name: str = "you") -> str:
        return f"hello {name}"


class Derived(Base):
    async def fetch(self, name: str) -> str:
        await asyncio.sleep(0)
        return f"fetched {name}"

    @staticmethod
    def alone() -> str:
        return "alone"

    @classmethod
    def of(cls) -> str:
        return cls.__name__

    @property
    def size(self) -> int:
        return 1


def shout(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs).upper()


async def shout_later(original: Any, *args: Any, **kwargs: Any) -> Any:
    answer = await original(*args, **kwargs)
    return answer.upper()


class Shouting(Patch):
    """Replaces whatever the test names."""

    name = "library"
    module = LIBRARY

    def __init__(self, *changes: tuple[Any, str, Any]) -> None:
        super().__init__()
        self.changes = changes

    def change(self, module: ModuleType) -> None:
        for owner, attribute, wrapper in self.changes:
            self.replace(owner, attribute, wrapper)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(LIBRARY)
    monkeypatch.setitem(sys.modules, LIBRARY, module)
    return module


# ---------------------------------------------------------------------- replacing


def test_a_method_is_replaced_for_objects_made_before_and_after() -> None:
    before = Base()
    with Shouting((Base, "greet", shout)):
        assert (before.greet(), Base().greet(name="all"), Derived().greet()) == ("HELLO YOU", "HELLO ALL", "HELLO YOU")
    assert before.greet() == "hello you"


def test_an_inherited_method_is_not_left_on_the_class_below() -> None:
    with Shouting((Derived, "greet", shout)):
        assert (Derived().greet(), Base().greet()) == ("HELLO YOU", "hello you")
    assert "greet" not in vars(Derived)


async def test_a_coroutine_function_stays_one() -> None:
    with Shouting((Derived, "fetch", shout_later)):
        assert inspect.iscoroutinefunction(Derived.fetch)
        assert await Derived().fetch("it") == "FETCHED IT"
    assert await Derived().fetch("it") == "fetched it"


def retried(function: Any) -> Any:
    @functools.wraps(function)
    async def retry(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return retry


async def fetch(name: str, after: float = 1.0) -> str:
    await asyncio.sleep(0)
    return f"fetched {name}"


@pytest.mark.parametrize(
    "function", [fetch, functools.partial(fetch, after=0.0), retried(fetch)], ids=["function", "partial", "decorated"]
)
async def test_what_surrounds_a_coroutine_function_lasts_until_its_end(library: Any, function: Any) -> None:
    library.fetch, ended = function, list[str]()

    @contextmanager
    def noted(original: object, /, *args: object, **kwargs: Any) -> Iterator[PatchedCall]:
        yield (made := PatchedCall(args, kwargs))
        ended.append(made.result)

    patch = Patch()
    patch.surround(library, "fetch", noted)
    fetching = library.fetch("it")
    assert ended == []

    assert await fetching == "fetched it"
    assert ended == ["fetched it"]
    patch.undo()
    assert library.fetch is function


def test_a_replaced_function_looks_like_the_original() -> None:
    signature, words = inspect.signature(Base.greet), Base.greet.__doc__
    with Shouting((Base, "greet", shout)):
        assert (Base.greet.__name__, Base.greet.__qualname__, Base.greet.__doc__) == ("greet", "Base.greet", words)
        assert inspect.signature(Base.greet) == signature


@pytest.mark.parametrize("attribute", ["alone", "of", "size"])
def test_what_is_no_plain_function_is_left_alone(attribute: str, caplog: pytest.LogCaptureFixture) -> None:
    found = vars(Derived)[attribute]

    with Shouting((Base, "greet", shout), (Derived, attribute, shout)) as patch:
        assert not patch.is_applied
        assert (Base().greet(), vars(Derived)[attribute]) == ("hello you", found)

    assert "is not as expected" in caplog.text


def test_two_patches_of_one_method_come_off_in_any_order() -> None:
    found = vars(Base)["greet"]
    first, second = Shouting((Base, "greet", shout)), Shouting((Base, "greet", lambda original, *args: "second"))
    first.apply()
    second.apply()

    first.undo()
    assert Base().greet() == "second"
    second.undo()

    assert Base().greet() == "hello you"
    assert inspect.unwrap(vars(Base)["greet"]) is found


def test_the_wrapper_of_someone_else_survives() -> None:
    patch = Shouting((Base, "greet", shout))
    patch.apply()
    ours = Base.greet

    @functools.wraps(ours)
    def theirs(self: Base) -> str:
        return f"<{ours(self)}>"

    Base.greet = theirs  # type: ignore[method-assign, assignment]
    try:
        assert Base().greet() == "<HELLO YOU>"
        patch.undo()
        assert (Base().greet(), vars(Base)["greet"]) == ("<hello you>", theirs)
    finally:
        Base.greet = inspect.unwrap(ours)  # type: ignore[method-assign]


def test_a_call_that_runs_while_the_patch_is_undone_ends_as_it_began() -> None:
    patches: list[Patch] = []

    def undo_and_shout(original: Any, *args: Any) -> Any:
        patches[0].undo()
        return shout(original, *args)

    patches.append(Shouting((Base, "greet", undo_and_shout)))
    with patches[0]:
        assert Base().greet() == "HELLO YOU"

    assert Base().greet() == "hello you"


# ---------------------------------------------------------------------- applying


def test_applying_and_undoing_twice_is_harmless() -> None:
    found, patch = vars(Base)["greet"], Shouting((Base, "greet", shout))

    patch.undo()
    patch.apply()
    patch.apply()
    assert patch.is_applied
    patch.undo()
    patch.undo()

    assert (patch.is_applied, vars(Base)["greet"]) == (False, found)


def test_what_was_changed_last_is_undone_first() -> None:
    undone: list[int] = []

    class Counting(Patch):
        name, module = "library", LIBRARY

        def change(self, module: ModuleType) -> None:
            for number in range(3):
                self.when_undone(functools.partial(undone.append, number))

    with Counting():
        assert undone == []

    assert undone == [2, 1, 0]


def test_a_change_that_cannot_be_undone_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Shouting):
        def change(self, module: ModuleType) -> None:
            super().change(module)
            self.when_undone(lambda: 1 / 0)

    with Stuck((Base, "greet", shout)):
        pass

    assert Base().greet() == "hello you"
    assert "could not be undone" in caplog.text


def test_a_library_that_is_not_as_expected_works_as_before(caplog: pytest.LogCaptureFixture) -> None:
    with Shouting((Base, "greet", shout), (Base, "no_such_method", shout)) as patch:
        assert (patch.is_applied, Base().greet()) == (False, "hello you")

    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "library (of unknown version) is not as expected (AttributeError" in warnings[0]


def test_a_patch_that_failed_can_be_tried_again() -> None:
    owner = SimpleNamespace()
    patch = Shouting((owner, "greet", shout))
    patch.apply()
    patch.undo()
    owner.greet = lambda: "hello"

    with patch:
        assert (patch.is_applied, owner.greet()) == (True, "HELLO")


def test_a_library_that_may_not_be_imported_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LIBRARY, None)
    with Shouting((Base, "greet", shout)) as patch:
        assert (patch.is_installed, patch.is_applied) == (False, False)


def test_threads_that_apply_and_undo_leave_the_library_as_it_was() -> None:
    found, patch = vars(Base)["greet"], Shouting((Base, "greet", shout))
    seen: set[str] = set()

    def work() -> None:
        for _ in range(200):
            with patch:
                seen.add(Base().greet())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert vars(Base)["greet"] is found
    assert seen <= {"hello you", "HELLO YOU"}


def test_undoing_and_applying_while_the_library_is_imported_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{LIBRARY}.py").write_text("def greet():\n    return 'hello'\n")
    is_told, is_waiting = threading.Event(), threading.Event()

    def hesitate(_: ModuleType) -> None:
        is_told.set()
        is_waiting.wait(0.2)

    cancel = _WATCH.when_imported(LIBRARY, hesitate)  # before the patch's own
    patch = Shouting((Base, "greet", shout))
    patch.apply()

    importing = threading.Thread(target=importlib.import_module, args=(LIBRARY,), daemon=True)
    importing.start()
    assert is_told.wait(10)
    patch.undo()
    applying = threading.Thread(target=patch.apply, daemon=True)
    applying.start()
    applying.join(10)
    importing.join(10)

    assert [applying.is_alive(), importing.is_alive()] == [False, False]
    assert Base().greet() == "HELLO YOU"
    patch.undo()
    cancel()
    assert Base().greet() == "hello you"
