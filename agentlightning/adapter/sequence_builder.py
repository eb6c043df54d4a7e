"""Model calls become token sequences: a call that continues an earlier one is appended to it, any other begins anew.

A call continues a sequence if its prompt starts with every token of it. Agents weave several conversations at once, so
all sequences of the agent are considered, not only the last: the ends of sequences are kept by length and digest, and
one pass over a prompt finds those it starts with. A call that is appended costs only its new tokens.

Why a prompt does not continue the sequence before it is told by token ids, which alone are certain. Where the texts of
the messages were recorded they decide between a model's words that came back as other tokens and words that were
changed; where they were not, the place of the first difference does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.adapter.calls import genai_sections
from agentlightning.adapter.sequences import Break, BreakReason, FinishReason, SampledCall, TokenSequence
from agentlightning.types.tracer import Span

__all__ = ["ModelCall", "OpenSequence", "SequenceBuilder"]

Message = dict[str, Any]

_DIGEST_FACTOR = 1_000_003
_DIGEST_MASK = (1 << 61) - 1


@dataclass(frozen=True)
class ModelCall:
    """A call with its tokens."""

    span: Span
    agent_name: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_id: str | None = None
    logprobs: list[float | None] | None = None
    """One for each token of the response; None if they were not recorded."""
    weights_version: str | None = None
    reward: float | None = None
    finish_reason: FinishReason | None = None


@dataclass(eq=False)
class OpenSequence:
    """A sequence that may still grow."""

    number: int
    agent_name: str
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    weights_versions: list[str | None] = field(default_factory=list)
    calls: list[SampledCall] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    """The spans of the calls."""
    digest: int = 0

    def is_continued_by(self, prompt_ids: Sequence[int]) -> bool:
        length = len(self.token_ids)
        return length <= len(prompt_ids) and prompt_ids[:length] == self.token_ids

    def append(self, call: ModelCall) -> None:
        """Add what a call brings beyond the tokens that are here already, which its prompt starts with."""
        given = call.prompt_ids[len(self.token_ids) :]
        sampled = call.response_ids
        self.digest = _digest(self.digest, given, sampled)
        self.token_ids += given + sampled
        self.loss_mask += [0] * len(given) + [1] * len(sampled)
        self.logprobs += [None] * len(given)
        self.logprobs += [None] * len(sampled) if call.logprobs is None else call.logprobs
        self.weights_versions += [None] * len(given) + [call.weights_version] * len(sampled)
        end = len(self.token_ids)
        self.spans.append(call.span)
        self.calls.append(
            SampledCall(
                span_id=call.span.span_id,
                response_id=call.response_id,
                start=end - len(sampled),
                end=end,
                reward=call.reward,
                weights_version=call.weights_version,
                finish_reason=call.finish_reason,
            )
        )

    def finished(self) -> TokenSequence:
        return TokenSequence(
            agent_name=self.agent_name,
            token_ids=tuple(self.token_ids),
            loss_mask=tuple(self.loss_mask),
            logprobs=tuple(self.logprobs),
            weights_versions=tuple(self.weights_versions),
            calls=tuple(self.calls),
        )


class SequenceBuilder:
    """Takes calls in the order in which they were made."""

    def __init__(self) -> None:
        self.sequences: list[OpenSequence] = []
        self.breaks: list[Break] = []
        self._last_by_agent: dict[str, OpenSequence] = {}
        self._ends_by_agent: dict[str, _Ends] = {}

    def add(self, call: ModelCall) -> None:
        """Append the call to a sequence it continues, or begin a new one and say why."""
        ends = self._ends_by_agent.setdefault(call.agent_name, _Ends())
        last = self._last_by_agent.get(call.agent_name)
        if last is not None and last.is_continued_by(call.prompt_ids):
            sequence: OpenSequence | None = last
        else:
            sequence = ends.longest_open(call.prompt_ids)
        if sequence is None:
            sequence = self._begin(call, last, ends)
        else:
            ends.close(sequence)
        sequence.append(call)
        ends.open(sequence)
        self._last_by_agent[call.agent_name] = sequence

    def _begin(self, call: ModelCall, last: OpenSequence | None, ends: "_Ends") -> OpenSequence:
        sequence = OpenSequence(number=len(self.sequences), agent_name=call.agent_name)
        parted = None if last is None else divergence(last, call.span, call.prompt_ids)
        branched = ends.longest_closed(call.prompt_ids)
        if branched is not None and (parted is None or parted.reason is not BreakReason.RESAMPLED):
            self._note(BreakReason.BRANCHED, call, branched.sequence, branched.length)
        elif last is not None and parted is not None:
            self._note(parted.reason, call, last, parted.position)
        elif self.sequences:
            self._note(BreakReason.NEW_AGENT, call, self.sequences[-1], 0)
        self.sequences.append(sequence)
        return sequence

    def _note(self, reason: BreakReason, call: ModelCall, earlier: OpenSequence, position: int) -> None:
        tokens, prompt = earlier.token_ids, call.prompt_ids
        self.breaks.append(
            Break(
                reason=reason,
                sequence=len(self.sequences),
                earlier_sequence=earlier.number,
                position=position,
                span_id=call.span.span_id,
                previous_span_id=earlier.calls[-1].span_id,
                expected_token=tokens[position] if position < len(tokens) else None,
                found_token=prompt[position] if position < len(prompt) else None,
            )
        )


@dataclass(frozen=True)
class _End:
    """A point at which a sequence ended once, and from which it has gone on."""

    sequence: OpenSequence
    length: int


class _Ends:
    """Where the sequences of one agent end, and where they ended before they grew."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], list[OpenSequence]] = {}
        self._closed: dict[tuple[int, int], OpenSequence] = {}
        self._lengths: set[int] = set()
        self._shortest: int | None = None

    def open(self, sequence: OpenSequence) -> None:
        length = len(sequence.token_ids)
        self._open.setdefault((length, sequence.digest), []).append(sequence)
        self._lengths.add(length)
        self._shortest = length if self._shortest is None else min(self._shortest, length)

    def close(self, sequence: OpenSequence) -> None:
        """The sequence is about to grow."""
        key = (len(sequence.token_ids), sequence.digest)
        waiting = self._open[key]
        waiting.pop() if waiting[-1] is sequence else waiting.remove(sequence)
        self._closed[key] = sequence

    def longest_open(self, prompt_ids: list[int]) -> OpenSequence | None:
        """The longest sequence whose every token the prompt starts with; of equal ones, the newest."""
        for key in self._ends_within(prompt_ids):
            for sequence in reversed(self._open.get(key, ())):
                if sequence.is_continued_by(prompt_ids):
                    return sequence
        return None

    def longest_closed(self, prompt_ids: list[int]) -> _End | None:
        for key in self._ends_within(prompt_ids):
            sequence, length = self._closed.get(key), key[0]
            if sequence is not None and sequence.token_ids[:length] == prompt_ids[:length]:
                return _End(sequence, length)
        return None

    def _ends_within(self, prompt_ids: list[int]) -> Iterable[tuple[int, int]]:
        """Keys of the ends the prompt may start with, the longest first."""
        if self._shortest is None or len(prompt_ids) < self._shortest:
            return []
        keys: list[tuple[int, int]] = []
        digest = 0
        for length, token in enumerate(prompt_ids, 1):
            digest = (digest * _DIGEST_FACTOR + token) & _DIGEST_MASK
            if length in self._lengths:
                keys.append((length, digest))
        return reversed(keys)


def _digest(digest: int, *parts: Iterable[int]) -> int:
    """Continue the digest of a prefix over more tokens."""
    for part in parts:
        for token in part:
            digest = (digest * _DIGEST_FACTOR + token) & _DIGEST_MASK
    return digest


# ---------------------------------------------------------------------- why a sequence is not continued


@dataclass(frozen=True)
class Divergence:
    """Where two token lists part, and why."""

    reason: BreakReason
    position: int
    """How many tokens they share."""


def divergence(earlier: OpenSequence, span: Span, prompt_ids: Sequence[int]) -> Divergence:
    """Compare the prompt of a call with a sequence it does not continue."""
    tokens = earlier.token_ids
    position = _shared(tokens, prompt_ids)
    if position == len(prompt_ids):
        was_asked = any(call.start == position for call in earlier.calls)
        return Divergence(BreakReason.RESAMPLED if was_asked else BreakReason.CONTEXT_TRUNCATED, position)
    return Divergence(_reason(earlier, span, prompt_ids, position), position)


def _reason(earlier: OpenSequence, span: Span, prompt_ids: Sequence[int], position: int) -> BreakReason:
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


def _was_kept(earlier: OpenSequence, messages: Sequence[Message], position: int) -> bool:
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
