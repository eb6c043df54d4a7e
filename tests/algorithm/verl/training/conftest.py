"""verl's own training, in the environment of `make test-verl`: verl pins versions that the other tests do not want."""

import importlib.util

import pytest

REASON = "verl has an environment of its own: run `make test-verl`"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("verl") is None:
        for item in items:
            if "algorithm/verl/training" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=REASON))
