"""The embedded engine behind the proxy: whatever API an agent calls, its turns are one sequence that can be trained."""

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from agentlightning.adapter import TraceToTrajectory
from tests.engine.conftest import one_thread as one_thread
from tests.engine.scripted import ScriptedModel, calling, saying, serving
from tests.llm_proxy.proxied import MODEL, entry, proxied
from tests.llm_proxy.speakers import SPEAKERS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", SPEAKERS)
def test_turns_with_a_tool_are_one_sequence_with_log_probabilities(client: str, is_streaming: bool) -> None:
    model = ScriptedModel(calling("Oslo", before="I look."))
    with serving(model, name=MODEL) as served, proxied(entry(served.url, model_of=f"agl/{MODEL}")) as door:
        speaker = SPEAKERS[client](door, is_streaming=is_streaming)
        speaker.user("Weather?")
        first = speaker.turn()
        speaker.result(first.calls[0][0], "rain")
        model.script = saying("It rains.")
        second = speaker.turn()
        (sequence,) = TraceToTrajectory().adapt(door.spans()).sequences

    assert (first.text, [call[1:] for call in first.calls]) == ("I look.", [("weather", {"city": "Oslo"})])
    assert second.text == "It rains."
    assert list(sequence.sampled_ids) == [*calling("Oslo", before="I look."), *saying("It rains.")]
    chosen = [value for value, is_chosen in zip(sequence.logprobs, sequence.loss_mask, strict=True) if is_chosen]
    assert None not in chosen
    assert [call.weights_version for call in sequence.calls] == ["0", "0"]
    assert [call.finish_reason for call in sequence.calls] == ["tool_calls", "stop"]
