"""What LangChain says of a model call, for models whose requests go out by no SDK we know.

Its messages, settings and results are written as those of a chat would be. Token ids are not among them.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from agentlightning import semconv
from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Thing, ToolParts, field, items
from agentlightning.utils.json_values import JsonMapping

_ROLES: Final = {"human": "user", "ai": "assistant", "function": "tool"}
"""By the type of a message; other types are roles themselves."""
_FINISH_REASON: Final = ("finish_reason", "stop_reason", "done_reason", "stopReason")
"""How the integrations of providers call the reason for which an answer ended."""


def request_attributes(asked: Sequence[Thing], params: JsonMapping, metadata: JsonMapping) -> Attributes:
    """The request.

    Args:
        asked: Messages, or the texts of prompts.
        params: What the model object was told for this call.
        metadata: Of the run; `ls_*` are LangChain's own names for the most common settings.
    """
    attributes: Attributes = {}
    model = params.get("model") or params.get("model_name") or metadata.get("ls_model_name")
    known = {name: metadata.get(f"ls_{name}") for name in ("temperature", "max_tokens", "stop")}
    told = {name: value for name, value in params.items() if value is not None}
    system = str(metadata.get("ls_provider") or "langchain")
    fields.write_request(attributes, {**known, **told, "model": model}, system=system)
    for number, message in enumerate(asked):
        _write_message(attributes, f"{semconv.PROMPT}.{number}", message)
    fields.write_tools(attributes, _tools(params))
    return attributes


def _write_message(attributes: Attributes, prefix: str, message: Thing) -> None:
    if isinstance(message, str):
        fields.write_message(attributes, prefix, role="user", content=message)
        return
    call_id = field(message, "tool_call_id")
    fields.write_message(
        attributes, prefix, role=_role_of(message), content=field(message, "content"), tool_call_id=call_id
    )
    fields.write_tool_calls(attributes, prefix, _tool_calls(message))


def _role_of(message: Thing) -> str:
    kind = fields.plain_text(field(message, "type")).removesuffix("MessageChunk").lower()
    if kind == "chat":
        kind = fields.plain_text(field(message, "role"))
    role = _ROLES.get(kind, kind)
    if role == "system":
        role = (field(message, "additional_kwargs") or {}).get("__openai_role__", role)
    return role if role in ("developer", "system", "user", "assistant", "tool") else "user"


def _tool_calls(message: Thing) -> Iterator[ToolParts]:
    for call in items(field(message, "tool_calls")):
        yield field(call, "id"), field(call, "name"), field(call, "args")


def _tools(params: JsonMapping) -> Iterator[ToolParts]:
    """In the shape of OpenAI or of Anthropic, which other providers follow."""
    for tool in items(params.get("tools") or params.get("functions")):
        described = field(tool, "function") or tool
        schema = field(described, "parameters") or field(described, "input_schema")
        yield field(described, "name"), field(described, "description"), schema


def response_attributes(result: Thing) -> Attributes:
    """The answer: an `LLMResult` for one prompt, with a generation for each choice."""
    attributes: Attributes = {}
    generations = [generation for choices in items(field(result, "generations")) for generation in items(choices)]
    output = field(result, "llm_output") or {}
    for number, generation in enumerate(generations):
        prefix = f"{semconv.COMPLETION}.{number}"
        message = field(generation, "message")
        content = field(generation, "text") if message is None else field(message, "content")
        fields.write_message(attributes, prefix, role="assistant", content=content)
        fields.write_tool_calls(attributes, prefix, _tool_calls(message))
        told = {**(field(generation, "generation_info") or {}), **(field(message, "response_metadata") or {})}
        reason = next((told[name] for name in _FINISH_REASON if told.get(name)), None)
        if reason is not None:
            attributes[f"{prefix}.finish_reason"] = fields.plain_text(reason)
        if number == 0:
            output, given = {**output, **told}, field(message, "id")
            # How ids begin that LangChain gives to messages whose model gave none.
            own_id = given if isinstance(given, str) and not given.startswith("lc_run-") else None
            model = output.get("model_name") or output.get("model")
            attributes |= fields.response_attributes({"id": output.get("id") or own_id, "model": model})
    usage = field(field(generations[0], "message"), "usage_metadata") if generations else None
    fields.write_usage(attributes, usage or output.get("token_usage") or output.get("usage"))
    return attributes
