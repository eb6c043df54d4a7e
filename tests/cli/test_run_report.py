"""What `agl run` tells when a program has ended: its figures, and what is known to be missing."""

import pytest

from agentlightning.cli.run import report_of
from agentlightning.llm_proxy.flush import FlushedCalls
from agentlightning.store import InMemoryLightningStore

UNASKED = "the proxy could not be asked: OSError: it answered 401"


@pytest.mark.parametrize(
    ("flushed", "missing"),
    [
        (FlushedCalls(stored=3), []),
        (FlushedCalls(lost={"too large": 2}), ["2 calls: too large"]),
        (FlushedCalls(lost={UNASKED: 0}), [UNASKED]),
        (FlushedCalls(unanswered=1), ["1 calls: not answered when the program ended"]),
        (
            FlushedCalls(unknown_proxies=1),
            ["what calls there were: the address of the proxy is not that of an `agl proxy`"],
        ),
    ],
    ids=["nothing", "lost calls", "a proxy that cannot say", "calls under way", "another gateway"],
)
async def test_what_is_missing_is_told(flushed: FlushedCalls, missing: list[str]) -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout({"question": "1 + 1"})

    names, values = (list(column.cells) for column in (await report_of(store, rollout, flushed, "runs.db")).columns)

    assert [value for name, value in zip(names, values, strict=True) if name == "not recorded"] == missing
    assert (values[names.index("model calls")], values[names.index("reward")]) == ("0", "none")
