"""Model calls become token sequences: a call that continues an earlier one is appended to it, any other begins anew.

A call continues a sequence if its prompt starts with every token of it. Agents hold several conversations at once, so
all sequences of the agent are considered, not only the last: the ends of sequences are kept by length and digest, and
one pass over a prompt finds those it starts with. A call that is appended costs only its new tokens.

Why a prompt does not continue the sequence before it is told by token ids, which alone are certain. Where the texts of
the messages were recorded they decide between a model's words that came back as other tokens and words that were
changed; where they were not, the place of the first difference does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentlightning.adapter.call_attributes import logprobs_of, messages_of, weights_version_of
from agentlightning.adapter.calls import ANY_AGENT, ModelCall
from agentlightning.adapter.sequences import Break, BreakReason, SampledCall, TokenSequence
from agentlightning.types.tracer import Span

_DIGEST_FACTOR = 1_000_003
_DIGEST_MASK = (1 << 61) - 1


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

    def append(self, call: ModelCall) -> None:
        """Add what a call brings beyond the tokens that are here already, which its prompt starts with."""
        given, sampled = call.prompt_ids[len(self.token_ids) :], call.response_ids
        logprobs = logprobs_of(call.whole.attributes, len(sampled))
        version = weights_version_of(call.whole.attributes)
        for token in (*given, *sampled):
            self.digest = (self.digest * _DIGEST_FACTOR + token) & _DIGEST_MASK
        self.token_ids += given + sampled
        self.loss_mask += [0] * len(given) + [1] * len(sampled)
        self.logprobs += [None] * len(given)
        self.logprobs += [None] * len(sampled) if logprobs is None else logprobs
        self.weights_versions += [None] * len(given) + [version] * len(sampled)
        end = len(self.token_ids)
        self.spans.append(call.span)
        self.calls.append(
            SampledCall(
                span_id=call.span.span_id,
                response_id=call.response_id,
                start=end - len(sampled),
                end=end,
                reward=call.reward,
                weights_version=version,
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
        agent = call.agent_name or ANY_AGENT
        ends, last = self._ends_by_agent.setdefault(agent, _Ends()), self._last_by_agent.get(agent)
        prompt_ids = call.prompt_ids
        if last is not None and last.token_ids == prompt_ids[: len(last.token_ids)]:
            sequence = last
        else:
            end = None if last is None else ends.longest(prompt_ids, is_open=True)
            sequence = self._begin(call, last, ends) if end is None else end.sequence
        sequence.append(call)
        ends.add(sequence)
        self._last_by_agent[agent] = sequence

    def _begin(self, call: ModelCall, last: OpenSequence | None, ends: "_Ends") -> OpenSequence:
        if last is not None:
            position = _shared(last.token_ids, call.prompt_ids)
            reason = _break_reason(last, call, position)
            branch = None if reason is BreakReason.RESAMPLED else ends.longest(call.prompt_ids, is_open=False)
            if branch is None:
                self._note(reason, call, last, position)
            else:
                self._note(BreakReason.BRANCHED, call, branch.sequence, branch.length)
        elif self.sequences:
            self._note(BreakReason.NEW_AGENT, call, self.sequences[-1], 0)
        sequence = OpenSequence(number=len(self.sequences), agent_name=call.agent_name or ANY_AGENT)
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
    """A point at which a sequence ends, or ended before it grew."""

    sequence: OpenSequence
    length: int


class _Ends:
    """Where the sequences of one agent end, and where they ended before they grew."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[int, int], list[_End]] = {}
        """By length and digest."""
        self._lengths: set[int] = set()
        self._shortest: float = float("inf")

    def add(self, sequence: OpenSequence) -> None:
        end = _End(sequence, len(sequence.token_ids))
        self._by_key.setdefault((end.length, sequence.digest), []).append(end)
        self._lengths.add(end.length)
        self._shortest = min(self._shortest, end.length)

    def longest(self, prompt_ids: list[int], *, is_open: bool) -> _End | None:
        """The longest end that the prompt starts with, of equal ones the newest; an open one has not been continued."""
        if len(prompt_ids) < self._shortest:
            return None
        keys: list[tuple[int, int]] = []
        digest = 0
        for length, token in enumerate(prompt_ids, 1):
            digest = (digest * _DIGEST_FACTOR + token) & _DIGEST_MASK
            if length in self._lengths:
                keys.append((length, digest))
        for key in reversed(keys):
            for end in reversed(self._by_key.get(key, ())):
                tokens = end.sequence.token_ids
                if (end.length == len(tokens)) is is_open and tokens[: end.length] == prompt_ids[: end.length]:
                    return end
        return None


# ---------------------------------------------------------------------- why a sequence is not continued


def _break_reason(earlier: OpenSequence, call: ModelCall, position: int) -> BreakReason:
    """Why a prompt that shares so many tokens with a sequence does not continue it."""
    prompt_ids = call.prompt_ids
    if position == len(prompt_ids):
        was_asked = any(sampled.start == position for sampled in earlier.calls)
        return BreakReason.RESAMPLED if was_asked else BreakReason.CONTEXT_TRUNCATED
    messages = messages_of(call.span.attributes, "prompt")
    if _occurs(earlier.token_ids[position:], prompt_ids[position + 1 :]):
        # Without texts nobody knows whose words were put in; tools are what does it.
        is_tool = not messages or any(message.get("role") == "tool" for message in messages)
        return BreakReason.TOOL_OUTPUT_INSERTED if is_tool else BreakReason.CONTEXT_EDITED
    if earlier.loss_mask[position]:
        number = next(i for i, sampled in enumerate(earlier.calls) if sampled.start <= position < sampled.end)
        sampled_texts = [
            message.get("content") for message in messages_of(earlier.spans[number].attributes, "completion")
        ]
        texts = [message.get("content") for message in messages]
        is_kept = not sampled_texts or not texts or sampled_texts[0] in texts
        return BreakReason.RETOKENISED if is_kept else BreakReason.CONTEXT_EDITED
    first, last = earlier.calls[0], earlier.calls[-1]
    if position < first.start and not _occurs(earlier.token_ids[last.start : last.end], prompt_ids):
        return BreakReason.NEW_CONVERSATION
    return BreakReason.CONTEXT_EDITED


def _shared(one: Iterable[int], other: Sequence[int]) -> int:
    """Length of the common beginning of two lists, of which the first does not begin the second."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def _occurs(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether one list is a contiguous part of the other; text search is quicker than comparing at each place."""
    if not part or len(part) > len(whole):
        return False
    return f",{','.join(map(str, part))}," in f",{','.join(map(str, whole))},"
