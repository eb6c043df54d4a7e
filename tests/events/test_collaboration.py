"""How agents worked together, read from the spans of frameworks that divide work."""

from typing import Any

from agentlightning.events import Handover, Progress, handovers, progress_of, subtasks
from agentlightning.types import Span, TraceStatus


def span(span_id: str, parent: str | None = None, *, at: float = 0.0, end: float | None = 9.0, **options: Any) -> Span:
    status = TraceStatus(status_code="ERROR" if options.pop("failed", False) else "UNSET")
    made = Span.from_attributes(
        name=options.pop("name", span_id),
        attributes=options.pop("attributes", {}),
        span_id=span_id,
        parent_id=parent,
        start_time=at,
        status=status,
    )
    return made.model_copy(update={"end_time": end})


def task(span_id: str, role: str, **options: Any) -> Span:
    attributes = {
        "crewai.task.id": f"t-{span_id}",
        "crewai.task.description": f"do {span_id}",
        "crewai.task.agent_role": role,
        **options.pop("more", {}),
    }
    return span(span_id, "crew", attributes=attributes, **options)


def test_tasks_of_a_crew_tell_their_role_status_and_rewards() -> None:
    spans = [
        span("crew"),
        task("write", "Writer", at=2, more={"crewai.task.name": "write", "crewai.task.output": "text"}),
        task("look", "Looker", at=1, failed=True),
        task("check", "Critic", at=3, end=None),
        span("agent", "write", at=2.1),
        span("r1", "agent", at=2.2, name="agentlightning.reward", attributes={"reward": 0.5}),
        span("r2", "write", at=2.3, name="agentlightning.reward", attributes={"reward": 1.0}),
    ]

    look, write, check = subtasks(spans)

    assert [(t.name, t.agent, t.status) for t in (look, write, check)] == [
        ("t-look", "Looker", "failed"),
        ("write", "Writer", "completed"),
        ("t-check", "Critic", "open"),
    ]
    assert (write.output, write.rewards.values) == ("text", (0.5, 1.0))
    assert progress_of([look, write, check]) == Progress(started=3, completed=1, failed=1)
    assert progress_of([look, write, check]).open == 1


def test_hand_overs_come_in_order() -> None:
    spans = [
        span("b", at=2, attributes={"handoff.from_agent": "Clerk"}),
        span("a", at=1, attributes={"handoff.from_agent": "Triage", "handoff.to_agent": "Clerk"}),
    ]

    assert handovers(spans) == [Handover("Triage", "Clerk", 1.0), Handover("Clerk", None, 2.0)]


def test_a_trace_that_divides_nothing_has_neither() -> None:
    assert subtasks([span("a", "a")]) == []
    assert handovers([]) == []
