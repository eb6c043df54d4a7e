"""The reward of a program: what it wrote into its reward file, said last, or meant by its exit code."""

import json
import math
import re
from dataclasses import dataclass
from typing import Final, Literal

from typing_extensions import assert_never

from agentlightning.errors import RolloutFailed

__all__ = ["ProgramResult", "RewardSource", "read_reward"]

RewardSource = Literal["auto", "stdout", "file", "exit_code", "none"]
"""`auto` reads the file if it was written, else the last line, if that is a reward, else gives none."""

_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE: Final = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_LONGEST_QUOTE: Final = 200


@dataclass(frozen=True)
class ProgramResult:
    """What a program left behind."""

    file: str
    """Content of its reward file; empty if it did not write it."""
    last_line: str
    """Of its standard output, without white space around it."""
    exit_code: int


def read_reward(source: RewardSource, result: ProgramResult) -> float | None:
    """The reward from where it is expected; RuntimeError if it is not there."""
    if source == "none":
        return None
    if source == "exit_code":
        return 1.0 if result.exit_code == 0 else 0.0
    if source == "file":
        return _expected(_in_file(result.file), "The reward file", result.file)
    if source == "stdout":
        return _expected(
            _parsed(result.last_line, "The last line of stdout"), "The last line of stdout", result.last_line
        )
    if source == "auto":
        if result.file.strip():
            return _expected(_in_file(result.file), "The reward file", result.file)
        return _parsed(result.last_line, "The last line of stdout")
    assert_never(source)


def _in_file(text: str) -> float | None:
    """All of the file, or its last line."""
    whole = _parsed(text.strip(), "The reward file")
    if whole is not None or not text.strip():
        return whole
    return _parsed(text.strip().splitlines()[-1].strip(), "The reward file")


def _expected(reward: float | None, place: str, text: str) -> float:
    if reward is None:
        found = f"it is {text.strip()[:_LONGEST_QUOTE]!r}" if text.strip() else "it is empty"
        raise RolloutFailed(f'{place} must be a number or a JSON object such as {{"reward": 0.5}}; {found}.')
    return reward


def _parsed(text: str, place: str) -> float | None:
    """A number, or the `reward` of a JSON object; None for anything else."""
    if _NOT_FINITE.fullmatch(text):
        raise RolloutFailed(f"{place} gives the reward {text}; a reward must be finite.")
    if _NUMBER.fullmatch(text):
        return _finite(float(text), place)
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or "reward" not in value:
        return None
    reward = value["reward"]
    if not isinstance(reward, (int, float)):
        raise RolloutFailed(f"{place} gives the reward {str(reward)[:_LONGEST_QUOTE]!r}, which is not a number.")
    return _finite(reward, place)


def _finite(reward: float, place: str) -> float:
    try:
        value = float(reward)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise RolloutFailed(f"{place} gives the reward {value}; a reward must be finite.")
    return value
