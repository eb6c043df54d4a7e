"""What `agl run` tells when a program has ended: its figures, and what is known to be missing."""

import pytest

from agentlightning.cli.run import Report
from agentlightning.llm_proxy.flush import FlushedCalls
from agentlightning.store import InMemoryLightningStore


@pytest.mark.parametrize(
    ("flushed", "missing"),
    [
        pytest.param(FlushedCalls(stored=3), (), id="nothing"),
        pytest.param(FlushedCalls(lost={"too large": 2}), ("2 calls: too large",), id="lost calls"),
        pytest.param(
            FlushedCalls(lost={"the proxy could not be asked: OSError: it answered 401": 0}),
            ("the proxy could not be asked: OSError: it answered 401",),
            id="a proxy that cannot say",
        ),
        pytest.param(
            FlushedCalls(unanswered=1), ("1 calls: not answered when the program ended",), id="calls under way"
        ),
        pytest.param(
            FlushedCalls(unknown_proxies=1),
            ("what calls there were: the address of the proxy is not that of an `agl proxy`",),
            id="another gateway",
        ),
    ],
)
async def test_what_is_missing_is_told(flushed: FlushedCalls, missing: tuple[str, ...]) -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout({"question": "1 + 1"})

    report = await Report.of(store, rollout, flushed)

    assert report.missing == missing
    assert (report.calls, report.reward) == (0, None)
