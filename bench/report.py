"""Figures and their targets, as tables for people and as JSON for machines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from typing_extensions import assert_never

Verdict = Literal["pass", "FAIL", "not measured", ""]
STYLES: dict[Verdict, str] = {"pass": "green", "FAIL": "bold red", "not measured": "yellow", "": ""}


@dataclass(frozen=True)
class Target:
    """What a figure must keep to."""

    kind: Literal["at least", "below", "within"]
    limit: float
    """For "within", the share by which a ratio may differ from one."""

    def is_met_by(self, value: float) -> bool:
        if self.kind == "at least":
            return value >= self.limit
        if self.kind == "below":
            return value < self.limit
        if self.kind == "within":
            return abs(value - 1.0) <= self.limit
        assert_never(self.kind)

    def text(self, unit: str) -> str:
        if self.kind == "within":
            return f"1 ± {self.limit:g}"
        return f"{'>=' if self.kind == 'at least' else '<'} {self.limit:g}{unit_text(unit)}"


@dataclass(frozen=True)
class Figure:
    """One measured value; without a target it is there to be known, not to be judged."""

    name: str
    value: float | str | None
    """None if it could not be measured."""
    unit: str = ""
    target: Target | None = None
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.target is None:
            return ""
        if not isinstance(self.value, (int, float)):
            return "not measured"
        return "pass" if self.target.is_met_by(self.value) else "FAIL"

    def as_json(self) -> dict[str, Any]:
        target = None if self.target is None else self.target.text(self.unit)
        described = {"name": self.name, "value": self.value, "unit": self.unit, "target": target}
        return {**described, "verdict": self.verdict or None, "note": self.note}


@dataclass(frozen=True)
class Outcome:
    """What a section found, or why it found nothing."""

    figures: Sequence[Figure] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    """Every run as its child process told it."""
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"figures": [figure.as_json() for figure in self.figures], "raw": self.raw, "error": self.error}


def unit_text(unit: str) -> str:
    return unit if unit in ("", "x") else f" {unit}"


def number_text(value: float | str | None, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    digits = 0 if isinstance(value, int) or abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f}{unit_text(unit)}"


def show(console: Console, title: str, outcome: Outcome) -> None:
    """Print a section as a table."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("figure")
    table.add_column("target", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("")
    table.add_column("note", style="dim")
    for figure in outcome.figures:
        target = "" if figure.target is None else figure.target.text(figure.unit)
        verdict = figure.verdict
        measured = number_text(figure.value, figure.unit)
        table.add_row(figure.name, target, measured, f"[{STYLES[verdict]}]{verdict}[/]" if verdict else "", figure.note)
    if outcome.figures:
        console.print(table)
    if outcome.error is not None:
        console.print(f"{title}: {outcome.error}", style="bold red", markup=False)
    console.print()
