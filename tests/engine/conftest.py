"""What the tests of the engine share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tests run side by side; an operation of a small model is best computed by the thread that asks for it."""
    torch = pytest.importorskip("torch", reason="the engine needs torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
