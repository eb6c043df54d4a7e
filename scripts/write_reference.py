"""Write what the reference has from the code: the options of every command, and every route of the store server.

    make reference

`docs/reference/cli.md` keeps what was written by hand; the text between `<!-- generated: agl COMMAND -->` and
`<!-- end -->` comes from the command's parser. `docs/reference/openapi.json` is what a server answers at
`/openapi.json`, and `docs/reference/routes.md` is made from it. Tests compare all three with the code.
"""

import argparse
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

from agentlightning.cli import COMMANDS, module_of
from agentlightning.cli.command import Command

REFERENCE: Final = Path(__file__).resolve().parent.parent / "docs" / "reference"
CLI, OPENAPI, ROUTES = REFERENCE / "cli.md", REFERENCE / "openapi.json", REFERENCE / "routes.md"
GENERATED: Final = re.compile(r"(?<=<!-- generated: agl )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
PREFIX: Final = "/v1/agl/"

ROUTES_HEAD: Final = """\
# Routes of the store server

<!-- This page is generated: `make reference` writes it from openapi.json. -->

Every route of a store server, from [`openapi.json`](openapi.json). [HTTP and WebSocket](http.md) explains tokens,
failures, waiting and the live channel. Arguments without "required" may be left out. A page is an object with `items`,
`limit`, `offset` and `total`. Failures answer with a [`Failure`](#failure).
"""


def main() -> None:
    from agentlightning.store import InMemoryLightningStore
    from agentlightning.store.http.app import build_app

    document = build_app(InMemoryLightningStore()).openapi()
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
    OPENAPI.write_text(f"{text}\n", encoding="utf-8")
    CLI.write_text(cli_page(CLI.read_text(encoding="utf-8")), encoding="utf-8")
    ROUTES.write_text(routes_page(json.loads(text)), encoding="utf-8")


# ---------------------------------------------------------------------- the command line


def cli_page(page: str) -> str:
    """The page with its generated parts made anew; one that has a part for each command, and no other."""
    parts = [match[1] for match in GENERATED.finditer(page)]
    if sorted(parts) != sorted(COMMANDS):
        differing = ", ".join(sorted(set(parts) ^ set(COMMANDS))) or "a command that stands twice"
        raise SystemExit(f"{CLI.name} needs one `<!-- generated: agl COMMAND -->` for each command: {differing}.")
    return GENERATED.sub(lambda match: match[1] + match[2] + "\n".join(command_lines(match[1])) + "\n", page)


def command_lines(name: str) -> list[str]:
    command: Command = importlib.import_module(module_of(name)).main
    parser = command.parser()
    lines = list(parser_lines(parser, command.usage))
    for verb in verbs_of(parser).values():
        lines += [f"### {verb.prog}", "", verb.description or "", "", *parser_lines(verb, None, shown=parser.epilog)]
    return lines


def parser_lines(parser: argparse.ArgumentParser, usage: str | None, shown: str | None = None) -> Iterator[str]:
    """How it is called, a table of what it takes, and its examples, unless they were shown."""
    actions = [one for one in parser._actions if one.dest != "help" and one.help != argparse.SUPPRESS]
    verbs = verbs_of(parser)
    arguments = [one for one in actions if not isinstance(one, argparse._SubParsersAction)]
    yield from ("```text", usage or usage_of(parser, arguments))
    yield from (usage_of(verb, verb._actions) for verb in verbs.values())
    yield from ("```", "")
    formatter = parser._get_formatter()
    if arguments:
        yield from ("| argument | meaning |", "| --- | --- |")
        for argument in arguments:
            meaning = formatter._expand_help(argument) if argument.help else ""
            note = " Required." if argument.option_strings and argument.required else ""
            yield f"| {names_of(argument)} | {cell(meaning)}{note} |"
        yield ""
    if parser.epilog and parser.epilog != shown:
        yield from ("```text", parser.epilog.strip(), "```", "")


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def usage_of(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> str:
    words = [parser.prog, "[OPTIONS]"]
    for action in actions:
        if not action.option_strings:
            is_optional = action.nargs in (argparse.OPTIONAL, argparse.ZERO_OR_MORE)
            words.append(f"[{value_of(action)}]" if is_optional else value_of(action))
        elif action.required:
            words.append(f"{action.option_strings[-1]} {value_of(action)}")
    return " ".join(words)


def names_of(action: argparse.Action) -> str:
    value = value_of(action).replace("|", " or ")  # a bar ends the cell of a table
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{option} {value}`" if action.nargs != 0 else f"`{option}`" for option in action.option_strings)


def value_of(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def cell(text: str) -> str:
    """Text that stays in its cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ---------------------------------------------------------------------- the routes


def routes_page(document: Mapping[str, Any]) -> str:
    groups: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for path, verbs in document["paths"].items():
        for verb, route in verbs.items():
            heading = f"`{verb.upper()} {path}`"
            group = path.removeprefix(PREFIX).split("/")[0] if path.startswith(PREFIX) else "other"
            same = first.setdefault(route["summary"], heading)
            is_repeat = path.endswith("/search") and same != heading
            lines = [f"As {same}, with the arguments in the body.", ""] if is_repeat else route_lines(route)
            groups.setdefault(group, []).extend([f"### {heading}", "", *lines])
    page = [ROUTES_HEAD]
    for group, lines in sorted(groups.items(), key=lambda item: (item[0] == "other", item[0])):
        page += [f"## {group.capitalize()}", "", *lines]
    page += ["## Objects", ""]
    objects = {**document["components"]["schemas"], **inline_objects(document)}
    for name, schema in sorted(objects.items()):
        page += [f"### {name}", "", schema.get("description", "").split("\n\n")[0], "", *object_lines(schema)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(page)).rstrip() + "\n"


def inline_objects(document: Mapping[str, Any]) -> dict[str, Any]:
    """Objects with a name that one route alone answers with, so that they stand there and not among the components."""
    routes = [route for verbs in document["paths"].values() for route in verbs.values()]
    contents = [response.get("content", {}) for route in routes for response in route["responses"].values()]
    schemas = [one["schema"] for content in contents for one in content.values() if "schema" in one]
    return {
        one["title"]: one for one in schemas if type_of(one) == f"[{one.get('title')}](#{one.get('title', '').lower()})"
    }


def route_lines(route: Mapping[str, Any]) -> Iterator[str]:
    yield from (dedent(route.get("description") or route["summary"]).strip(), "")
    rows = [(one["name"], one["in"], one["schema"], one.get("required", False)) for one in route.get("parameters", ())]
    body = next(iter(route.get("requestBody", {"content": {}})["content"].values()), {}).get("schema")
    whole = None
    if body is not None and "properties" in body and "title" not in body:
        required = body.get("required", ())
        rows += [(name, "body", schema, name in required) for name, schema in body["properties"].items()]
    elif body is not None:
        whole = type_of(body)
    if rows:
        yield from ("| argument | in | type |", "| --- | --- | --- |")
        for name, place, schema, is_required in rows:
            yield f"| `{name}` | {place} | {type_of(schema)}{', required' if is_required else ''} |"
        yield ""
    if whole is not None:
        yield from (f"Body: {whole}.", "")
    for status, response in route["responses"].items():
        schema = next(iter(response.get("content", {}).values()), {}).get("schema")
        if int(status) < 400 and schema is not None:
            yield from (f"Answer {status}: {type_of(schema)}.", "")


def object_lines(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| field | type | default |", "| --- | --- | --- |")
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        default = "required" if name in required else default
        yield f"| `{name}` | {type_of(field)} | {default} |"
    yield ""


def type_of(schema: Mapping[str, Any]) -> str:
    """A type in words: `list of Span`, `string or null`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if schema.get("title", "").startswith("PaginatedResult"):
        return f"page of {type_of(schema['properties']['items']['items'])}"
    if "properties" in schema and "title" in schema:
        return f"[{schema['title']}](#{schema['title'].lower()})"
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(map(type_of, options)))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "prefixItems" in schema:
        return f"({', '.join(map(type_of, schema['prefixItems']))})"
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and values:
        return f"object whose values are {type_of(values)}"
    return str(schema.get("type", "any JSON"))


if __name__ == "__main__":
    main()
