"""Answers of OpenAI's chat and completions dialects, with vLLM's fields for token ids."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from agentlightning.engine.calls import Call, Choice
from agentlightning.engine.codec import ChatCodec, Message
from agentlightning.engine.generation import FinishReason, Generation

__all__ = ["Answers", "RemembersTurns", "finish_of", "usage_of"]

_FINISHES: Final[Mapping[FinishReason, str]] = {"stop": "stop", "length": "length", "cancelled": "stop"}


@runtime_checkable
class RemembersTurns(Protocol):
    """A codec whose text does not always lead back to the tokens it came from."""

    def remember(self, prompt_ids: Sequence[int], token_ids: Sequence[int], message: Message) -> None:
        """Keep what was sampled after a prompt; `message` is how the client got it, and will send it back."""
        ...


def finish_of(reason: FinishReason, *, calls_tools: bool) -> str:
    """OpenAI's word for why an answer ended."""
    return "tool_calls" if calls_tools and reason == "stop" else _FINISHES[reason]


def usage_of(call: Call) -> dict[str, int]:
    """A prompt counts once, however many choices it has."""
    prompt = sum(len(one) for one in call.asked.prompts)
    sampled = sum(len(choice.generation.token_ids) for choice in call.choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


class Answers:
    """Writes the answers of one model."""

    def __init__(self, model_name: str, codec: ChatCodec) -> None:
        self.model_name = model_name
        self.codec = codec
        self._memory = codec if isinstance(codec, RemembersTurns) else None
        self._names: dict[int, tuple[str, list[int]]] = {}  # what tokens are called, and their bytes

    def whole(self, call: Call) -> dict[str, Any]:
        """The answer to a call that is complete; raises what its generations raise."""
        is_chat = call.asked.dialect == "chat"
        generations = [choice.generation for choice in call.choices]
        first = min(generation.weights_version for generation in generations)
        last = max(generation.last_weights_version or generation.weights_version for generation in generations)
        answer = self.head(call, "chat.completion" if is_chat else "text_completion")
        answer["choices"] = [self._choice(call, choice) for choice in call.choices]
        answer["usage"] = usage_of(call)
        answer["weights_version"] = first
        if last != first:
            answer["last_weights_version"] = last
        if call.asked.wants_ids and is_chat:
            answer["prompt_token_ids"] = call.asked.prompts[0]
        return answer

    def head(self, call: Call, kind: str) -> dict[str, Any]:
        """The fields that answers and chunks have in common."""
        prefix = "chatcmpl" if call.asked.dialect == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
        }

    def remember(self, choice: Choice, message: Message) -> None:
        """Have the codec keep what was sampled, where it has to, so that the next turn begins with these tokens."""
        if self._memory is not None:
            self._memory.remember(choice.prompt, choice.generation.token_ids, message)

    def logprobs(self, call: Call, generation: Generation, start: int = 0, end: int | None = None) -> Any:
        """Those of some of the tokens of a generation; None where they were not asked for."""
        if not call.asked.wants_logprobs:
            return None
        tops = None if generation.top_logprobs is None else generation.top_logprobs[start:end]
        return self.logprobs_of(call, generation.token_ids[start:end], generation.logprobs[start:end], tops)

    def logprobs_of(
        self,
        call: Call,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[Mapping[int, float]] | None,
    ) -> dict[str, Any]:
        if call.asked.dialect == "chat":
            entries = [self._entry(one, logprob) for one, logprob in zip(token_ids, logprobs, strict=True)]
            for number, entry in enumerate(entries):
                alternatives = {} if tops is None else tops[number]
                entry["top_logprobs"] = [self._entry(*alternative) for alternative in alternatives.items()]
            return {"content": entries, "refusal": None}
        names = [self._name(token_id)[0] for token_id in token_ids]
        offsets, place = [], 0
        for name in names:
            offsets.append(place)
            place += len(name)
        return {
            "tokens": names,
            "token_logprobs": list(logprobs),
            "top_logprobs": None if tops is None else [{self._name(i)[0]: p for i, p in top.items()} for top in tops],
            "text_offset": offsets,
        }

    # ------------------------------------------------------------------ parts

    def _choice(self, call: Call, choice: Choice) -> dict[str, Any]:
        generation = choice.generation
        answer: dict[str, Any] = {"index": choice.number}
        is_cut = choice.speech is not None and choice.speech.is_stopped
        if call.asked.dialect == "chat":
            parsed = self.codec.parse(generation.token_ids, call.asked.tools)
            answer["message"] = parsed.as_message()
            if is_cut:
                answer["message"]["content"] = "".join(choice.text)
            self.remember(choice, answer["message"])
            answer["finish_reason"] = finish_of(generation.finish_reason, calls_tools=bool(parsed.tool_calls))
        else:
            answer["text"] = "".join(choice.text) if is_cut else self.codec.decode(generation.token_ids)
            answer["finish_reason"] = finish_of(generation.finish_reason, calls_tools=False)
            if call.asked.wants_ids:
                answer["prompt_token_ids"] = choice.prompt
        answer["logprobs"] = self.logprobs(call, generation)
        if call.asked.wants_ids:
            answer["token_ids"] = generation.token_ids
        return answer

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        name, content = self._name(token_id)
        return {"token": name, "logprob": logprob, "bytes": content}

    def _name(self, token_id: int) -> tuple[str, list[int]]:
        known = self._names.get(token_id)
        if known is None:
            name = self.codec.token_text(token_id)
            known = self._names[token_id] = name, list(name.encode("utf-8", "replace"))
        return known
