"""What `agl run` tells when a program has ended: its figures, and what is known to be missing."""

import pytest

from agentlightning.cli.run import print_trace, report_of
from agentlightning.llm_proxy.flush import FlushedCalls
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Span

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


async def test_a_trace_holds_no_commands_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    store, evil = InMemoryLightningStore(), "\x1b]0;mine\x07 [/red] \x9b1m"
    rollout = await store.start_rollout(1)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    await store.add_span(Span.from_attributes(name=evil, attributes={"gen_ai.request.model": evil}, **ids))

    await print_trace(store, rollout.rollout_id, as_json=False)

    shown = capsys.readouterr().out
    assert shown.count("]0;mine  [/red]  1m") == 2
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)
