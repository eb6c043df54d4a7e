"""What was recorded of a program's run: a few figures when it has ended, and the whole trace on demand."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentlightning.cli.command import print_json
from agentlightning.emitter import find_final_reward
from agentlightning.emitter.reward import get_reward_value
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.call_record import CALL_SPAN, RAW_SPAN
from agentlightning.llm_proxy.flush import FlushedCalls
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, Span

__all__ = ["Report", "print_trace"]

_READ, _WRITTEN = "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"
_LONGEST_TEXT: Final = 60
_WIDE: Final = 400
"""Columns, more than any table here has."""


@dataclass(frozen=True)
class Report:
    """The figures of one attempt."""

    rollout_id: str
    status: str
    calls: int
    failed_calls: int
    read_tokens: int
    written_tokens: int
    reward: float | None
    missing: tuple[str, ...]
    """What is known to be missing, in words."""

    @classmethod
    async def of(cls, store: LightningStore, rollout: AttemptedRollout, flushed: FlushedCalls) -> "Report":
        """The figures of an attempt that is over, and of whose calls the proxy has told."""
        spans = await store.query_spans(rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)
        known = await store.get_rollout_by_id(rollout.rollout_id)
        calls = [span for span in spans if span.name == CALL_SPAN]
        return cls(
            rollout_id=rollout.rollout_id,
            status="unknown" if known is None else known.status,
            calls=len(calls),
            failed_calls=sum(span.status.status_code == "ERROR" for span in calls),
            read_tokens=_sum(calls, _READ),
            written_tokens=_sum(calls, _WRITTEN),
            reward=find_final_reward(spans),
            missing=tuple(_missing(flushed)),
        )

    def show(self, address: str) -> None:
        """Print to standard error, which is not the program's result."""
        table = Table(show_header=False)
        table.add_row("rollout", f"{self.rollout_id} ({self.status})")
        failed = f" ({self.failed_calls} failed)" if self.failed_calls else ""
        table.add_row("model calls", f"{self.calls}{failed}")
        for words in self.missing:
            table.add_row("not recorded", escape(words))
        table.add_row("tokens", f"{self.read_tokens} read, {self.written_tokens} written")
        table.add_row("reward", "none" if self.reward is None else f"{self.reward:g}")
        table.add_row("recorded in", escape(address))
        table.add_row("trace", f"agl run --show {self.rollout_id} --store {escape(shlex.quote(address))}")
        _print(table, is_error=True)


def _sum(calls: Sequence[Span], name: str) -> int:
    return sum(value for call in calls if isinstance(value := call.attributes.get(name), int))


def _missing(flushed: FlushedCalls) -> list[str]:
    words = [f"{number} calls: {reason}" if number else reason for reason, number in flushed.lost.items()]
    if flushed.unanswered:
        words.append(f"{flushed.unanswered} calls: not answered when the program ended")
    if flushed.unknown_proxies:
        words.append("what calls there were: the address of the proxy is not that of an `agl proxy`")
    return words


def _print(table: Table, *, is_error: bool = False) -> None:
    """Whole, also where there is no terminal whose width is known."""
    console = Console(stderr=is_error)
    if not console.is_terminal:
        console.width = _WIDE
    console.print(table)


# ---------------------------------------------------------------------- the trace


async def print_trace(store: LightningStore, rollout_id: str, *, as_json: bool) -> None:
    """Print the spans of a rollout's last attempt, in their order."""
    if await store.get_rollout_by_id(rollout_id) is None:
        raise ConfigurationError(f"There is no rollout '{rollout_id}' in this store.")
    spans = await store.query_spans(rollout_id, attempt_id="latest", sort_by="sequence_id")
    table = Table(title=f"trace of {escape(rollout_id)}")
    for column in ("#", "span", "model", "tokens", "seconds", "what"):
        table.add_column(column)
    for span in spans:
        if as_json:
            print_json(span.model_dump(mode="json"))
        elif span.name != RAW_SPAN:
            table.add_row(*map(escape, _row(span)))
    if not as_json:
        _print(table)


def _row(span: Span) -> tuple[str, ...]:
    attributes = span.attributes
    tokens = f"{attributes[_READ]}+{attributes.get(_WRITTEN, 0)}" if _READ in attributes else ""
    model = str(attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model") or "")
    seconds = "" if span.start_time is None or span.end_time is None else f"{span.end_time - span.start_time:.3f}"
    name = "model call" if span.name == CALL_SPAN else span.name
    reward = get_reward_value(span)
    details = (
        span.status.description if span.status.status_code == "ERROR" else None,
        None if reward is None else f"reward {reward:g}",
        attributes.get("gen_ai.completion.0.content"),
        attributes.get("agentlightning.command.text"),
    )
    text = " ".join(str(next((detail for detail in details if detail), "")).split())
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
    return str(span.sequence_id), name, model, tokens, seconds, text
