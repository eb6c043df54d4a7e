"""Runs as a training leaves them in a store, written by hand: rollouts in groups, their calls and rewards, metrics."""

from dataclasses import dataclass, field
from typing import Any

from agentlightning.algorithm.batches import Batches
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Run, Span, TraceStatus


@dataclass
class Recorded:
    """One run in a store of its own."""

    store: InMemoryLightningStore = field(default_factory=InMemoryLightningStore)
    run_id: str = "run-1"
    _spans: int = 0

    async def begin(self) -> "Recorded":
        await self.store.start_run("GRPO", run_id=self.run_id)
        return self

    async def group(
        self,
        rewards: list[float | None],
        *,
        step: int = 0,
        task: Any = None,
        answers: list[list[int]] | None = None,
        status: str = "succeeded",
        error: str | None = None,
        finish: str = "stop",
        calls: int = 1,
        ids: bool = True,
        call_error: str | None = None,
        mode: Any = "train",
        agent: str | None = None,
    ) -> None:
        """A group of siblings, each with its reward and its answer; by default every answer is another one."""
        of_agent = {} if agent is None else {"gen_ai.agent.name": agent}
        metadata = {"step": step, "run_id": self.run_id}
        task = f"task of step {step}, {self._spans}" if task is None else task
        await Batches(self.store).send([task], copies=len(rewards), mode=mode, metadata=metadata)
        for number, reward in enumerate(rewards):
            claimed = await self.store.dequeue_rollout()
            assert claimed is not None
            owner = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
            for _ in range(calls):
                answer = [10 + self._spans, 11] if answers is None else answers[number]
                await self.store.add_span(self._call(owner, answer if ids else None, finish, call_error))
            if reward is not None:
                await self.store.add_span(self._span(owner, "agentlightning.reward", {"reward": reward, **of_agent}))
            noted = None if error is None else {"error": dict(zip(("type", "message"), error.split(": "), strict=True))}
            await self.store.update_attempt(*owner.values(), status=status, metadata=noted)  # type: ignore[arg-type]

    async def metrics(self, *points: dict[str, float]) -> None:
        for step, values in enumerate(points):
            await self.store.add_metrics(self.run_id, step, values)

    async def end(self, summary: dict[str, Any] | None = None, status: Any = "succeeded") -> Run:
        return await self.store.finish_run(self.run_id, status, summary=summary or {})

    def _call(self, owner: dict[str, str], answer: list[int] | None, finish: str, error: str | None) -> Span:
        ids = {} if answer is None else {"prompt_token_ids": [1, 2, 3], "response_token_ids": answer}
        said = {} if error is not None else {"gen_ai.response.id": f"r{self._spans}", **ids}
        attributes = {**said, "gen_ai.completion.0.finish_reason": finish, "agentlightning.proxy.http_status": 429}
        status = TraceStatus(status_code="UNSET" if error is None else "ERROR", description=error)
        return self._span(owner, "litellm_request", attributes, status=status)

    def _span(self, owner: dict[str, str], name: str, attributes: dict[str, Any], **fields: Any) -> Span:
        self._spans += 1
        return Span.from_attributes(
            attributes=attributes,
            name=name,
            sequence_id=self._spans,
            span_id=f"{self._spans:016x}",
            trace_id=f"{1:032x}",
            start_time=float(self._spans),
            end_time=self._spans + 0.5,
            **owner,
            **fields,
        )


def learned(
    *, reward: float = 0.5, entropy: float = 1.0, kl: float = 0.01, low: float = 0.0, high: float = 1.0, **more: float
) -> dict[str, float]:
    """The metrics of a step from which something was learned."""
    figures = {"reward/mean": reward, "reward/min": low, "reward/max": high, "rollouts/all": 8.0, "samples/used": 8.0}
    learner = {"loss": 0.1, "entropy": entropy, "kl_to_old": kl, "update_kl": kl, "learning_rate": 1e-5}
    return {**figures, **{f"learner/{name}": value for name, value in learner.items()}, **more}
