"""The part of POML that APO's prompt files use, rendered in process.

`poml` here does what the function of that name in the package `poml` does for these files, without the node process
that it starts for each. Tags: `poml`, `p`, `text`, `list` with `item`, `cp` and `object`; expressions: a path of
names, with `+ number` or `?? "text"` behind it. What rollouts left behind is put in as text and never parsed. A
prompt file of your own that uses more is rendered by the package itself, if it is installed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from agentlightning.errors import TemplateError
from agentlightning.utils.installation import install_command
from agentlightning.utils.json_values import JsonObject

_FILES: Final = Path(__file__).parent / "files"
GRADIENT_PROMPT_FILES: Final = [_FILES / f"gradient_{name}.poml" for name in ("conversations", "spans", "review")]
"""Three ways to criticise a prompt."""
APPLY_EDIT_PROMPT_FILES: Final = [_FILES / f"edit_{name}.poml" for name in ("rewrite", "one_point")]
"""Two ways to rewrite one."""

_EXPRESSION: Final = re.compile(r"{{\s*(.+?)\s*}}(?!})")
_PATH: Final = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_TERM: Final = re.compile(rf'({_PATH})(?:\s*\+\s*(\d+)|\s*\?\?\s*"([^"]*)")?')
_LOOP: Final = re.compile(rf"([A-Za-z_]\w*)\s+in\s+({_PATH})")
_ESCAPES: Final = dict(zip(["lt", "gt", "amp", "quot", "apos", "hash", "lbrace", "rbrace"], "<>&\"'#{}", strict=True))
_ESCAPE: Final = re.compile(rf"#({'|'.join(_ESCAPES)});")
_SPACES: Final = re.compile(r"[ \t\n\r]+")

_Context = Mapping[str, Any]


class _Unsupported(Exception):
    """A prompt file uses more of POML than is known here; it stays in this file."""


def poml(markup: str | Path, context: _Context, format: str = "openai_chat") -> JsonObject:
    """The chat messages of a POML file: `{"messages": [...]}`."""
    path = Path(markup)
    try:
        root = ET.fromstring(path.read_text(encoding="utf-8"))
        if root.tag != "poml" or root.attrib:
            raise _Unsupported(f"begins with <{root.tag}> and not with a plain <poml>")
        content = "\n\n".join(_blocks(root, context))
    except (_Unsupported, ET.ParseError) as reason:
        try:
            from poml import poml as render
        except ImportError as error:
            raise ImportError(f"{path.name} {reason}, which needs poml: run `{install_command('poml')}`.") from error
        rendered: JsonObject = render(path, context=dict(context), format=format)
        return rendered
    return {"messages": [{"role": "user", "content": content}]}


def _blocks(parent: ET.Element, context: _Context) -> Iterator[str]:
    """The paragraphs of an element."""
    if any((text or "").strip() for text in (parent.text, *(child.tail for child in parent))):
        raise _Unsupported(f"has text beside the elements of <{parent.tag}>")
    for element in parent:
        match (element.tag, element.attrib):
            case ("p", attributes) if not attributes:
                yield _line(element, context)
            case ("text", {"whiteSpace": "pre"}):
                yield _text(element, context)
            case ("list", {"listStyle": "decimal"}) if all(item.tag == "item" for item in element):
                yield "\n".join(f"{number}. {_line(item, context)}" for number, item in enumerate(element, start=1))
            case ("cp", {"for": loop, "caption": caption}) if (found := _LOOP.fullmatch(loop)) is not None:
                for index, item in enumerate(_value(found[2], context)):
                    inner = {**context, found[1]: item, "loop": {"index": index}}
                    yield f"# {_filled(caption, inner)}"
                    yield from _blocks(element, inner)
            case ("object", {"data": data, "syntax": "json"}) if (found := _EXPRESSION.fullmatch(data)) is not None:
                yield f"```json\n{_json(_evaluated(found[1], context))}\n```"
            case _:
                raise _Unsupported(f"uses <{' '.join((element.tag, *element.attrib))}>")


def _line(element: ET.Element, context: _Context) -> str:
    return _SPACES.sub(" ", _text(element, context)).strip(" ")


def _text(element: ET.Element, context: _Context) -> str:
    if len(element):
        raise _Unsupported(f"has elements in <{element.tag}>")
    return _filled(element.text or "", context)


def _filled(text: str, context: _Context) -> str:
    """The text with its expressions replaced; only what stands in the file itself is unescaped."""
    pieces = _EXPRESSION.split(text)  # every second one is an expression
    for number, piece in enumerate(pieces):
        if number % 2 == 0:
            pieces[number] = _ESCAPE.sub(lambda found: _ESCAPES[found[1]], piece)
            continue
        value = _evaluated(piece, context)
        pieces[number] = value if isinstance(value, str) else _json(value)
    return "".join(pieces)


def _evaluated(expression: str, context: _Context) -> Any:
    term = _TERM.fullmatch(expression)
    if term is None:
        raise _Unsupported(f"has the expression '{expression}'")
    path, addend, default = term.groups()
    value = _value(path, context)
    if addend is not None:
        return value + int(addend)
    return default if value is None and default is not None else value


def _value(path: str, context: _Context) -> Any:
    value: Any = context
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise TemplateError(f"The prompt file asks for '{path}', and there is no '{name}'.")
        value = value[name]
    return value


def _json(value: object) -> str:
    """With an indent of two, as the package writes it; a whole number has no fraction."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False, indent=2)
