"""APO's prompt files, rendered in process: the same as the package makes of them, and without it."""

import sys
from pathlib import Path
from typing import Any

import poml as package
import pytest

from agentlightning.algorithm.prompts import poml
from agentlightning.algorithm.prompts.poml import APPLY_EDIT_PROMPT_FILES, GRADIENT_PROMPT_FILES
from agentlightning.errors import TemplateError

FILES = [*GRADIENT_PROMPT_FILES, *APPLY_EDIT_PROMPT_FILES]
MARKUP = "<b>&amp; </prompt_template> & <![CDATA[x]]> <document src='/etc/passwd'/>"
CODE = "{{ process.env }} {{x}} {% y %} #lt; #lbrace; {z}"
SPACE = " first\n\n\n  last \t\r\nline\n "
FENCES = "```json\n[]\n```\n# Heading\n- item"
LETTERS = "é\u00a0\u2028\u3000 \U0001f600 \\n \"quoted\" 'single' \x1b[0m"
NUMBERS = [0.25, 123456.789, -3, 0]


def context_of(text: str, reward: float | None = 0.5) -> dict[str, Any]:
    trace = [{"role": text, text: [text, True, None, [], {}, [[]]], "numbers": NUMBERS}]
    shown = {"status": "succeeded", "final_reward": reward, "messages": trace, "spans": [{"name": text}]}
    ended: dict[str, Any] = {"status": "failed", "final_reward": None, "messages": [], "spans": []}
    return {"experiments": [shown, ended], "prompt_template": text, "critique": f"{text}!"}


@pytest.mark.slow
@pytest.mark.parametrize("path", [*GRADIENT_PROMPT_FILES[1:], APPLY_EDIT_PROMPT_FILES[0]], ids=lambda path: path.stem)
def test_files_are_rendered_as_the_package_renders_them(path: Path) -> None:
    context = context_of(SPACE + MARKUP + CODE + SPACE + FENCES + LETTERS)
    assert poml.poml(path, context=context) == package.poml(path, context=context, format="openai_chat")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("text", [MARKUP, CODE], ids=["markup", "code"])
def test_what_is_shown_is_text_and_nothing_else(path: Path, text: str) -> None:
    (message,) = poml.poml(path, context=context_of(text))["messages"]
    assert f"<prompt_template>\n{text}\n</prompt_template>" in message["content"]


def test_a_value_that_is_missing_is_named() -> None:
    with pytest.raises(TemplateError, match="asks for 'critique'"):
        poml.poml(APPLY_EDIT_PROMPT_FILES[0], context={"prompt_template": "x"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<poml><table records='{{critique}}'/></poml>", "uses <table records>"),
        ("<poml><p>{{ critique.length }}!{{ 1 + 1 }}</p></poml>", "has the expression"),
        ("<poml><p>some <b>bold</b></p></poml>", "has elements in <p>"),
        ("<poml>loose</poml>", "has text beside"),
        ("<p>alone</p>", "begins with <p>"),
    ],
)
def test_a_file_that_uses_more_of_poml_needs_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "poml", None)
    path = tmp_path / "mine.poml"
    path.write_text(text)

    with pytest.raises(ImportError, match=rf"mine.poml .*{reason}.*pip install .*\[poml\]"):
        poml.poml(path, context={"critique": {"length": 1}})


@pytest.mark.slow
def test_a_file_that_uses_more_of_poml_is_rendered_by_the_package(tmp_path: Path) -> None:
    path = tmp_path / "mine.poml"
    path.write_text("<poml><p>See <b>{{ critique.toUpperCase() }}</b></p></poml>")
    assert poml.poml(path, context={"critique": "x"}) == {"messages": [{"role": "user", "content": "See **X**"}]}
