"""Spans become chat messages, in the shape OpenAI takes for fine-tuning.

What instrumentation flattens into `gen_ai.prompt.0.role` and the like is put together again, whichever API was called:
chat completions, responses or Anthropic's messages. The message shapes are checked by rules of our own that say what
OpenAI's types say, so that its package is not needed.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from typing_extensions import TypedDict

from agentlightning.adapter.base import TraceAdapter, as_spans
from agentlightning.adapter.call_attributes import group_genai_dict, has_failed
from agentlightning.adapter.calls import ProxiedCalls
from agentlightning.semconv import COMPLETION, PROMPT
from agentlightning.types.tracer import Span, SpanLike
from agentlightning.utils.json_values import JsonMapping, JsonObject, parsed

__all__ = ["OpenAIMessages", "RawCall", "TraceToMessages", "convert_to_openai_messages", "group_genai_dict"]

logger = logging.getLogger(__name__)

ChatMessage = dict[str, Any]
"""One message of a chat, as OpenAI's API takes it."""

_ROLES: Final = ("developer", "system", "user", "assistant", "tool")
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


class OpenAIMessages(TypedDict):
    """One conversation for fine-tuning."""

    messages: list[ChatMessage]
    tools: list[JsonObject] | None
    """Definitions of the tools the model could call; None if the request had none."""


class RawCall(TypedDict):
    """What the span of one model call says, unflattened."""

    prompt: list[JsonObject]
    completion: list[JsonObject]
    request: JsonObject
    response: JsonObject
    tools: list[JsonObject]
    """The tools that were called, from the spans beneath."""


def convert_to_openai_messages(prompt_completion_list: Iterable[RawCall]) -> Iterator[OpenAIMessages]:
    """One conversation for each call: its prompt, then what the model answered."""
    for call in prompt_completion_list:
        messages = _joined(_prompt_message(message) for message in _objects(call["prompt"], "A prompt"))
        completions = [c for c in _objects(call["completion"], "A completion") if c.get("role") == "assistant"]
        messages += [_completion_message(completion, call["tools"]) for completion in completions]
        functions = call["request"].get("functions")
        tools = None if functions is None else list(map(_tool_definition, _objects(functions, "A request with tools")))
        yield OpenAIMessages(messages=messages, tools=tools)


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """The conversations of a trace, one for each span with messages in its `gen_ai.*` attributes.

    A call that the LLM proxy recorded besides the agent's own tracer is one conversation, that of the tracer. A call
    that failed without an answer is none, and neither is one whose attributes have another shape than messages: a line
    of the log says so. The tools a completion called are those of the spans directly beneath it or,
    if there are none, those it names.
    """

    def get_tool_calls(self, completion: Span, all_spans: Sequence[Span], /) -> Iterator[JsonObject]:
        """What the direct children of a completion say about the tools they ran."""
        for span in all_spans:
            if span.parent_id != completion.span_id:
                continue
            tool = _grouped(span, "tool", dict)
            if tool:
                yield tool

    def adapt(self, source: Sequence[SpanLike], /) -> list[OpenAIMessages]:
        """The conversations, in the order of the spans."""
        spans = as_spans(source)
        children_by_parent: dict[str | None, list[Span]] = {}
        for span in spans:
            children_by_parent.setdefault(span.parent_id, []).append(span)
        conversations: list[OpenAIMessages] = []
        unreadable: list[ValueError] = []
        texts = (f"{PROMPT}.", f"{COMPLETION}.")
        proxied = ProxiedCalls(spans, lambda span: any(name.startswith(texts) for name in span.attributes))
        for span in spans:
            is_call = any(name.startswith("gen_ai.") for name in span.attributes)
            if not is_call or proxied.call_of(span) is not None or has_failed(span):
                continue
            try:
                call = RawCall(
                    prompt=_grouped(span, PROMPT, list),
                    completion=_grouped(span, COMPLETION, list),
                    request=_grouped(span, "gen_ai.request", dict),
                    response=_grouped(span, "gen_ai.response", dict),
                    tools=[],
                )
                if call["prompt"] or call["completion"]:
                    call["tools"] = list(self.get_tool_calls(span, children_by_parent.get(span.span_id, [])))
                    conversations += convert_to_openai_messages([call])
            except ValueError as error:
                unreadable.append(error)
        if unreadable:
            rollout_id = spans[0].rollout_id
            logger.warning(
                "%d calls of rollout '%s' are no conversation: %s", len(unreadable), rollout_id, unreadable[0]
            )
        return conversations


def _grouped(span: Span, prefix: str, kind: Callable[[], object]) -> Any:
    """What stands below a prefix, which must be of this kind; an empty one if nothing does."""
    found = group_genai_dict(span.attributes, prefix)
    if not found:
        return kind()
    if type(found) is not kind:
        wanted = "numbered" if kind is list else "named"
        raise ValueError(f"Attributes '{prefix}.*' of span '{span.span_id}' must be {wanted}; they are {found!r:.80}.")
    return found


# ---------------------------------------------------------------------- OpenAI's shapes


def _prompt_message(message: JsonMapping) -> ChatMessage:
    role = message.get("role")
    if role == "assistant" and "tool_calls" in message:
        calls = [_tool_call(call, call.get("arguments")) for call in _objects(message["tool_calls"], "A message")]
        said = _content_in_parts(message.get("content"))
        return {"role": "assistant", "content": said if said and _is_content(said) else None, "tool_calls": calls}
    if role not in _ROLES:
        raise ValueError(f"Message {message!r:.80} has the role {role!r}; OpenAI knows {', '.join(_ROLES)}.")
    content = _content_in_parts(message.get("content", ""))
    if not _is_content(content) and not (content is None and role == "assistant"):
        raise ValueError(f"Content of a {role} message must be text or a list of typed parts, not {content!r:.80}.")
    checked: ChatMessage = {"role": role, "content": content}
    if role == "tool":
        checked["tool_call_id"] = _text(message, "tool_call_id", "A tool message")
    return checked


def _joined(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """The messages, with calls of tools added to what the assistant said just before them.

    The responses API has what was said and each of the calls as items of their own. In a chat they are one message,
    after which all results must come.
    """
    joined: list[ChatMessage] = []
    for message in messages:
        before = joined[-1] if joined else {}
        if "tool_calls" in message and message["content"] is None and before.get("role") == "assistant":
            calls = [*before.get("tool_calls", []), *message["tool_calls"]]
            joined[-1] = {**before, "content": before["content"] or None, "tool_calls": calls}
        else:
            joined.append(message)
    return joined


def _completion_message(completion: JsonMapping, tools: Sequence[JsonMapping]) -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": completion.get("content")}
    if tools:
        message["tool_calls"] = [
            _tool_call({**_named(tool.get("call")), "name": tool.get("name")}, tool.get("parameters")) for tool in tools
        ]
    elif "tool_calls" in completion:
        calls = _objects(completion["tool_calls"], "A completion")
        message["tool_calls"] = [_tool_call(call, call.get("arguments")) for call in calls]
    return message


def _tool_call(call: JsonMapping, arguments: object) -> JsonObject:
    called = {"name": _text(call, "name", "A tool call"), "arguments": arguments}
    if not isinstance(arguments, str):
        called["arguments"] = json.dumps({} if arguments is None else arguments)
    return {"id": _text(call, "id", "A tool call"), "type": call.get("type", "function"), "function": called}


def _tool_definition(function: JsonMapping) -> JsonObject:
    parameters = function.get("parameters", {})
    described = {
        "name": _text(function, "name", "A tool definition"),
        "description": function.get("description", ""),
        "parameters": parsed(parameters, literals=False),
    }
    return {"type": "function", "function": described}


def _objects(values: object, what: str) -> list[JsonMapping]:
    """The entries of a list; ValueError if it is none, or one of them is no object."""
    if isinstance(values, list) and all(isinstance(value, Mapping) for value in values):
        return values
    raise ValueError(f"{what} has {values!r:.80} where a list of objects belongs.")


def _text(holder: JsonMapping, key: str, what: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{what} needs a text under '{key}', not {value!r}: {dict(holder)!r:.120}")
    return value


# ---------------------------------------------------------------------- content in parts


def _content_in_parts(content: object) -> object:
    """A list of parts, or the JSON of one, in OpenAI's form; any other content as it is."""
    parts = content
    if isinstance(content, str) and content.startswith("[{"):
        found = parsed(content)
        parts = found if isinstance(found, list) and all(map(_is_known, found)) else content
    return parts if not isinstance(parts, list) or not _is_content(parts) else [_part(part) for part in parts]


def _is_content(content: object) -> bool:
    """Whether it is text, or a list of parts that say what they are."""
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)
    return isinstance(content, str)


def _is_known(part: object) -> bool:
    return isinstance(part, Mapping) and _FIELD_OF.get(str(part.get("type")), "type") in part.keys() - {"type"}


def _part(part: JsonMapping) -> JsonObject:
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


def _image_url(part: JsonMapping) -> str | None:
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


def _named(value: object) -> JsonMapping:
    return value if isinstance(value, Mapping) else {}
