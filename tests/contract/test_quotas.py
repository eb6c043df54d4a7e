"""How much one attempt may write, over every back end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import QuotaExceeded
from agentlightning.store import LightningStore
from tests.contract.conftest import BACKENDS, known

LIMITS = {"max_attempt_spans": 5, "max_attempt_bytes": 60_000}
SMALL, LARGE = {"n": 1}, {"text": "x" * 20_000}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], LightningStore]:
    """Opens the store, the same one each time if it outlives its process."""
    return lambda: BACKENDS[request.param](tmp_path / "store.db", **LIMITS)


@pytest.mark.parametrize(("attributes", "fitting"), [(SMALL, 5), (LARGE, 2)], ids=["spans", "bytes"])
async def test_an_attempt_beyond_its_quota_is_refused(
    open_store: Any, make_span: Any, attributes: dict[str, Any], fitting: int
) -> None:
    store = open_store()
    rollout, other = await store.start_rollout("a"), await store.start_rollout("b")
    for _ in range(fitting):
        await store.add_span(make_span(rollout, attributes=attributes))

    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    for write in (
        lambda span: store.add_span(span),
        lambda span: store.add_many_spans([make_span(other), span]),
        lambda span: store.finish_attempt(*ids, "succeeded", spans=[span]),
    ):
        with pytest.raises(QuotaExceeded, match=f"Attempt '{ids[1]}' .* quota of 5 spans and 60000 bytes; .* raise"):
            await write(make_span(rollout, attributes=attributes))

    assert len(await store.query_spans(rollout.rollout_id)) == fitting
    assert await store.query_spans(other.rollout_id) == []
    await store.finish_attempt(*ids, "succeeded")
    retry = await store.start_attempt(rollout.rollout_id)
    assert await store.add_span(make_span(retry, attributes=attributes)) is not None
    await store.close()


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
async def test_a_quota_outlives_the_process(tmp_path: Path, make_span: Any, backend: str) -> None:
    store = BACKENDS[backend](tmp_path / "store.db", **LIMITS)
    rollout = await store.start_rollout("a")
    await store.add_many_spans([make_span(rollout, attributes=LARGE), make_span(rollout, attributes=LARGE)])
    copy: Any = store.__reduce__()[0]()  # as another process opens it
    await store.close()

    with pytest.raises(QuotaExceeded):
        await copy.add_many_spans([make_span(rollout, attributes=LARGE)])
    await copy.add_many_spans([make_span(rollout, attributes=SMALL) for _ in range(3)])
    with pytest.raises(QuotaExceeded):
        await copy.add_span(make_span(rollout, attributes=SMALL))
    await copy.close()


async def test_a_refused_batch_does_not_use_up_the_quota(open_store: Any, make_span: Any) -> None:
    store = open_store()
    rollout = await store.start_rollout("a")
    for _ in range(3):
        with pytest.raises(QuotaExceeded):
            await store.add_many_spans([make_span(rollout) for _ in range(6)])

    stored = await store.add_many_spans([make_span(rollout, sequence_id=0) for _ in range(5)])

    assert [known(span).sequence_id for span in stored] == [1, 2, 3, 4, 5]
    await store.close()
