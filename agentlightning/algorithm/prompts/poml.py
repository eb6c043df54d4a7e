"""The part of POML that APO's prompt files use, rendered in process.

`poml` here does what the function of that name in the package `poml` does for these files, without the node process
that it starts for each. Tags: `poml`, `p`, `text`, `list` with `item`, `cp` and `object`; expressions: a path of
names, with `+ number` or `?? "text"` behind it. What rollouts left behind is put in as text and never parsed. A
prompt file of your own that uses more is rendered by the package itself, if it is installed.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from agentlightning.errors import ConfigurationError, TemplateError
from agentlightning.utils.installation import install_command

__all__ = ["APPLY_EDIT_PROMPT_FILES", "GRADIENT_PROMPT_FILES", "poml"]

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
_LARGEST_EXACT_INTEGER: Final = 2**53
"""Of JavaScript, whose numbers are all floats."""

_Context = Mapping[str, Any]


class _BeyondThis(Exception):
    """A prompt file uses more of POML than is known here; it stays in this file."""


def poml(markup: str | Path, context: _Context, format: str = "openai_chat") -> dict[str, Any]:
    """The chat messages of a POML file: `{"messages": [...]}`."""
    path = Path(markup)
    try:
        content = _rendered(path.read_text(encoding="utf-8"), context)
    except _BeyondThis as reason:
        return _by_package(path, context, format, reason)
    return {"messages": [{"role": "user", "content": content}]}


def _by_package(path: Path, context: _Context, format: str, reason: _BeyondThis) -> dict[str, Any]:
    try:
        from poml import poml as render
    except ImportError as error:
        raise ImportError(f"{path.name} {reason}, which needs poml: run `{install_command('poml')}`.") from error
    answer: dict[str, Any] = render(path, context=dict(context), format=format)
    return answer


def _rendered(text: str, context: _Context) -> str:
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise _BeyondThis(f"is not well-formed XML ({error})") from error
    if root.tag != "poml" or root.attrib:
        raise _BeyondThis(f"begins with <{root.tag}> and not with a plain <poml>")
    return "\n\n".join(_blocks(root, context))


def _blocks(parent: ET.Element, context: _Context) -> Iterator[str]:
    """The paragraphs of an element."""
    for text in (parent.text, *(child.tail for child in parent)):
        if (text or "").strip():
            raise _BeyondThis(f"has text beside the elements of <{parent.tag}>")
    for element in parent:
        block = _BLOCKS.get((element.tag, *element.attrib))
        if block is None:
            raise _BeyondThis(f"uses <{' '.join((element.tag, *element.attrib))}>")
        yield from block(element, context)


def _paragraph(element: ET.Element, context: _Context) -> Iterator[str]:
    yield _SPACES.sub(" ", _text(element, context)).strip(" ")


def _preformatted(element: ET.Element, context: _Context) -> Iterator[str]:
    _check(element, whiteSpace="pre")
    yield _text(element, context)


def _numbered_list(element: ET.Element, context: _Context) -> Iterator[str]:
    _check(element, listStyle="decimal")
    if any(item.tag != "item" or item.attrib for item in element):
        raise _BeyondThis("has more than plain items in a <list>")
    items = (next(_paragraph(item, context)) for item in element)
    yield "\n".join(f"{number}. {item}" for number, item in enumerate(items, start=1))


def _captioned(element: ET.Element, context: _Context) -> Iterator[str]:
    loop = _LOOP.fullmatch(element.attrib["for"])
    if loop is None or any(child.tag == "cp" for child in element):
        raise _BeyondThis("has a <cp> with another loop than 'name in names'")
    for index, item in enumerate(_value(loop[2], context)):
        inner = {**context, loop[1]: item, "loop": {"index": index}}
        yield f"# {_filled(element.attrib['caption'], inner)}"
        yield from _blocks(element, inner)


def _object(element: ET.Element, context: _Context) -> Iterator[str]:
    _check(element, syntax="json")
    term = _EXPRESSION.fullmatch(element.attrib["data"])
    if term is None:
        raise _BeyondThis("has an <object> whose data is no expression")
    yield f"```json\n{_json(_evaluated(term[1], context))}\n```"


_BLOCKS: Final[dict[tuple[str, ...], Callable[[ET.Element, _Context], Iterator[str]]]] = {
    ("p",): _paragraph,
    ("text", "whiteSpace"): _preformatted,
    ("list", "listStyle"): _numbered_list,
    ("cp", "for", "caption"): _captioned,
    ("object", "data", "syntax"): _object,
}
"""What is known, by the tag and the names of its attributes."""


def _check(element: ET.Element, **attributes: str) -> None:
    for name, value in attributes.items():
        if element.attrib[name] != value:
            raise _BeyondThis(f"""has <{element.tag} {name}="{element.attrib[name]}">""")


# ---------------------------------------------------------------------- text and values


def _text(element: ET.Element, context: _Context) -> str:
    if len(element):
        raise _BeyondThis(f"has elements in <{element.tag}>")
    return _filled(element.text or "", context)


def _filled(text: str, context: _Context) -> str:
    """The text with its expressions replaced; only what stands in the file itself is unescaped."""
    pieces = _EXPRESSION.split(text)
    for number, piece in enumerate(pieces):
        if number % 2:
            value = _evaluated(piece, context)
            pieces[number] = value if isinstance(value, str) else _json(value)
        else:
            pieces[number] = _ESCAPE.sub(lambda found: _ESCAPES[found[1]], piece)
    return "".join(pieces)


def _evaluated(expression: str, context: _Context) -> Any:
    term = _TERM.fullmatch(expression)
    if term is None:
        raise _BeyondThis(f"has the expression '{expression}'")
    path, addend, instead = term.groups()
    value = _value(path, context)
    if addend is not None:
        return value + int(addend)
    return instead if value is None and instead is not None else value


def _value(path: str, context: _Context) -> Any:
    value: Any = context
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise TemplateError(f"The prompt file asks for '{path}', and there is no '{name}'.")
        value = value[name]
    return value


def _json(value: Any, indent: str = "\n") -> str:
    """As `JSON.stringify(value, null, 2)` writes it."""
    inner = indent + "  "
    if isinstance(value, Mapping):
        members = [f"{json.dumps(str(key), ensure_ascii=False)}: {_json(one, inner)}" for key, one in value.items()]
        return f"{{{inner}{f',{inner}'.join(members)}{indent}}}" if members else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = [_json(one, inner) for one in value]
        return f"[{inner}{f',{inner}'.join(items)}{indent}]" if items else "[]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(value)
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    raise ConfigurationError(
        f"A value of type {type(value).__name__} cannot be shown as JSON; traces hold plain values."
    )


def _number(value: float) -> str:
    """As JavaScript writes it: decimals from 1e-6 to 1e21, no fraction where there is none."""
    if isinstance(value, int) and abs(value) <= _LARGEST_EXACT_INTEGER:
        return str(int(value))
    value = float(value)
    if value != value or abs(value) == float("inf"):
        return "null"
    decimal = Decimal(repr(value))
    if value == 0:
        return "0"
    if 1e-6 <= abs(value) < 1e21:
        text = format(decimal, "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    sign, digits, _ = decimal.normalize().as_tuple()
    mantissa = "".join(map(str, digits))
    fraction = f".{mantissa[1:]}" if len(mantissa) > 1 else ""
    return f"{'-' if sign else ''}{mantissa[0]}{fraction}e{decimal.adjusted():+d}"
