"""Why the prompt of a call does not start with the tokens of the sequence before it.

Only token ids are certain. Where the texts of the messages were recorded they decide between a model's words that came
back as other tokens and words that were changed; where they were not, the place of the first difference does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentlightning.adapter.calls import genai_sections
from agentlightning.adapter.sequences import BreakReason
from agentlightning.types.tracer import Span

if TYPE_CHECKING:
    from agentlightning.adapter.sequence_builder import OpenSequence

__all__ = ["Divergence", "divergence"]

Message = dict[str, Any]


@dataclass(frozen=True)
class Divergence:
    """Where two token lists part, and why."""

    reason: BreakReason
    position: int
    """How many tokens they share."""


def divergence(earlier: "OpenSequence", span: Span, prompt_ids: Sequence[int]) -> Divergence:
    """Compare the prompt of a call with a sequence it does not continue."""
    tokens = earlier.token_ids
    position = _shared(tokens, prompt_ids)
    if position == len(prompt_ids):
        was_asked = any(call.start == position for call in earlier.calls)
        return Divergence(BreakReason.RESAMPLED if was_asked else BreakReason.CONTEXT_TRUNCATED, position)
    return Divergence(_reason(earlier, span, prompt_ids, position), position)


def _reason(earlier: "OpenSequence", span: Span, prompt_ids: Sequence[int], position: int) -> BreakReason:
    """The tokens differ at a position that both have."""
    messages = _messages(span, "prompt")
    if _occurs(earlier.token_ids[position:], prompt_ids[position + 1 :]):
        # Without texts nobody knows whose words were put in; tools are what does it.
        is_tool = not messages or any(message.get("role") == "tool" for message in messages)
        return BreakReason.TOOL_OUTPUT_INSERTED if is_tool else BreakReason.CONTEXT_EDITED
    if earlier.loss_mask[position]:
        return BreakReason.RETOKENISED if _was_kept(earlier, messages, position) else BreakReason.CONTEXT_EDITED
    first, last = earlier.calls[0], earlier.calls[-1]
    if position < first.start and not _occurs(earlier.token_ids[last.start : last.end], prompt_ids):
        return BreakReason.NEW_CONVERSATION
    return BreakReason.CONTEXT_EDITED


def _was_kept(earlier: "OpenSequence", messages: Sequence[Message], position: int) -> bool:
    """Whether the words at a position are still in the prompt; True if nobody recorded words."""
    number = next(i for i, call in enumerate(earlier.calls) if call.start <= position < call.end)
    said = [message.get("content") for message in _messages(earlier.spans[number], "completion")]
    texts = [message.get("content") for message in messages]
    return not said or not texts or said[0] in texts


def _messages(span: Span, section: str) -> list[Message]:
    found = genai_sections(span.attributes).get(section, [])
    return [message for message in found if isinstance(message, dict)] if isinstance(found, list) else []


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _occurs(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether one list is a contiguous part of the other; text search is quicker than comparing at each place."""
    if not part or len(part) > len(whole):
        return False
    return f",{','.join(map(str, part))}," in f",{','.join(map(str, whole))},"
