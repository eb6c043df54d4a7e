"""The end of an attempt is written once, also where the answer to it is lost."""

from typing import Any

from agentlightning.errors import StoreUnavailable
from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import Attempt, PromptTemplate


class LosesItsAnswer(InMemoryLightningStore):
    """Finishes an attempt, and says that it could not."""

    async def finish_attempt(self, *args: Any, **kwargs: Any) -> Attempt:  # type: ignore[override] # as it comes
        await super().finish_attempt(*args, **kwargs)
        raise StoreUnavailable("the answer was lost")


class Rewarded(LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return 1.0


async def test_spans_whose_arrival_was_not_confirmed_are_stored_once() -> None:
    store = LosesItsAnswer()
    runner = LitAgentRunner[Any](OtelTracer(instrument=False))
    prompt = PromptTemplate(template="x", engine="f-string")

    with runner.run_context(agent=Rewarded(), store=store):
        rollout = await runner.step("task", resources={"prompt": prompt})

    assert rollout.status == "succeeded"
    assert [span.name for span in await store.query_spans(rollout.rollout_id)] == ["agentlightning.reward"]
