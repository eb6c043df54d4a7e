"""Drawing a trace tree with Graphviz."""

import importlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentlightning.adapter.tree import TraceTree

__all__ = ["draw"]

ID_DIGITS = 8
"""How much of an id is shown."""


def draw(tree: "TraceTree", filename: str, match: str | None) -> None:
    """Write `filename`.png: all spans, or those whose name matches and their ancestors."""
    picture = _graphviz().Digraph(comment="Trace tree")
    nodes = tree.traverse()
    shown = {id(node) for node in nodes if match is None or re.search(match, node.span.name)}
    for node in reversed(nodes):  # children come before their parents
        if any(id(child) in shown for child in node.children):
            shown.add(id(node))
    for node in nodes:
        if id(node) in shown:
            picture.node(node.id, _label(node))
            for child in node.children:
                if id(child) in shown:
                    picture.edge(node.id, child.id)
    picture.render(filename, format="png", cleanup=True)


def _label(node: "TraceTree") -> str:
    agent = node.agent_name()
    return f"{node.id[:ID_DIGITS]} ({node.span.name})" + ("" if agent is None else f" [{agent}]")


def _graphviz() -> Any:
    try:
        return importlib.import_module("graphviz")
    except ImportError as error:
        raise ImportError(
            "Drawing a trace needs the package graphviz (pip install graphviz) and Graphviz's program `dot`."
        ) from error
