"""Resources: models behind endpoints, prompts with placeholders, and how they are published."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from agentlightning.types import (
    LLM,
    PromptTemplate,
    ProxyLLM,
)

DISCOURAGED = "Accessing 'endpoint' directly on ProxyLLM is discouraged"

Fields = dict[str, Any]


def proxy(endpoint: str = "http://h:1", **fields: Any) -> ProxyLLM:
    return ProxyLLM(endpoint=endpoint, model="m", **fields)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    return [(record.name, record.levelno) for record in caplog.records if DISCOURAGED in record.getMessage()]


# ---------------------------------------------------------------------- models behind endpoints


@pytest.mark.parametrize(("model", "tag"), [(LLM, "llm"), (ProxyLLM, "proxy_llm")], ids=["LLM", "ProxyLLM"])
def test_llm_has_no_key_and_no_parameters_by_default(model: type[LLM], tag: str) -> None:
    assert model(endpoint="http://h:1", model="m").model_dump() == {
        "resource_type": tag,
        "endpoint": "http://h:1",
        "model": "m",
        "api_key": None,
        "sampling_parameters": {},
    }


@pytest.mark.parametrize(
    ("endpoint", "routed"),
    [
        ("http://h:1", "http://h:1/rollout/R/attempt/A"),
        ("http://h:1/", "http://h:1/rollout/R/attempt/A"),
        ("http://h:1/v1", "http://h:1/rollout/R/attempt/A/v1"),
        ("http://h:1/v1/", "http://h:1/rollout/R/attempt/A/v1"),
        ("http://h:1/v1/models", "http://h:1/v1/models/rollout/R/attempt/A"),
        ("http://h:1/v10", "http://h:1/v10/rollout/R/attempt/A"),
    ],
)
def test_proxy_routes_a_call_through_the_path(endpoint: str, routed: str) -> None:
    assert proxy(endpoint).get_base_url("R", "A") == routed


@pytest.mark.parametrize("endpoint", ["http://h:1", "http://h:1/v1/"])
def test_proxy_without_ids_answers_the_raw_endpoint(endpoint: str) -> None:
    assert proxy(endpoint).get_base_url(None, None) == endpoint


def test_ids_are_quoted_in_the_path() -> None:
    routed = proxy("http://h/v1").get_base_url("a/b?c", "#1 %")

    assert routed == "http://h/rollout/a%2Fb%3Fc/attempt/%231%20%25/v1"


@pytest.mark.parametrize(("rollout_id", "attempt_id"), [(None, "A"), ("R", None), (1, 2), ("R", 2)], ids=str)
def test_proxy_refuses_half_an_address(rollout_id: Any, attempt_id: Any) -> None:
    with pytest.raises(ValueError, match="must be strings or all be empty"):
        proxy().get_base_url(rollout_id, attempt_id)


def test_reading_the_endpoint_of_a_proxy_warns_each_time(caplog: pytest.LogCaptureFixture) -> None:
    llm = proxy()

    values = [llm.endpoint, llm.endpoint]

    assert values == ["http://h:1", "http://h:1"]
    assert warnings_in(caplog) == [("agentlightning.types.resources", logging.WARNING)] * 2


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda llm: llm.model_dump(), id="model_dump"),
        pytest.param(lambda llm: llm.model_dump_json(), id="model_dump_json"),
        pytest.param(repr, id="repr"),
        pytest.param(lambda llm: llm.model_copy(), id="model_copy"),
        pytest.param(lambda llm: llm.model_copy(deep=True), id="deep-copy"),
        pytest.param(lambda llm: llm.get_base_url("R", "A"), id="get_base_url"),
        pytest.param(lambda llm: llm.get_base_url(None, None), id="raw-base-url"),
        pytest.param(lambda llm: llm == proxy(), id="equality"),
        pytest.param(lambda llm: ProxyLLM.model_validate(llm.model_dump()), id="model_validate"),
    ],
)
def test_proxy_is_handled_without_a_warning(
    caplog: pytest.LogCaptureFixture, use: Callable[[ProxyLLM], object]
) -> None:
    use(proxy())
    assert warnings_in(caplog) == []


def test_endpoint_of_a_proxy_can_be_changed() -> None:
    llm = proxy()

    llm.endpoint = "http://h:2/v1"

    assert llm.get_base_url("R", "A") == "http://h:2/rollout/R/attempt/A/v1"
    assert llm.model_dump()["endpoint"] == "http://h:2/v1"


# ---------------------------------------------------------------------- prompts


def test_f_string_template_is_filled() -> None:
    template = PromptTemplate(template="{{x}} {a.real} {b[0]} {c[key]!r:>5} {d:{width}.1f}", engine="f-string")
    assert template.format(a=1, b=[2], c={"key": "x"}, d=0.25, width=6) == "{x} 1 2   'x'    0.2"


class Task:
    """Has the globals of this module behind it."""

    def __init__(self) -> None:
        self.parts = {"_id": 1}


@pytest.mark.parametrize(
    "template",
    [
        "{task.__init__.__globals__[DISCOURAGED]}",
        "{task.__class__}",
        "{task.parts[_id]}",
        "{task:{task.__class__}}",
        "{frames.gi_frame.f_globals[DISCOURAGED]}",
    ],
)
def test_f_string_template_reaches_no_further_than_its_values(template: str) -> None:
    with pytest.raises(PermissionError, match="not for templates"):
        PromptTemplate(template=template, engine="f-string").format(task=Task(), frames=(x for x in ()))


@pytest.mark.parametrize("template", ["{x:>1500000000}", "{x:.10001f}", "{x:{width}}", "{x:>" + "9" * 5000 + "}"])
def test_f_string_template_fills_no_absurd_width(template: str) -> None:
    with pytest.raises(PermissionError, match="largest width"):
        PromptTemplate(template=template, engine="f-string").format(x=1.0, width=10_001)


@pytest.mark.parametrize(("template", "error"), [("{}", IndexError), ("{", ValueError), ("{x.y}", AttributeError)])
def test_f_string_template_fails_as_str_format_does(template: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        template.format(x=1)
    with pytest.raises(error):
        PromptTemplate(template=template, engine="f-string").format(x=1)


def test_jinja_template_is_filled() -> None:
    text = "{% for n in names %}{{ loop.index }} {{ n | upper }}\n{% endfor %}"
    filled = PromptTemplate(template=text, engine="jinja").format(names=(name for name in ("ada", "bob")))
    assert filled == "1 ADA\n2 BOB\n"


@pytest.mark.parametrize(
    ("engine", "template", "error", "words"),
    [
        ("f-string", "Hello {name}", KeyError, "no value for '{name}'; format got other"),
        ("jinja", "Hello {{ name }}", UndefinedError, "'name' is undefined"),
    ],
)
def test_template_demands_every_value(engine: Any, template: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PromptTemplate(template=template, engine=engine).format(other=1)


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{{ items.append(1) }}", "{{ items.__init__.__globals__ }}"],
    ids=["classes", "changing-a-value", "globals"],
)
def test_jinja_template_cannot_leave_its_sandbox(template: str) -> None:
    with pytest.raises(SecurityError, match="unsafe"):
        PromptTemplate(template=template, engine="jinja").format(items=[])


NESTED = "{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}"
RECURSIVE = (
    "{% for a in [1] recursive %}{% if loop.depth < 4 %}{{ loop(many) }}{% endif %}{% endfor %}"
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}"
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "template",
    [NESTED, "{{ range(10 ** 12) | list | length }}", RECURSIVE, RECURSIVE.partition("{% macro")[0]],
    ids=["nested", "range", "macro", "recursive"],
)
def test_jinja_template_takes_no_more_steps_than_it_may(template: str) -> None:
    with pytest.raises(RuntimeError, match="more than 100000 steps"):
        PromptTemplate(template=template, engine="jinja").format(many=list(range(1000)))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ 10 ** 1000000000 }}",
        "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
    ],
)
def test_jinja_template_makes_no_huge_value(template: str) -> None:
    with pytest.raises(RuntimeError, match="too large a value"):
        PromptTemplate(template=template, engine="jinja").format()


def test_jinja_template_renders_no_huge_text() -> None:
    template = PromptTemplate(template="{% for i in range(20) %}{{ x }}{% endfor %}", engine="jinja")
    with pytest.raises(RuntimeError, match="more than 10000000 characters"):
        template.format(x="x" * 1_000_000)


@pytest.mark.slow
def test_poml_template_demands_every_value() -> None:
    template = PromptTemplate(template="<poml><p>Hello {{ name }}!</p></poml>", engine="poml")
    with pytest.raises(RuntimeError, match="cannot be rendered"):
        template.format(other=1)


@pytest.mark.parametrize(("engine", "package"), [("jinja", "jinja2"), ("poml", "poml")])
def test_missing_engine_is_an_import_error_that_names_the_package(
    monkeypatch: pytest.MonkeyPatch, engine: Any, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "agentlightning.types.jinja_sandbox", raising=False)

    with pytest.raises(ImportError, match=rf"need {package}: .*pip install"):
        PromptTemplate(template="t", engine=engine).format()


# ---------------------------------------------------------------------- publication
