"""POML templates, rendered by the real package."""

import os
from pathlib import Path

import pytest

from agentlightning.types import PromptTemplate

pytestmark = pytest.mark.slow


def poml(template: str) -> PromptTemplate:
    return PromptTemplate(template=template, engine="poml")


@pytest.mark.parametrize(
    "template",
    ["<poml><p>a</poml>", '<poml><p if="1 < 2">a</p></poml>', "<!DOCTYPE x><poml/>", "<poml>&nbsp;</poml>"],
    ids=["unclosed", "less-than", "document-type", "entity"],
)
def test_what_is_no_plain_xml_is_refused(template: str) -> None:
    with pytest.raises(RuntimeError, match=r"XML|document type"):
        poml(template).format()


def test_an_expression_that_fails_is_an_error_of_the_template() -> None:
    with pytest.raises(RuntimeError, match="cannot be rendered"):
        poml("<poml><p>{{ missing.name }}</p></poml>").format()


def test_a_template_that_is_the_name_of_a_file_is_text(tmp_path: Path) -> None:
    file = tmp_path / "secret.poml"
    file.write_text("<poml><p>SECRET</p></poml>")

    assert poml(str(file)).format() == str(file)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Hello <b>you</b> {{ name.length + 1 }}", "Hello **you** 16"),
        (
            '<poml><p if="name && true">Hello {{ name }}</p><list><item for="x in [1, 2]">{{ x }}</item></list></poml>',
            "Hello A <b> & {{ c }}\n\n- 1\n- 2",
        ),
    ],
    ids=["two-roots", "ampersands-and-loop"],
)
def test_templates_are_rendered_and_leave_nothing(
    template: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert poml(template).format(name="A <b> & {{ c }}") == text
    assert os.listdir(tmp_path) == []
