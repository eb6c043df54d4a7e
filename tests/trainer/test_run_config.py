"""The configuration of a run: which arguments of the parts it keeps, and what becomes of values that are not plain."""

import enum
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm import Baseline, algo
from agentlightning.algorithm.apo import APO
from agentlightning.algorithm.verl import VERL
from agentlightning.execution import ClientServerExecutionStrategy, SharedMemoryExecutionStrategy
from agentlightning.tracer import OtelTracer
from agentlightning.trainer.run_config import settings_of

pytest.importorskip("torch", reason="settings of algorithms that train models are among them")

from agentlightning.algorithm.grpo import GRPO  # they load torch
from agentlightning.algorithm.sft import SFT

STRATEGIES = (ClientServerExecutionStrategy, SharedMemoryExecutionStrategy)


@pytest.mark.parametrize(
    "make",
    [GRPO, SFT, APO, VERL, Baseline, OtelTracer, TracerTraceToTriplet, *STRATEGIES],
    ids=lambda kind: kind.__name__,
)
def test_every_argument_of_a_part_is_kept(make: Callable[[], Any]) -> None:
    part = make()

    names = set(inspect.signature(type(part).__init__).parameters) - {"self", "async_openai_client"}

    assert set(settings_of(part)) == names


def test_a_function_is_kept_by_its_path() -> None:
    @algo
    async def search() -> None: ...

    assert settings_of(search)["algorithm_func"].endswith("search")


class Colour(enum.Enum):
    RED = "red"


class Account(BaseModel):
    name: str = "me"
    password: SecretStr = SecretStr("hunter2")


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (float("inf"), "inf"),
        (Path("a/b"), "a/b"),
        (Colour.RED, "red"),
        (Account(), {"name": "me", "password": "pydantic.types.SecretStr"}),
        ((1, {"two": [3]}), [1, {"two": [3]}]),
        (b"bytes", "builtins.bytes"),
        (Path, "pathlib.Path"),
        ("postgresql://me:p@ss@host/runs", "postgresql://***@host/runs"),
    ],
    ids=["infinite", "path", "enum", "model", "nested", "bytes", "class", "password with an at sign"],
)
def test_a_value_becomes_plain(value: Any, kept: Any) -> None:
    assert settings_of(Holder(value)) == {"value": kept}
