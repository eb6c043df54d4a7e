"""Whether a new prompt can stand in for the old one: it must parse, and take the same values."""

import re
import string

from agentlightning.types import PromptTemplate

__all__ = ["placeholders_of", "unwrapped", "why_unfit"]

_POML_NAME = re.compile(r"\{\{\s*([A-Za-z_]\w*)")
_FIELD_END = re.compile(r"[.\[]")
_FENCED = re.compile(r"\A```[\w-]*\n(?P<text>.*)\n```\Z", re.DOTALL)
_TAGGED = re.compile(r"\A<(?P<tag>prompt_template|prompt)>\n?(?P<text>.*?)\n?</(?P=tag)>\Z", re.DOTALL)


def placeholders_of(prompt: PromptTemplate) -> frozenset[str]:
    """The names of the values that a prompt takes; ValueError if it does not parse."""
    if prompt.engine == "f-string":
        fields = [name for _, name, _, _ in string.Formatter().parse(prompt.template) if name is not None]
        return frozenset(_FIELD_END.split(name, maxsplit=1)[0] for name in fields)
    if prompt.engine == "jinja":
        return _jinja_names(prompt.template)
    return frozenset(_POML_NAME.findall(prompt.template))


def _jinja_names(template: str) -> frozenset[str]:
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        parsed = ImmutableSandboxedEnvironment().parse(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    return frozenset(meta.find_undeclared_variables(parsed))


def why_unfit(candidate: PromptTemplate, original: PromptTemplate) -> str | None:
    """The reason why a candidate cannot replace the original; None if it can."""
    if not candidate.template.strip():
        return "it is empty"
    wanted = placeholders_of(original)
    try:
        found = placeholders_of(candidate)
    except ValueError as error:
        return f"it does not parse: {error}"
    faults = []
    if wanted - found:
        faults.append(f"drops the placeholders {', '.join(sorted(wanted - found))}")
    if found - wanted:
        faults.append(f"has new placeholders {', '.join(sorted(repr(name) for name in found - wanted))}")
    return f"it {' and '.join(faults)}" if faults else None


def unwrapped(answer: str) -> str:
    """A model's answer without the fences or tags that it may have put around the whole of it."""
    text = answer.strip()
    for pattern in (_FENCED, _TAGGED):
        found = pattern.match(text)
        if found:
            return found["text"]
    return answer
