"""The example of an SQL agent in LangGraph: its database, its graph, and the optimisation as a user runs it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.langchain_agents import chat
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel

RUNS_IN = ("openai3",)

FOLDER = Path(__file__).parents[2] / "examples" / "sql_agent"


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the database; the others of the example can be imported beside it."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("shop")


def test_the_database_is_always_the_same(shop: Any, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.db", "two.db")]
    for path in paths:
        shop.make_database(path)

    one, two = (shop.make_questions(path) for path in paths)
    assert one == two
    assert len(one) == len({task["question"] for task in one}) > 100
    assert all(task["answer"] for task in one)


def answered(shop: Any, path: Path, stub_model: StubModel, script: Script) -> Any:
    """What the graph answers, with a model that writes what the script says."""
    sql_agent = importlib.import_module("sql_agent")
    shop.make_database(path)
    stub_model.script = script
    return sql_agent.answer(sql_agent.build_agent(chat(stub_model), path), "How many are there?")


def test_the_graph_corrects_a_query_that_the_database_refuses(shop: Any, tmp_path: Path, stub_model: StubModel) -> None:
    script = Script(["SELECT label FROM products", "```sql\nSELECT count(*) FROM products\n```"])

    rows = answered(shop, tmp_path / "shop.db", stub_model, script)

    assert rows == [(len(shop.PRICES),)]
    assert "The database says: no such column: label" in stub_model.requests[-1].text


def test_the_graph_gives_up_and_cannot_change_the_database(shop: Any, tmp_path: Path, stub_model: StubModel) -> None:
    path = tmp_path / "shop.db"

    assert answered(shop, path, stub_model, Script(lambda request: "DROP TABLE orders")) is None
    assert len(stub_model.requests) == 3
    assert shop.rows_of(path, "SELECT count(*) FROM orders") == [(shop.ORDERS,)]


@pytest.mark.slow
def test_the_optimisation_finds_a_custom_of_the_shop(tmp_path: Path) -> None:
    output = tmp_path / "best.json"
    command = [sys.executable, str(FOLDER / "optimise.py"), "--output", str(output)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}

    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=110)

    assert done.returncode == 0, done.stderr
    assert "Validation score: 0." in done.stdout
    best = json.loads(output.read_text(encoding="utf-8"))["prompts"]["prompt"]["template"]
    assert "{schema}" in best
    assert any(word in best.lower() for word in ("cents", "cancelled", "alphabet"))
