"""Constructors become command lines: how options are named, read, defaulted and refused, and what is built of them."""

# ruff: noqa: UP006, UP035, UP045 # users write types in every spelling, and all must work

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, List, Literal, Optional

import pytest

from agentlightning.config import lightning_cli
from agentlightning.errors import ConfigurationError


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Mode(str, Enum):
    FAST = "fast"
    SLOW = "slow"


class Recorder:
    """Keeps the arguments it was built with."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


class Model(Recorder):
    def __init__(self, name: str, learning_rate: float = 0.1, layers: int = 2, frozen: bool = False) -> None:
        super().__init__(name=name, learning_rate=learning_rate, layers=layers, frozen=frozen)


class Agent(Recorder):
    def __init__(self, tools: list[str], limit: int | None, *, seed: Optional[int] = 7) -> None:
        super().__init__(tools=tools, limit=limit, seed=seed)


@pytest.fixture(name="command_line")
def _command_line(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def typed(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])

    return typed


CommandLine = Callable[..., None]


def class_taking(annotation: Any, default: Any = inspect.Parameter.empty) -> type[Recorder]:
    """A class `Part` whose constructor has one parameter, `value`, of this type."""

    class Part(Recorder):
        def __init__(self, value: Any) -> None:
            super().__init__(value=value)

    class PartWithDefault(Recorder):
        def __init__(self, value: Any = default) -> None:
            super().__init__(value=value)

    part = Part if default is inspect.Parameter.empty else PartWithDefault
    part.__init__.__annotations__["value"] = annotation
    part.__name__ = "Part"
    return part


def build_from(command_line: CommandLine, annotation: Any, *words: str, **default: Any) -> object:
    command_line(*words)
    return lightning_cli(class_taking(annotation, **default)).arguments["value"]


def refusal(capsys: pytest.CaptureFixture[str], *classes: type[Any]) -> str:
    """What a command line that cannot be read is told."""
    with pytest.raises(SystemExit) as ended:
        lightning_cli(*classes)
    assert ended.value.code == 2
    return capsys.readouterr().err


def help_of(capsys: pytest.CaptureFixture[str], command_line: CommandLine, *classes: type[Any]) -> str:
    command_line("--help")
    with pytest.raises(SystemExit) as ended:
        lightning_cli(*classes)
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------------- what is built


def test_one_class_gives_its_instance(command_line: CommandLine) -> None:
    command_line("--model.name", "tiny", "--model.learning-rate", "0.5", "--model.layers=3", "--model.frozen", "yes")

    model = lightning_cli(Model)

    assert type(model) is Model
    assert model.arguments == {"name": "tiny", "learning_rate": 0.5, "layers": 3, "frozen": True}


def test_several_classes_give_a_tuple_in_their_order(command_line: CommandLine) -> None:
    command_line("--model.name", "tiny", "--agent.tools", "search", "shell", "--agent.seed", "none")

    agent, model = lightning_cli(Agent, Model)

    assert agent.arguments == {"tools": ["search", "shell"], "limit": None, "seed": None}
    assert model.arguments["name"] == "tiny"


def test_a_class_without_constructor_and_one_that_inherits_it(command_line: CommandLine) -> None:
    class Plain:
        pass

    class Deeper(Model):
        pass

    command_line("--deeper.name", "tiny")

    plain, deeper = lightning_cli(Plain, Deeper)

    assert isinstance(plain, Plain)
    assert deeper.arguments == {"name": "tiny", "learning_rate": 0.1, "layers": 2, "frozen": False}


def test_no_class_gives_nothing_and_reads_nothing(command_line: CommandLine) -> None:
    command_line("--unread")
    assert lightning_cli() == ()


def test_an_instance_is_no_class() -> None:
    with pytest.raises(ConfigurationError, match=r"lightning_cli takes classes; .* is an instance of Recorder\."):
        lightning_cli(Recorder())  # type: ignore[call-overload]


def test_unnamed_arguments_are_no_options(command_line: CommandLine) -> None:
    class Loose(Recorder):
        def __init__(self, first: int, *rest: int, last: int = 0, **more: int) -> None:
            super().__init__(first=first, rest=rest, last=last, more=more)

    command_line("--loose.first", "1", "--loose.last", "9")

    assert lightning_cli(Loose).arguments == {"first": 1, "rest": (), "last": 9, "more": {}}


def test_positional_only_parameters_are_options(command_line: CommandLine) -> None:
    class Old(Recorder):
        def __init__(self, size: int, unit: str | None = "none", /, *, colour: str = "red") -> None:
            super().__init__(size=size, unit=unit, colour=colour)

    command_line("--old.size", "4", "--old.colour", "blue")

    assert lightning_cli(Old).arguments == {"size": 4, "unit": "none", "colour": "blue"}


def test_a_dataclass_is_built_with_fresh_defaults(command_line: CommandLine) -> None:
    @dataclass
    class Plan:
        steps: int
        names: list[str] = field(default_factory=list)
        derived: int = field(default=0, init=False)

    command_line("--plan.steps", "3")

    first, second = lightning_cli(Plan), lightning_cli(Plan)

    assert (first.steps, first.names, first.derived) == (3, [], 0)
    assert first.names is not second.names


def test_classes_of_one_name_cannot_share_a_command_line(command_line: CommandLine) -> None:
    class MODEL:
        pass

    command_line()

    with pytest.raises(ConfigurationError, match=r"Both .*Model and .*MODEL would be set by '--model\.\*'"):
        lightning_cli(Model, MODEL)


def test_options_whose_destinations_would_coincide_stay_apart(command_line: CommandLine) -> None:
    class A(Recorder):
        def __init__(self, b_c: int) -> None:
            super().__init__(b_c=b_c)

    class A_B(Recorder):  # noqa: N801 # the underscore is the point
        def __init__(self, c: int) -> None:
            super().__init__(c=c)

    command_line("--a.b-c", "1", "--a_b.c", "2")

    first, second = lightning_cli(A, A_B)

    assert (first.arguments, second.arguments) == ({"b_c": 1}, {"c": 2})


def test_a_constructor_that_fails_is_logged_and_raised_on(
    command_line: CommandLine, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __init__(self, size: int = 3) -> None:
            raise LookupError(f"no room for {size}")

    command_line()

    with pytest.raises(LookupError, match="no room for 3"), caplog.at_level(logging.ERROR):
        lightning_cli(Broken)
    assert caplog.messages == [
        "Error instantiating Broken with arguments {'size': 3}. Error: no room for 3",
    ]


# ---------------------------------------------------------------------- how text is read


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (str, "none", "none"),
        (int, "-5", -5),
        (float, "1e-3", 0.001),
        (float, "3", 3.0),
        (bool, "TRUE", True),
        (bool, "n", False),
        (Optional[str], "Null", None),
        (Optional[str], "nobody", "nobody"),
        (str | None, "nil", None),
        (Optional[int], "~", None),
        (int | None, "5", 5),
        (None | int, "none", None),
        (Optional[float], "NONE", None),
        (float | None, "0.5", 0.5),
        (bool | None, "none", None),
        (Optional[bool], "no", False),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], "2", 2),
        (Optional[Literal["a"]], "none", None),
        (Colour, "r", Colour.RED),
        (Colour, "BLUE", Colour.BLUE),
        (Mode, "fast", Mode.FAST),
        (Colour | None, "nil", None),
        (Path, "a/b", "a/b"),
        (int | str, "5", "5"),
        (Optional[Path], "none", "none"),
        (inspect.Parameter.empty, "5", "5"),
        (Any, "5", "5"),
        (dict[str, int], "{}", "{}"),
    ],
    ids=str,
)
def test_the_type_decides_how_text_is_read(
    command_line: CommandLine, annotation: Any, text: str, value: object
) -> None:
    built = build_from(command_line, annotation, "--part.value", text)

    assert built == value
    assert type(built) is type(value)


@pytest.mark.parametrize(
    ("annotation", "words", "value"),
    [
        (list[int], ["1", "2"], [1, 2]),
        (List[int], ["1"], [1]),
        (list[str], [], []),
        (list, ["1"], ["1"]),
        (List, ["1"], ["1"]),
        (list[bool], ["yes", "no"], [True, False]),
        (list[int | None], ["1", "none"], [1, None]),
        (list[Mode], ["fast", "slow"], [Mode.FAST, Mode.SLOW]),
        (Optional[List[float]], ["1", "2.5"], [1.0, 2.5]),
        (list[int] | None, ["3"], [3]),
    ],
    ids=str,
)
def test_a_list_takes_any_number_of_values(
    command_line: CommandLine, annotation: Any, words: list[str], value: list[object]
) -> None:
    assert build_from(command_line, annotation, "--part.value", *words) == value


@pytest.mark.parametrize("annotation", [Optional[int], int | None, Optional[list[int]], Mode | None], ids=str)
def test_what_may_be_none_is_none_if_it_is_not_given(command_line: CommandLine, annotation: Any) -> None:
    assert build_from(command_line, annotation) is None


@pytest.mark.parametrize(
    ("annotation", "default"),
    [
        (str, "none"),
        (Optional[str], "none"),
        (Optional[str], "gpt"),
        (bool, "auto"),
        (int, "12"),
        (int, None),
        (Mode, Mode.SLOW),
        (Mode | None, "unknown"),
        (Literal["a", "b"], "c"),
        (list[int], "all"),
        (list[int], (1, 2)),
        (str, "100 %s"),
    ],
    ids=str,
)
def test_a_default_reaches_the_constructor_as_it_is(
    command_line: CommandLine, annotation: Any, default: object
) -> None:
    assert build_from(command_line, annotation, default=default) is default


# ---------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    ("annotation", "text", "told"),
    [
        (int, "many", "invalid int value: 'many'"),
        (float, "much", "invalid float value: 'much'"),
        (bool, "maybe", "'maybe' is no boolean; use one of yes, true, t, y, 1 or no, false, f, n, 0"),
        (Optional[int], "1.5", "'1.5' is neither a whole number nor 'none'"),
        (Optional[float], "much", "'much' is neither a number nor 'none'"),
        (Optional[bool], "maybe", "'maybe' is no boolean"),
        (Literal["a", "b"], "c", "'c' is none of a, b"),
        (Colour, "GREEN", "'GREEN' is none of r, b"),
        (Colour | None, "g", "'g' is none of r, b, none"),
        (list[int], "x", "invalid int value: 'x'"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_read_is_named_with_its_option(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], annotation: Any, text: str, told: str
) -> None:
    command_line("--part.value", text)
    assert f"error: argument --part.value: {told}" in refusal(capsys, class_taking(annotation))


@pytest.mark.parametrize("annotation", [str, int, bool, list[int], Literal["a"], inspect.Parameter.empty], ids=str)
def test_a_parameter_without_default_is_required(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], annotation: Any
) -> None:
    command_line()
    assert "the following arguments are required: --part.value" in refusal(capsys, class_taking(annotation))


def test_an_unknown_option_is_named(command_line: CommandLine, capsys: pytest.CaptureFixture[str]) -> None:
    command_line("--model.name", "tiny", "--model.lr", "1")
    assert "unrecognized arguments: --model.lr 1" in refusal(capsys, Model)


# ---------------------------------------------------------------------- help


def test_help_lists_every_option_with_type_and_default(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    told = help_of(capsys, command_line, Model, Agent)

    assert "CLI configurator for application components." in told
    for sentence in [
        "--model.name MODEL_NAME For Model: 'name'. Inferred type: str. Required.",
        "For Model: 'learning_rate'. Inferred type: float. Default: 0.1.",
        "For Model: 'frozen'. Inferred type: bool. Default: False.",
        "For Agent: 'tools'. Inferred type: list[str]. Takes any number of values. Required.",
        "For Agent: 'limit'. Inferred type: int. May be none. Default: None.",
        "For Agent: 'seed'. Inferred type: int. May be none. Default: 7.",
    ]:
        assert sentence in told


@pytest.mark.parametrize(
    ("annotation", "default", "sentence"),
    [
        (Literal["a", "b"], "a", "One of: a, b. Default: 'a'."),
        (Mode, Mode.FAST, "Inferred type: Mode. One of: fast, slow. Default: 'fast'."),
        (list[Mode], (), "One of: fast, slow. Default: ()."),
        (str, "100 %s %(prog)s", "Default: '100 %s %(prog)s'."),
        (inspect.Parameter.empty, 3, "Inferred type: str. Default: 3."),
        (Optional[str], "none", "May be none. Default: 'none'."),
    ],
    ids=["literal", "enum", "enums", "percent", "untyped", "text"],
)
def test_help_tells_what_may_be_given(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], annotation: Any, default: Any, sentence: str
) -> None:
    assert sentence in help_of(capsys, command_line, class_taking(annotation, default))


# ---------------------------------------------------------------------- annotations that are text

SOURCE = """
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional

if TYPE_CHECKING:
    from somewhere import Unknown

class Plain:
    def __init__(self, steps: int, rate: Optional[float] = None, names: List[str] = (), limit: int | None = 5):
        self.given = (steps, rate, names, limit)

class Guarded:
    def __init__(self, steps: int, thing: Unknown = "x", flag: bool = False):
        self.given = (steps, thing, flag)

@dataclass
class Data:
    steps: int
    flags: List[bool]
    name: str | None = None
"""


@pytest.fixture(name="written")
def _written(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's module that postpones its annotations."""
    module = ModuleType("postponed_annotations")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(SOURCE, "postponed_annotations.py", "exec", dont_inherit=True), vars(module))
    return module


def test_postponed_annotations_are_resolved(command_line: CommandLine, written: Any) -> None:
    command_line("--plain.steps", "3", "--plain.rate", "0.5", "--plain.names", "a", "--plain.limit", "null")
    assert lightning_cli(written.Plain).given == (3, 0.5, ["a"], None)


def test_postponed_annotations_of_a_dataclass_are_resolved(command_line: CommandLine, written: Any) -> None:
    command_line("--data.steps", "3", "--data.flags", "y", "n", "--data.name", "none")
    assert lightning_cli(written.Data) == written.Data(3, [True, False], None)


def test_one_annotation_that_cannot_be_resolved_does_not_spoil_the_others(
    command_line: CommandLine, written: Any, caplog: pytest.LogCaptureFixture
) -> None:
    command_line("--guarded.steps", "3", "--guarded.thing", "5", "--guarded.flag", "y")

    built = lightning_cli(written.Guarded)

    assert built.given == (3, "5", True)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the types of thing of Guarded cannot be resolved (name 'Unknown' is not defined)" in record.message
