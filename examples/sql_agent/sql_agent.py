"""An agent that answers questions with SQL: a LangGraph graph that writes a query, runs it, and corrects it.

It knows nothing of Agent Lightning. The model is where the OpenAI SDK looks for it: OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import re
import sqlite3
from pathlib import Path
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from shop import Rows, rows_of

MOST_QUERIES = 3
FENCED = re.compile(r"```(?:sql)?\n(.*?)```", re.DOTALL)


class Work(MessagesState):
    """What the nodes hand on."""

    rows: Rows | None
    """What the last query gave; None if the database refused it."""
    tries: int


def build_agent(model: ChatOpenAI, path: Path) -> Any:
    """The graph: write a query, run it; if the database refuses it, write another."""

    def write_query(state: Work) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])], "tries": state.get("tries", 0) + 1}

    def run_query(state: Work) -> dict[str, Any]:
        written = str(state["messages"][-1].content)
        fenced = FENCED.search(written)
        try:
            return {"rows": rows_of(path, fenced[1] if fenced else written)}
        except sqlite3.Error as error:
            return {"rows": None, "messages": [("user", f"The database says: {error}. Write the query again.")]}

    def next_node(state: Work) -> str:
        return "write_query" if state["rows"] is None and state["tries"] < MOST_QUERIES else END

    graph = StateGraph(Work).add_node(write_query).add_node(run_query)
    graph.add_edge(START, "write_query").add_edge("write_query", "run_query")
    return graph.add_conditional_edges("run_query", next_node, ["write_query", END]).compile()


def answer(agent: Any, prompt: str) -> Rows | None:
    """The rows that answer a prompt; None if no query could be run."""
    rows: Rows | None = agent.invoke({"messages": [("user", prompt)]})["rows"]
    return rows
