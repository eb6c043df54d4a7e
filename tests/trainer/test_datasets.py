"""What `fit` takes for a data set: lists, files, data frames, records; and what it says of the rest."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from agentlightning.errors import ConfigurationError
from agentlightning.trainer.datasets import as_dataset
from agentlightning.types import Task

TASKS = [{"question": f"{number}?", "answer": str(number)} for number in range(5)]


class Question(BaseModel):
    question: str
    answer: str


def rows(dataset: Any) -> list[Any]:
    made = as_dataset("train_dataset", dataset)
    assert made is not None
    return [made[number] for number in range(len(made))]


def json_lines(path: Path) -> None:
    path.write_text("\n\n".join(map(json.dumps, TASKS)) + "\n")


def json_list(path: Path) -> None:
    path.write_text(json.dumps(TASKS))


def csv_rows(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(TASKS)


def parquet(path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow reads parquet files: make test-verl")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(TASKS), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("tasks.jsonl", json_lines),
        ("tasks.txt", json_lines),
        ("tasks.json", json_list),
        ("tasks.csv", csv_rows),
        ("tasks.parquet", parquet),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_of_tasks_is_a_data_set(
    tmp_path: Path, name: str, write: Callable[[Path], None], kind: type[str] | type[Path]
) -> None:
    write(tmp_path / name)
    assert rows(kind(tmp_path / name)) == TASKS


def test_lines_of_a_file_are_read_when_they_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    json_lines(path)
    made = as_dataset("train_dataset", path)
    assert made is not None
    path.write_text(path.read_text().replace("4?", "9?"))
    assert made[4]["question"] == "9?"
    assert made[-1] == made[4]
    with pytest.raises(IndexError):
        made[5]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tasks.jsonl", '{"a": 1}\n{"a": \n', "Line 2 of '.*tasks.jsonl' is not JSON"),
        ("tasks.jsonl", "\n", "There are no tasks in"),
        ("tasks.json", '{"a": 1}', "is a JSON dict; write a list of tasks"),
        ("tasks.csv", None, "cannot be read: .*No such file"),
        ("tasks.txt", None, "cannot be read: there is no such file; give tasks, or a .jsonl"),
    ],
)
def test_a_file_that_gives_no_tasks_says_why(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        as_dataset("train_dataset", tmp_path / name)


def test_a_pandas_frame_is_a_data_set() -> None:
    pandas = pytest.importorskip("pandas", reason="it is not among the packages of the other tests: make test-verl")
    made = rows(pandas.DataFrame([{"question": "why", "tries": 2, "share": 0.5}]))
    assert made == [{"question": "why", "tries": 2, "share": 0.5}]
    assert [type(value) for value in made[0].values()] == [str, int, float]


def test_a_hugging_face_data_set_stays_as_it_is() -> None:
    datasets = pytest.importorskip("datasets", reason="it is not among the packages of the other tests: make test-verl")
    given = datasets.Dataset.from_list(TASKS)
    assert as_dataset("train_dataset", given) is given
    assert rows(given) == TASKS
    with pytest.raises(ConfigurationError, match="give one of its values, such as a split"):
        as_dataset("train_dataset", datasets.DatasetDict({"train": given}))


def test_records_of_pydantic_are_plain_rows_and_tasks_stay_tasks() -> None:
    assert rows([Question(**one) for one in TASKS]) == TASKS
    task = Task(rollout_id="one", input="hello")
    assert rows([task]) == [task]


def test_a_list_stays_as_it_is() -> None:
    assert as_dataset("train_dataset", TASKS) is TASKS
    assert as_dataset("val_dataset", None) is None


def test_fit_reads_a_file(tmp_path: Path) -> None:
    json_lines(tmp_path / "tasks.jsonl")
    seen: list[str] = []

    @agl.rollout
    def agent(task: Any) -> float:
        seen.append(task["question"])
        return 1.0

    trainer = agl.Trainer(algorithm=agl.Baseline(), strategy="shm", progress="off")
    trainer.fit(agent, str(tmp_path / "tasks.jsonl"))

    assert sorted(seen) == [one["question"] for one in TASKS]
