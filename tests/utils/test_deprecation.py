"""Old names work, warn once, and point at the line that used them."""

import inspect
import json
import sys
import types
from collections.abc import Iterator

import pytest

from agentlightning.utils.deprecation import deprecated, moved_names, renamed_arguments

DOOR = "agentlightning_test_door"


@pytest.fixture
def door() -> Iterator[types.ModuleType]:
    """A module whose contents have moved to `json`."""
    module = types.ModuleType(DOOR)
    names = {"dumps": "json:dumps", "loads": "json:loads", "lost": "agentlightning.no_such_module:lost"}
    module.__getattr__ = moved_names(DOOR, names)  # type: ignore[method-assign]  # how a module declares it
    sys.modules[DOOR] = module
    yield module
    del sys.modules[DOOR]


@renamed_arguments(n_workers="n_runners", wait="timeout_seconds")
def start(n_runners: int = 1, *, timeout_seconds: float = 0.0) -> tuple[int, float]:
    """Start some runners."""
    return n_runners, timeout_seconds


@renamed_arguments(n_workers="n_runners")
async def start_async(n_runners: int = 1) -> int:
    return n_runners


def test_moved_name_is_the_object_at_its_new_place(door: types.ModuleType) -> None:
    with pytest.warns(DeprecationWarning, match=r"agentlightning_test_door.dumps has moved; use json.dumps\."):
        assert door.dumps is json.dumps


def test_moved_name_warns_once(door: types.ModuleType) -> None:
    with pytest.warns(DeprecationWarning, match="has moved") as caught:
        _ = (door.dumps, door.dumps, door.loads, door.loads)

    assert len(caught) == 2


def test_moved_name_points_at_the_line_that_touched_it(door: types.ModuleType) -> None:
    with pytest.warns(DeprecationWarning, match="has moved") as caught:
        _ = door.dumps

    assert caught[0].filename == __file__


def test_moved_name_points_at_the_line_that_imported_it(door: types.ModuleType) -> None:
    with pytest.warns(DeprecationWarning, match="has moved") as caught:
        from agentlightning_test_door import dumps  # type: ignore[import-not-found]  # noqa: F401  # the fixture makes it

    assert [warning.filename for warning in caught] == [__file__]


def test_unknown_name_is_an_attribute_error_of_the_module(door: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'agentlightning_test_door' has no attribute 'load'"):
        _ = door.load


def test_new_place_is_imported_on_first_touch_only(door: types.ModuleType) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"agentlightning.no_such_module"):
        _ = door.lost


def test_former_keyword_reaches_the_present_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"Argument 'n_workers' of start\(\) is now called 'n_runners'"):
        assert start(n_workers=3) == (3, 0.0)  # type: ignore[call-arg]  # the former name


def test_former_keyword_points_at_the_line_that_used_it() -> None:
    with pytest.warns(DeprecationWarning, match="is now called") as caught:
        start(n_workers=3)  # type: ignore[call-arg]  # the former name

    assert caught[0].filename == __file__


def test_present_keywords_do_not_warn() -> None:
    assert start(2, timeout_seconds=1.0) == (2, 1.0)


def test_each_former_keyword_warns() -> None:
    with pytest.warns(DeprecationWarning, match="is now called") as caught:
        assert start(n_workers=2, wait=1.0) == (2, 1.0)  # type: ignore[call-arg]  # the former names

    assert len(caught) == 2


def test_both_keywords_are_rejected_by_name() -> None:
    with pytest.raises(TypeError, match=r"start\(\) got both 'n_runners' and its former name 'n_workers'"):
        start(n_runners=1, n_workers=2)  # type: ignore[call-arg]  # the former name


def test_former_keyword_beside_the_positional_argument_is_rejected_by_name() -> None:
    with pytest.raises(TypeError, match=r"start\(\) got both 'n_runners' and its former name 'n_workers'"):
        start(1, n_workers=2)  # type: ignore[call-arg]  # the former name


def test_decorated_function_keeps_its_signature_and_doc() -> None:
    assert list(inspect.signature(start).parameters) == ["n_runners", "timeout_seconds"]
    assert start.__doc__ == "Start some runners."


def test_decorated_coroutine_function_stays_one() -> None:
    assert inspect.iscoroutinefunction(start_async)


async def test_former_keyword_of_a_coroutine_function_points_at_the_line_that_awaits() -> None:
    with pytest.warns(DeprecationWarning, match="n_workers") as caught:
        assert await start_async(n_workers=3) == 3  # type: ignore[call-arg]  # the former name

    assert caught[0].filename == __file__


def test_deprecated_points_at_the_caller_of_the_deprecated_function() -> None:
    namespace = {"deprecated": deprecated}
    exec(compile("def old(): deprecated('old() is going away.')", "library.py", "exec"), namespace)

    with pytest.warns(DeprecationWarning, match="old.. is going away") as caught:
        namespace["old"]()  # type: ignore[call-arg]  # defined by exec

    assert caught[0].filename == __file__
