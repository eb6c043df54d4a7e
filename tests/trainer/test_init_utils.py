"""A part is built from every form in which it may be given, and wrong forms are answered in words."""

import sys
from types import ModuleType
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.trainer.init_utils import build_component, instantiate_component, instantiate_from_spec, load_class

HERE = "parts_of_a_test"


class Engine:
    """What the tests build."""

    def __init__(self, fuel: str = "petrol", *, cylinders: int = 4) -> None:
        self.fuel = fuel
        self.cylinders = cylinders


class Diesel(Engine):
    pass


class Swallowing(Engine):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.swallowed = kwargs


class Needy(Engine):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key


class Wheel:
    pass


class CallableEngine(Engine):
    def __call__(self, road: str) -> str:
        return road


def made_by_path(fuel: str = "wood") -> Engine:
    return Engine(fuel)


REGISTRY = {"std": f"{HERE}.Engine", "oil": f"{HERE}.Diesel"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above as a module that can be imported by name, whatever name pytest gives this one."""
    module = ModuleType(HERE)
    vars(module).update({name: value for name, value in globals().items() if not name.startswith("_")})
    monkeypatch.setitem(sys.modules, HERE, module)


def build(spec: Any, **options: Any) -> Any:
    return build_component(spec, **{"expected_type": Engine, "spec_name": "engine", **options})


# ---------------------------------------------------------------------- import paths


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_package.module.Thing", "No module named 'no_such_package'"),
        ("agentlightning.trainer.no_such.Thing", "No module named 'agentlightning.trainer.no_such'"),
        (f"{HERE}.Missing", "has no attribute 'Missing'"),
        ("agentlightning.tracer.weave.WeaveTracer", "WeaveTracer is gone; use OtelTracer"),
        ("agentlightning.tracer.HttpTracer", "HttpTracer is gone; use OtelTracer, or the LLM proxy"),
        ("no_such_package.HttpTracer", "No module named 'no_such_package'"),
    ],
    ids=["package", "module", "class", "removed module", "removed name", "same name elsewhere"],
)
def test_a_path_that_leads_nowhere_is_named_with_its_cause(path: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{path}' cannot be imported: .*{reason}") as caught:
        load_class(path)

    assert isinstance(caught.value.__cause__, (ImportError, AttributeError))


@pytest.mark.parametrize("path", ["Engine", "", ".Engine", "a..B", "a.b.", "a b.C", "a.b:C", "../engine.py"])
def test_text_that_is_no_path_is_told_how_a_path_looks(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is no import path; write 'package.module.Class'"):
        load_class(path)


# ---------------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("cls", "given", "defaults", "built"),
    [
        (Engine, {"fuel": "gas", "cylinders": 2}, None, {"fuel": "gas", "cylinders": 2}),
        (Engine, {"fuel": "gas"}, {"fuel": "coal", "cylinders": 8, "wheels": 4}, {"fuel": "gas", "cylinders": 8}),
        (Swallowing, {"a": 1}, {"fuel": "coal"}, {"fuel": "petrol", "cylinders": 4, "swallowed": {"a": 1}}),
        (Diesel, None, {"cylinders": 6}, {"fuel": "petrol", "cylinders": 6}),
        (made_by_path, None, {"fuel": "coal", "cylinders": 6}, {"fuel": "coal", "cylinders": 4}),
    ],
    ids=["by-name", "defaults", "any-name", "inherited", "function"],
)
def test_arguments_come_first_and_defaults_fill_other_parameters(
    cls: Any, given: Any, defaults: Any, built: dict[str, Any]
) -> None:
    before = dict(given or {})

    assert vars(instantiate_component(cls, given, defaults)) == built
    assert dict(given or {}) == before


def test_a_default_that_is_a_function_is_called_and_only_if_it_is_used() -> None:
    def never() -> str:
        raise AssertionError("called although not needed")

    engine = instantiate_component(Engine, {"fuel": "gas"}, {"cylinders": lambda: 12, "fuel": never, "wheels": never})

    assert engine.cylinders == 12


def test_an_unknown_argument_is_answered_with_the_parameters() -> None:
    with pytest.raises(TypeError, match=r"'feul'.* takes 'fuel', 'cylinders' and was given 'feul'\.$"):
        instantiate_component(Engine, {"feul": "gas"})


# ---------------------------------------------------------------------- names and dictionaries


@pytest.mark.parametrize(
    ("spec", "cls"),
    [
        (f"{HERE}.Diesel", Diesel),
        ("oil", Diesel),
        ({"type": f"{HERE}.Diesel"}, Diesel),
        ({"type": "oil"}, Diesel),
        ({"name": "oil"}, Diesel),
        ({"name": f"{HERE}.Diesel"}, Diesel),
        ({"type": "std", "cylinders": 4}, Engine),
        (f"{HERE}.made_by_path", Engine),
    ],
    ids=["path", "registered", "type-path", "type-registered", "name", "name-path", "arguments", "function"],
)
def test_a_name_or_a_dictionary_builds_what_it_names(spec: Any, cls: type[Engine]) -> None:
    built = instantiate_from_spec(spec, spec_name="engine", registry=REGISTRY)

    assert type(built) is cls


LACKS = "engine dict must have a 'type' key with an import path; it has 'fuel'"
KNOWN = r"engine cannot be 'oill' .*; name one of 'std', 'oil' or an import path"
FROM_REGISTRY: Any = {"registry": REGISTRY}
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no type": ({"fuel": "gas"}, {}, ValueError, LACKS),
    "no type, no default": ({"fuel": "gas"}, {"dict_requires_type": False}, ValueError, LACKS),
    "no name": ({}, FROM_REGISTRY, ConfigurationError, r"or a 'name' key with one of 'std', 'oil'; it has nothing\.$"),
    **{
        f"a {type(spec).__name__}": (spec, {}, TypeError, "engine spec must be a string or dict")
        for spec in (None, Engine)
    },
    "misspelt type": ({"type": "oill"}, FROM_REGISTRY, ConfigurationError, KNOWN),
    "misspelt name": ({"name": "oill"}, FROM_REGISTRY, ConfigurationError, KNOWN),
    "no registry": (
        "oil",
        {},
        ConfigurationError,
        r"engine cannot be 'oil' .*; name an import path such as 'package\.",
    ),
    **{
        f"type {wrong}": ({"type": wrong}, {}, ConfigurationError, r"engine cannot be .*; name an import path")
        for wrong in (None, Diesel)
    },
    "nowhere": (f"{HERE}.Missing", {}, ConfigurationError, f"^engine '{HERE}.Missing' cannot be imported"),
    "a value": (f"{HERE}.REGISTRY", {}, ConfigurationError, r"engine '.*REGISTRY' is .* \(dict\), which is no class"),
    "unknown argument": (
        {"type": f"{HERE}.Engine", "feul": "gas"},
        {},
        TypeError,
        "^engine cannot be built: .*takes 'fuel', 'cylinders' and was given 'feul'",
    ),
    "missing argument": (
        f"{HERE}.Needy",
        {},
        TypeError,
        "^engine cannot be built: .*takes 'key' and was given nothing",
    ),
}


@pytest.mark.parametrize(("spec", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_builds_nothing_is_refused_with_the_way_out(
    spec: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        instantiate_from_spec(spec, spec_name="engine", **options)


# ---------------------------------------------------------------------- the whole way


def test_an_instance_is_taken_as_it_is_even_if_it_can_be_called() -> None:
    engine = CallableEngine()

    assert build(engine, optional_defaults={"fuel": "coal"}) is engine
    assert engine.fuel == "petrol"


def test_none_without_default_is_refused_with_the_accepted_forms() -> None:
    with pytest.raises(ValueError, match=r"^engine cannot be None\. It may be an instance or a subclass of Engine"):
        build(None)


@pytest.mark.parametrize(
    ("spec", "described"),
    [
        (5, r"5 \(int\)"),
        (["oil"], r"\['oil'\] \(list\)"),
        (Wheel(), r"<.*Wheel object.*> \(Wheel\)"),
        (Wheel, r"the class .*\.Wheel"),
    ],
    ids=["number", "list", "other-instance", "other-class"],
)
def test_any_other_form_is_refused_with_the_accepted_ones(spec: Any, described: str) -> None:
    accepted = r"It may be .* Engine, a function that makes one, a name \('std', 'oil'\), an import path"
    with pytest.raises(ConfigurationError, match=rf"^engine cannot be {described}\. {accepted}"):
        build(spec, registry=REGISTRY)


WRONG_BUILDERS: list[tuple[Any, dict[str, Any]]] = [
    (lambda: Wheel(), {}),
    (f"{HERE}.Wheel", {}),
    ({"type": f"{HERE}.Wheel"}, {}),
    ({}, {"dict_requires_type": False, "dict_default_cls": Wheel}),
    (None, {"default_factory": Wheel}),
]


@pytest.mark.parametrize(("spec", "options"), WRONG_BUILDERS, ids=["factory", "path", "dict", "dict-default", "none"])
def test_a_part_of_the_wrong_type_is_a_type_error(spec: Any, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"^engine factory returned Wheel, which is not a Engine subclass\.$"):
        build(spec, **options)
