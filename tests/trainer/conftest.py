"""What the tests of trainers share."""

from collections.abc import Iterator

import pytest

from tests.e2e.server_process import left_behind


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process is left, and nothing in the environment that says where to run."""
    for name in ("AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_MANAGED_STORE", "AGL_STORE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert left_behind() == []
