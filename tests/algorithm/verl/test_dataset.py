"""Tasks as verl's data set."""

from pathlib import Path

import orjson
import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.verl.dataset import AgentDataset

ROWS = [{"question": "1 + 1", "data_source": "sums", "reward_model": {"ground_truth": "2"}}, {"question": "2 + 2"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.jsonl", b"\n".join(map(orjson.dumps, ROWS)) + b"\n"), ("t.json", orjson.dumps(ROWS))],
    ids=["lines", "list"],
)
def test_rows_of_files_are_tasks_with_what_verls_metrics_read(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)

    dataset = AgentDataset([str(tmp_path / name)], tokenizer=None, processor=None, config=None, max_samples=-1)

    assert [dataset[number]["task"]["input"] for number in range(len(dataset))] == ROWS
    assert [dataset[number]["data_source"] for number in (0, 1)] == ["sums", "agent"]
    assert [dataset[number]["reward_model"] for number in (0, 1)] == [{"ground_truth": "2"}, {}]


def test_rows_of_parquet_files_are_tasks(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="verl brings pyarrow: run `make test-verl`")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([{"question": "1 + 1"}]), tmp_path / "t.parquet")
    assert AgentDataset(str(tmp_path / "t.parquet"))[0]["task"] == {"input": {"question": "1 + 1"}}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", b"a,b", "give .parquet, .jsonl, or .json"),
        ("t.json", b"{}", "give .parquet, .jsonl, or .json"),
        ("t.jsonl", b"{", "cannot be read"),
        ("t.jsonl", b"", "no rows"),
        ("t.jsonl", None, "No such file"),
    ],
    ids=["kind", "no list", "broken", "empty", "missing"],
)
def test_files_that_cannot_be_read_are_told(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=words):
        AgentDataset(str(tmp_path / name))
