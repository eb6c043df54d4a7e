"""The prompts that are optimised: which there are, and whether a new one can replace an old one.

A candidate must parse, take the same values, and bring no code of its own.

Templates are code, and a model that read what agents left behind writes the new ones. So a candidate may use plain
placeholders, and otherwise only the expressions, statements and tags with expressions that the original has too.
"""

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var
from agentlightning.errors import ConfigurationError, TemplateError
from agentlightning.types import NamedResources, PromptTemplate
from agentlightning.utils.poml_markup import local_name, parse_poml

_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_POML_NAME: Final = re.compile(r"\{\{\s*([A-Za-z_]\w*)")
_POML_EXPRESSION: Final = re.compile(r"\{\{\s*(.+?)\s*\}\}(?!\})", re.DOTALL)
_POML_PLAIN_TAGS: Final = frozenset(
    re.findall(
        r"\S+",
        "ai-msg aimessage b bold br caption captionedparagraph code conversation cp div example exampleinput "
        "exampleoutput examples exampleset h header hint human-msg humanmessage i inline input introducer italic item "
        "list listitem newline output output-format outputformat p paragraph poml qa question role s section span "
        "stepwise-instructions stepwiseinstructions strike strikethrough subcontent system-msg systemmessage task text "
        "u underline",
    )
)
"""Tags whose contents are prose; the others evaluate what is in them, define something, or show data."""
_FIELD_END: Final = re.compile(r"[.\[]")
_FENCED: Final = re.compile(r"\A```[\w-]*\n(?P<text>.*)\n```\Z", re.DOTALL)
_TAGGED: Final = re.compile(r"\A<(?P<tag>prompt_template|prompt)>\n?(?P<text>.*?)\n?</(?P=tag)>\Z", re.DOTALL)


def seed_prompts(resources: NamedResources | None, algorithm: str) -> dict[str, PromptTemplate]:
    """The prompts among the initial resources, which an algorithm starts from; ConfigurationError if there is none."""
    prompts = {name: one for name, one in (resources or {}).items() if isinstance(one, PromptTemplate)}
    if not prompts:
        raise ConfigurationError(
            f"{algorithm} starts from prompts, and among the initial resources {list(resources or ())} there is none; "
            "give the Trainer initial_resources with a PromptTemplate, or call set_initial_resources."
        )
    return prompts


def check_candidates_are_allowed(prompts: Mapping[str, PromptTemplate], trainer: Any) -> None:
    """ConfigurationError if the runners of a trainer would refuse candidates, which come out of the store."""
    if trainer.allow_poml or resolve_bool_env_var(LightningEnvVar.AGL_ALLOW_POML, fallback=False):
        return
    for name, prompt in prompts.items():
        if prompt.engine == "poml":
            raise ConfigurationError(
                f"Prompt '{name}' is a POML template, and runners format no POML that comes out of the store, as all "
                "candidates do; say Trainer(allow_poml=True) if the optimiser's model may write code for them."
            )


def placeholders_of(prompt: PromptTemplate) -> frozenset[str]:
    """The names of the values that a prompt takes; ValueError if it does not parse."""
    if prompt.engine == "f-string":
        fields = [name for _, name, _, _ in string.Formatter().parse(prompt.template) if name is not None]
        return frozenset(_FIELD_END.split(name, maxsplit=1)[0] for name in fields)
    if prompt.engine == "jinja":
        from jinja2 import meta

        return frozenset(meta.find_undeclared_variables(_jinja_tree(prompt.template)))
    return frozenset(_POML_NAME.findall(prompt.template))


def why_unfit(candidate: PromptTemplate, original: PromptTemplate) -> str | None:
    """The reason why a candidate cannot replace the original; None if it can."""
    if not candidate.template.strip():
        return "it is empty"
    wanted = placeholders_of(original)
    try:
        found = placeholders_of(candidate)
        code = list(_code_of(candidate))
    except (ValueError, TemplateError) as error:
        return f"it does not parse: {error}"
    faults = []
    if wanted - found:
        faults.append(f"drops the placeholders {', '.join(sorted(wanted - found))}")
    if found - wanted:
        faults.append(f"has new placeholders {', '.join(sorted(repr(name) for name in found - wanted))}")
    known = set(_code_of(original)) if code else set()
    new = sorted({one for one in code if one not in known})
    if new:
        faults.append(f"has code that the seed does not have: {', '.join(one[:80] for one in new)}")
    return f"it {' and '.join(faults)}" if faults else None


# ---------------------------------------------------------------------- code


def _code_of(prompt: PromptTemplate) -> Iterator[str]:
    """What a prompt evaluates beyond plain placeholders; ValueError or TemplateError if it does not parse."""
    if prompt.engine == "f-string":
        return _f_string_code(prompt.template)
    return _jinja_code(prompt.template) if prompt.engine == "jinja" else _poml_code(prompt.template)


def _f_string_code(template: str) -> Iterator[str]:
    for _, name, spec, conversion in string.Formatter().parse(template):
        if name is not None and (spec or conversion or not _NAME.fullmatch(name)):
            yield f"{{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}"


def _jinja_tree(template: str):  # type: ignore[no-untyped-def] # jinja2 is loaded when it is needed
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return ImmutableSandboxedEnvironment().parse(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error


def _jinja_code(template: str) -> Iterator[str]:
    """Expressions that are written out, and the heads of statements, whose bodies are looked at by themselves."""
    from jinja2 import nodes

    statements = [_jinja_tree(template)]
    while statements:
        statement = statements.pop()
        statements += [child for child in statement.iter_child_nodes() if isinstance(child, nodes.Stmt)]
        if isinstance(statement, nodes.Output):
            yield from (repr(one) for one in statement.nodes if not isinstance(one, (nodes.TemplateData, nodes.Name)))
        elif not isinstance(statement, nodes.Template):
            head = [(name, value) for name, value in statement.iter_fields() if name not in ("body", "elif_", "else_")]
            yield f"{type(statement).__name__}{head}"


def _poml_code(template: str) -> Iterator[str]:
    for element in parse_poml(template).iter():
        tag = local_name(element.tag)
        if tag not in _POML_PLAIN_TAGS:
            yield f"<{tag} {sorted(element.attrib.items())}>{''.join(element.itertext()).strip()}"
        for name, value in element.attrib.items():
            if local_name(name) in ("for", "if", "src", "url") or "{{" in value:
                yield f"<{tag} {local_name(name)}={value!r}>"
        for text in (element.text, *(child.tail for child in element)):
            yield from _poml_expressions(text or "")


def _poml_expressions(text: str) -> Iterator[str]:
    """Expressions but plain names; and text that only looks like one, which `poml` may read otherwise."""
    rest = text
    for found in _POML_EXPRESSION.finditer(text):
        rest = rest.replace(found[0], " ")
        if not _NAME.fullmatch(found[1]):
            yield f"{{{{ {found[1]} }}}}"
    if "{{" in rest:
        yield rest.strip()


def unwrapped(answer: str) -> str:
    """A model's answer without the fences or tags that it may have put around the whole of it."""
    text = answer.strip()
    for pattern in (_FENCED, _TAGGED):
        found = pattern.match(text)
        if found:
            return found["text"]
    return answer
