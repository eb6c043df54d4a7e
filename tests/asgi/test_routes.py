"""Route tables: words before values, segments compared as they were sent."""

import pytest

from agentlightning.asgi.routes import RouteTable
from agentlightning.errors import InvalidValue


@pytest.fixture
def table() -> RouteTable[str]:
    table: RouteTable[str] = RouteTable()
    for verb, path in [
        ("GET", "/rollouts/{id}"),
        ("POST", "/rollouts/{id}"),
        ("POST", "/rollouts/search"),
        ("GET", "/{kind}/latest"),
        ("GET", "/rollouts/{id}/attempts/{attempt}"),
    ]:
        table.add(verb, path, f"{verb} {path}")
    return table


@pytest.mark.parametrize(
    ("request_line", "path", "values"),
    [
        ("POST /rollouts/search", "/rollouts/search", {}),
        ("GET /rollouts/search", "/rollouts/{id}", {"id": "search"}),
        ("POST /rollouts/%73earch", "/rollouts/{id}", {"id": "search"}),
        ("GET /rollouts/a%2Fb", "/rollouts/{id}", {"id": "a/b"}),
        ("GET /rollouts/", "/rollouts/{id}", {"id": ""}),
        ("GET /rollouts/latest", "/rollouts/{id}", {"id": "latest"}),
        ("GET /runs/latest", "/{kind}/latest", {"kind": "runs"}),
        ("GET /rollouts/a/attempts/b", "/rollouts/{id}/attempts/{attempt}", {"id": "a", "attempt": "b"}),
        ("PUT /rollouts/a", None, {}),
        ("GET /rollouts", None, {}),
        ("GET /rollouts/a/", None, {}),
    ],
)
def test_a_path_leads_to_its_route(
    request_line: str, path: str | None, values: dict[str, str], table: RouteTable[str]
) -> None:
    verb, _, sent = request_line.partition(" ")
    assert table.find(verb, sent.encode()) == (None if path is None else (f"{verb} {path}", values))


def test_verbs_of_a_path_are_known(table: RouteTable[str]) -> None:
    assert table.verbs(b"/rollouts/search") == ["GET", "POST"]
    assert table.verbs(b"/nothing") == []


def test_a_value_that_is_no_text_is_refused(table: RouteTable[str]) -> None:
    with pytest.raises(InvalidValue, match="UTF-8"):
        table.find("GET", b"/rollouts/%FF")
