"""Archives: everything out, everything back in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError, IncompatibleStore, InvalidTransition, InvalidValue
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreThreaded,
    SqliteLightningStore,
    export_store,
    import_store,
)
from agentlightning.types import PromptTemplate, RolloutConfig


async def fill(store: LightningStore, make_span: Any) -> None:
    """A bit of everything, in every state."""
    await store.add_resources({"p": PromptTemplate(template="a", engine="f-string")})
    await store.update_resources("mine", {"p": PromptTemplate(template="b", engine="jinja")})
    run = await store.start_run("r", config={"lr": 0.1})
    await store.add_metrics(run.run_id, 1, {"x": 0.5})
    first = await store.start_rollout({"a": [1, None, "ä"]}, "val", metadata={"k": 1}, worker_id="w")
    await store.add_span(make_span(first, sequence_id=5))
    await store.update_attempt(first.rollout_id, "latest", status="failed", metadata={"why": "x"})
    again = await store.start_attempt(first.rollout_id)
    await store.add_many_spans([make_span(again, sequence_id=n) for n in (6, 7)])
    await store.get_next_span_sequence_id(first.rollout_id, "x")
    await store.start_rollout("slow", config=RolloutConfig(timeout_seconds=10, max_attempts=2))
    for n in range(3):
        await store.enqueue_rollout(n, rollout_id=f"queued-{n}")
    await store.update_rollout("queued-0", status="preparing")
    await store.update_rollout("queued-0", status="queuing")
    await store.update_rollout("queued-1", output={"answer": ["ä", 1]})


async def content(store: LightningStore) -> list[Any]:
    rollouts = list(await store.query_rollouts())
    return [
        rollouts,
        [await store.query_attempts(r.rollout_id) for r in rollouts],
        [await store.query_spans(r.rollout_id) for r in rollouts],
        await store.query_resources(),
        await store.get_latest_resources(),
        await store.query_workers(),
        await store.query_runs(),
        [await store.query_metrics(run.run_id) for run in await store.query_runs()],
    ]


KINDS = ["memory", "sqlite"]


def build(kind: str, folder: Path, name: str, clock: Any) -> LightningStore:
    if kind == "memory":
        return LightningStoreThreaded(InMemoryLightningStore(clock=clock))
    return SqliteLightningStore(folder / f"{name}.db", clock=clock)


@pytest.mark.parametrize("source_kind", KINDS)
@pytest.mark.parametrize("target_kind", KINDS)
async def test_archive_carries_everything(
    tmp_path: Path, make_span: Any, clock: Any, source_kind: str, target_kind: str
) -> None:
    source = build(source_kind, tmp_path, "source", clock)
    target = build(target_kind, tmp_path, "target", clock)
    await fill(source, make_span)

    written = await export_store(source, tmp_path / "a.jsonl")
    read = await import_store(target, tmp_path / "a.jsonl")

    assert written == read
    with pytest.raises(InvalidTransition, match="into an empty store"):
        await import_store(target, tmp_path / "a.jsonl")
    assert await content(target) == await content(source)
    first = (await source.query_rollouts())[0]
    for store in (source, target):
        assert await store.get_next_span_sequence_id(first.rollout_id, "x") == 9
        claimed = [await store.dequeue_rollout() for _ in range(3)]
        assert [c.rollout_id for c in claimed if c] == ["queued-1", "queued-2", "queued-0"]
        clock.advance(0)
    await source.close()
    await target.close()


async def test_imported_attempts_still_time_out(tmp_path: Path, make_span: Any, clock: Any) -> None:
    source, target = InMemoryLightningStore(clock=clock), InMemoryLightningStore(clock=clock)
    rollout = await source.start_rollout("slow", config=RolloutConfig(timeout_seconds=10))
    await export_store(source, tmp_path / "a.jsonl")
    await import_store(target, tmp_path / "a.jsonl")

    clock.advance(11)

    assert (await target.get_rollout_by_id(rollout.rollout_id)).status == "failed"  # type: ignore[union-attr]


def record(kind: Any, value: Any) -> str:
    return json.dumps({"kind": kind, "value": value})


def with_metrics_of_no_run(lines: list[str]) -> list[str]:
    end = json.loads(lines[-1])
    del end["value"]["run"]
    return [*(line for line in lines[:-1] if '"kind":"run"' not in line), json.dumps(end)]


def with_other(kind: str, change: Any) -> Callable[[list[str]], list[str]]:
    """An archive in which the first record of a kind is another one."""

    def damage(lines: list[str]) -> list[str]:
        place = next(n for n, line in enumerate(lines) if f'"kind":"{kind}"' in line)
        value = json.loads(lines[place])["value"]
        changed = {**value, **change} if isinstance(value, dict) and isinstance(change, dict) else change
        return [*lines[:place], record(kind, changed), *lines[place + 1 :]]

    return damage


OTHERS: list[tuple[str, Any]] = [
    *(("latest_resources", value) for value in (5, None, ["mine"], {"a": 1}, "nobody")),
    *(("sequence", value) for value in ("x", 5, [1, 2], ["nobody", 1], ["queued-1", "1"], ["queued-1", 2**64 - 1])),
    *(("sequence", value) for value in (["queued-1", -1], ["queued-1", 1, 2], {"queued-1": 1})),
    *(("queued", value) for value in (5, None, ["queued-1"], {"a": 1}, "nobody")),
    *(("resources", {"resources_id": value}) for value in (5, None, ["mine"])),
    *(("rollout", {"resources_id": value}) for value in (5, ["mine"])),
    *((kind, {"sequence_id": 2**64 - 1}) for kind in ("attempt", "span")),
    ("metrics", {"step": 2**64 - 1}),
    ("resources", {"version": 2**64 - 1}),
]
DAMAGES: dict[str, Callable[[list[str]], list[str]]] = {
    "cut off": lambda lines: lines[:-3],
    "without its end": lambda lines: lines[:-1],
    "no JSON": lambda lines: [*lines[:2], "{ not json", *lines[2:]],
    "not a rollout": lambda lines: [*lines[:-1], record("rollout", {"rollout_id": 5}), lines[-1]],
    "spans of no attempt": lambda lines: [line for line in lines if '"kind":"attempt"' not in line],
    "of a newer release": lambda lines: [lines[0].replace('"version":1', '"version":9'), *lines[1:]],
    "a list for a kind": lambda lines: [*lines[:-1], record(["rollout"], {}), lines[-1]],
    "an object for a kind": lambda lines: [lines[0], record({"rollout": 1}, {}), *lines[1:]],
    "metrics of no run": with_metrics_of_no_run,
    "something else": lambda lines: [record("rollout", {})],
    **{f"{kind} {value}": with_other(kind, value) for kind, value in OTHERS},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_damaged_archive_is_refused_whole(tmp_path: Path, make_span: Any, clock: Any, kind: str) -> None:
    source, target = InMemoryLightningStore(clock=clock), build(kind, tmp_path, "t", clock)
    await fill(source, make_span)
    path, damaged = tmp_path / "a.jsonl", tmp_path / "damaged.jsonl"
    await export_store(source, path)

    for name, damage in DAMAGES.items():
        damaged.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
        with pytest.raises(IncompatibleStore, match=r"damaged\.jsonl"):
            raise AssertionError(f"{name}: {await import_store(target, damaged)}")

        counts = await target.statistics()
        assert (counts["total_rollouts"], counts["total_resources"], counts["queue_length"]) == (0, 0, 0), name
    await target.close()


async def test_task_that_json_cannot_hold_is_not_exported_in_part(tmp_path: Path) -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout(object())

    with pytest.raises(InvalidValue, match="input"):
        await export_store(store, tmp_path / "a.jsonl")

    assert list(tmp_path.iterdir()) == []


async def test_large_archive_is_imported_in_portions(
    tmp_path: Path, make_span: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.store.archive.ROLLOUTS_AT_ONCE", 10)
    async with SqliteLightningStore(tmp_path / "s.db") as source, SqliteLightningStore(tmp_path / "t.db") as target:
        for n in range(55):
            rollout = await source.start_rollout(n)
            await source.add_span(make_span(rollout))
        await source.enqueue_rollout("queued")
        await export_store(source, tmp_path / "a.jsonl")
        await import_store(target, tmp_path / "a.jsonl")

        assert await target.query_rollouts() == await source.query_rollouts()
        assert (await target.statistics())["total_spans"] == 55


async def test_place_or_store_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    store = InMemoryLightningStore()

    with pytest.raises(ConfigurationError, match=r"Cannot use '.*nowhere"):
        await export_store(store, tmp_path / "nowhere" / "a.jsonl")
    with pytest.raises(ConfigurationError, match=r"Cannot use '.*missing\.jsonl"):
        await import_store(store, tmp_path / "missing.jsonl")
    with pytest.raises(ConfigurationError, match="do it where the store itself is"):
        await export_store(LightningStore(), tmp_path / "a.jsonl")
