"""POML templates: what they may do while they are rendered, with the real package."""

import os
from pathlib import Path

import pytest

from agentlightning.types import PromptTemplate
from agentlightning.utils import poml_sandbox

pytestmark = pytest.mark.slow

WRITE = "process.getBuiltinModule('fs').writeFileSync('{path}', 'x')"
RUN = "globalThis.process.getBuiltinModule('child_process').execSync('touch {path}')"
DATABASE = "new (process.mainModule.require('node:sqlite').DatabaseSync)('{path}').exec('create table t(x)')"
WITHOUT_LOOKUP = "process.mainModule.require('fs').writeFileSync('{path}', 'x')"
HOOK = (
    "(() => { const M = process.mainModule.constructor; "
    "M.registerHooks({ resolve: () => ({ url: 'node:v8', shortCircuit: true }) }); return typeof M._load('x') })()"
)
RESOLVER = (
    "(() => { const M = process.mainModule.constructor; M._resolveFilename = () => 'v8'; "
    "return typeof M._load('x') })()"
)
METHODS = "(() => { String.prototype.replace = () => 'fs'; return typeof process.mainModule.require('v8') })()"
PATHS = (
    "(() => { const M = process.mainModule.constructor; M._pathCache = new Proxy({}, { get: () => 'v8' }); "
    "return typeof M._load('x') })()"
)
LOG_FILE = "process.mainModule.require('v8').setFlagsFromString('--redirect-code-traces-to={path}')"
WRITES = (WRITE, RUN, WITHOUT_LOOKUP, DATABASE, LOG_FILE)
READS = (
    "process.getBuiltinModule('fs').readFileSync('{path}', 'utf8')",
    "process.mainModule.require('fs').readFileSync('{path}', 'utf8')",
)


def tried(expression: str) -> str:
    """Whether an expression raises, beside others in one template: node takes a second to start."""
    return f"{{{{ (() => {{ try {{ {expression}; return 'done' }} catch (error) {{ return 'refused' }} }})() }}}}"


def poml(template: str) -> PromptTemplate:
    return PromptTemplate(template=template, engine="poml")


def test_a_template_reaches_no_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("SECRET,b\n1,2\n")
    paths = [tmp_path / f"written-{number}" for number in range(len(WRITES))]
    expressions = [text.replace("{path}", str(path)) for text, path in zip(WRITES, paths, strict=True)]
    expressions += [text.replace("{path}", str(secret)) for text in READS]

    found = poml(f"<poml><p>{' '.join(map(tried, [*expressions, '1 + 1']))}</p></poml>").format()

    assert found == " ".join([*["refused"] * len(expressions), "done"])
    assert list(tmp_path.iterdir()) == [secret]


@pytest.mark.parametrize(
    "template",
    [
        '<poml><document src="{path}"/></poml>',
        '<poml><doc SRC="{path}"/></poml>',
        '<poml><x:Document xmlns:x="u" x:src="{path}"/></poml>',
        '<poml><include src="{path}"/></poml>',
        '<poml><folder src="{folder}" showContent="true"/></poml>',
        '<poml><let name="x" src="{path}" type="string"/><p>{{ x }}</p></poml>',
        '<poml><table src="{path}" parser="csv"/></poml>',
        '<poml><stylesheet>{"table": {"\\u0073rc": "{path}", "parser": "csv"}}</stylesheet><table/></poml>',
    ],
    ids=["document", "capitals", "namespace", "include", "folder", "let", "table", "stylesheet"],
)
def test_a_template_reads_no_file(tmp_path: Path, template: str) -> None:
    path = tmp_path / "secret.csv"
    path.write_text("SECRET,b\n1,2\n")

    with pytest.raises(RuntimeError) as refusal:
        poml(template.replace("{path}", str(path)).replace("{folder}", str(tmp_path))).format()

    assert "SECRET" not in str(refusal.value)


def test_a_template_sees_no_environment_holds_no_process_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("AGL_SECRET_OF_THIS_TEST", "SECRET")
    expressions = [
        "JSON.stringify(process.env)",
        "['kill', '_kill', '_debugProcess', 'execve'].map(name => typeof process[name]).join()",
        "typeof process.stdout._handle",
        "typeof process.stdin._handle",
    ]

    found = poml(f"<poml><p>{' '.join(f'{{{{ {text} }}}}' for text in expressions)}</p></poml>").format()

    assert found == f"{{}} {','.join(['undefined'] * 4)} undefined undefined"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["fetch('http://127.0.0.1:9')", "import('node:net')"])
def test_a_template_opens_no_connection(call: str) -> None:
    with pytest.raises(RuntimeError, match="POML command failed"):
        poml(f"<poml><p>{{{{ {call} }}}}</p></poml>").format()


@pytest.mark.parametrize("expression", [HOOK, RESOLVER, METHODS, PATHS], ids=["hook", "resolver", "methods", "paths"])
def test_a_template_does_not_change_what_it_may_load(expression: str) -> None:
    with pytest.raises(RuntimeError, match=r"may not use|not a function"):
        poml(f"<poml><p>{{{{ {expression} }}}}</p></poml>").format()


def test_a_template_that_writes_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poml_sandbox, "MAX_OUTPUT_BYTES", 1000)
    with pytest.raises(RuntimeError, match="more than 1000 bytes"):
        poml("<poml><p>{{ 'x'.repeat(2000) }}</p></poml>").format()


def test_a_template_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poml_sandbox, "RENDER_SECONDS", 2.0)
    with pytest.raises(RuntimeError, match="not rendered within 2 s"):
        poml("<poml><p>{{ (() => { while (true); })() }}</p></poml>").format()


@pytest.mark.parametrize(
    "template",
    ["<poml><p>a</poml>", '<poml><p if="1 < 2">a</p></poml>', "<!DOCTYPE x><poml/>", "<poml>&nbsp;</poml>"],
    ids=["unclosed", "less-than", "document-type", "entity"],
)
def test_what_is_no_plain_xml_is_refused(template: str) -> None:
    with pytest.raises(RuntimeError, match=r"XML|document type"):
        poml(template).format()


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
def test_templates_that_reach_for_nothing_are_rendered(template: str, text: str) -> None:
    assert poml(template).format(name="A <b> & {{ c }}") == text
