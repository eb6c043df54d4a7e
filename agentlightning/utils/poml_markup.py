"""POML: its elements, and its text as the `poml` package renders it.

Expressions of POML are JavaScript and some of its tags read files, so a template is a program, which the package runs
with the rights of this process. Whether a template may be rendered is for others to decide.
"""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from agentlightning.errors import ConfigurationError, TemplateError, TemplateNotAllowed
from agentlightning.utils.installation import install_command

_BARE_AMPERSAND: Final = re.compile(r"&(?!#?\w+;)")


def local_name(name: str) -> str:
    """The name of a tag or attribute as `poml` compares it: without a namespace, in small letters."""
    return name.rpartition("}")[2].lower()


def parse_poml(template: str) -> ET.Element:
    """The elements of a template; TemplateError if it is no XML."""
    if "<!DOCTYPE" in template or "<?" in template:
        raise TemplateNotAllowed("A POML template may have no document type and no processing instructions.")
    # `poml` takes the ampersands of JavaScript as they are; they begin no tag. Entities need a document type.
    text = _BARE_AMPERSAND.sub("&amp;", template)
    try:
        return ET.fromstring(f"<poml>{text}</poml>")
    except ET.ParseError as error:
        raise TemplateError(f"The POML template is not well-formed XML: {error}.") from error


def render_poml(template: str, values: Mapping[str, object]) -> str:
    """The text of a template with these values."""
    try:
        from poml import poml
    except ImportError as error:
        raise ImportError(f"POML prompt templates need poml: run `{install_command('poml')}`.") from error
    parse_poml(template)
    with tempfile.TemporaryDirectory(prefix="agl-poml-") as folder:
        path = Path(folder) / "template.poml"  # a text that is the name of a file would be read as that file
        path.write_text(template, encoding="utf-8")
        try:
            rendered = poml(path, context=dict(values), chat=False, format="dict")
        except RuntimeError as error:
            raise TemplateError(f"The POML template cannot be rendered: {error}") from error
    text = rendered["messages"] if isinstance(rendered, dict) else None
    if not isinstance(text, str):
        raise ConfigurationError("A POML prompt template must render to text; this one holds images or other media.")
    return text
