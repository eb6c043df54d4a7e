"""A deprecation warning points at the line of the user."""

import pytest

from agentlightning.utils.deprecation import deprecated


def test_deprecated_points_at_the_caller_of_the_deprecated_function() -> None:
    namespace = {"deprecated": deprecated}
    exec(compile("def old(): deprecated('old() is going away.')", "library.py", "exec"), namespace)

    with pytest.warns(DeprecationWarning, match="old.. is going away") as caught:
        namespace["old"]()  # type: ignore[call-arg]  # defined by exec

    assert caught[0].filename == __file__
