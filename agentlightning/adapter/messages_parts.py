"""The content of a message in parts: texts and images, as each API writes them, in the one form of OpenAI's chats.

Spans hold values and no lists of parts, so tracers and the proxy write such a list as JSON. A text is taken for one
only if every element is a part that an API knows; anything else is what somebody said.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["content_in_parts", "is_content"]

Part = dict[str, Any]

_TEXTS: Final = ("text", "input_text", "output_text")
_FIELD_OF: Final = {
    **dict.fromkeys(_TEXTS, "text"),
    "image_url": "image_url",
    "input_image": "image_url",
    "image": "source",
    "input_audio": "input_audio",
    "file": "file",
    "refusal": "refusal",
}
"""Kinds of parts, and the field that one of that kind has."""


def content_in_parts(content: object) -> object:
    """A list of parts, or the JSON of one, in OpenAI's form; any other content as it is."""
    parts = content if isinstance(content, list) else _read(content)
    return parts if not isinstance(parts, list) or not is_content(parts) else [_part(part) for part in parts]


def is_content(content: object) -> bool:
    """Whether it is text, or a list of parts that say what they are."""
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)
    return isinstance(content, str)


def _read(content: object) -> object:
    """The parts that a text stands for; the text itself if it stands for none."""
    if not isinstance(content, str) or not content.startswith("[{"):
        return content
    try:
        parts = json.loads(content)
    except ValueError:
        return content
    return parts if isinstance(parts, list) and all(map(_is_known, parts)) else content


def _is_known(part: object) -> bool:
    return isinstance(part, Mapping) and _FIELD_OF.get(str(part.get("type")), "type") in part.keys() - {"type"}


def _part(part: Mapping[str, Any]) -> Part:
    kind = part["type"]
    if kind in _TEXTS:
        return {"type": "text", "text": part.get("text", "")}
    url = _image_url(part)
    if url is None:
        return dict(part)
    image = {"url": url}
    detail = part.get("detail") or (_named(part.get("image_url")).get("detail") if kind == "image_url" else None)
    if detail:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def _image_url(part: Mapping[str, Any]) -> str | None:
    """Where the image is, or what it is as a data URL; None for what is no image, or one that only its API can find."""
    kind, url = part["type"], part.get("image_url")
    if kind in ("image_url", "input_image"):
        url = _named(url).get("url", url)
    elif kind == "image":
        source = _named(part.get("source"))
        url = source.get("url")
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return url if isinstance(url, str) else None


def _named(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
