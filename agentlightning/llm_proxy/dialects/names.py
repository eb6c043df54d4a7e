"""The names of the dialects that agents and backends speak."""

from typing import Literal

__all__ = ["DialectName"]

DialectName = Literal["chat", "completions", "responses", "embeddings", "messages"]
