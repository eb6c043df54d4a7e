"""The tree of errors stands in the docstring of its module; these tests hold the classes to it."""

import builtins
import pickle
import re
from typing import NamedTuple

import pytest

from agentlightning import errors
from agentlightning.errors import AgentLightningError


class Leaf(NamedTuple):
    """One line of the tree."""

    name: str
    parent: str
    builtin: str | None
    status: int | None


def read_tree(text: str) -> list[Leaf]:
    """The tree below its root; the deeper a line is indented, the younger the class."""
    branch = {0: "AgentLightningError"}
    tree = []
    for line in re.finditer(
        r"^(?P<indent>.*── )(?P<name>\w+)(?: \((?P<builtin>\w+)\))? *(?P<status>\d{3})?", text, re.M
    ):
        depth = len(line["indent"])
        parent = branch[max(known for known in branch if known < depth)]
        branch = {known: name for known, name in branch.items() if known < depth} | {depth: line["name"]}
        tree.append(Leaf(line["name"], parent, line["builtin"], int(line["status"]) if line["status"] else None))
    return tree


TREE = read_tree(errors.__doc__ or "")
every_leaf = pytest.mark.parametrize("leaf", TREE, ids=lambda leaf: leaf.name)
every_error = pytest.mark.parametrize("name", errors.__all__)


def test_tree_names_every_public_error() -> None:
    assert ["AgentLightningError", *(leaf.name for leaf in TREE)] == errors.__all__


@every_leaf
def test_error_is_as_the_tree_has_it(leaf: Leaf) -> None:
    error, parent = getattr(errors, leaf.name), getattr(errors, leaf.parent)

    assert parent in error.__bases__
    assert issubclass(error, getattr(builtins, leaf.builtin) if leaf.builtin else parent)
    assert 400 <= error.http_status <= 599
    assert leaf.status in (None, error("gone").http_status)


@every_error
def test_error_pickles_with_its_message(name: str) -> None:
    error = getattr(errors, name)("Rollout 'ro-1' is gone; ask again.")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert isinstance(copy, AgentLightningError)
    assert str(copy) == "Rollout 'ro-1' is gone; ask again."
