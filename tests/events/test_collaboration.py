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


def crew(tasks: int, end: float | None = None) -> Span:
    return span("crew", attributes={"crewai.crew.tasks": tasks}, end=end)


def test_progress_counts_the_tasks_a_running_crew_has_not_begun() -> None:
    between = progress_of(subtasks([crew(2), task("look", "Looker", at=1)]))
    second = progress_of(subtasks([crew(2), task("look", "Looker", at=1), task("write", "Writer", at=2, end=None)]))

    assert (between.completed, between.total, between.open, between.fraction) == (1, 2, 0, 0.5)
    assert (second.completed, second.total, second.open, second.fraction) == (1, 2, 1, 0.5)
    assert progress_of(subtasks([crew(2)])).fraction == 0.0


def test_a_crew_that_has_ended_plans_nothing_more() -> None:
    assert [each.status for each in subtasks([crew(3, end=9.0), task("look", "Looker", failed=True)])] == ["failed"]


def test_hand_overs_come_in_order() -> None:
    spans = [
        span("b", at=2, attributes={"handoff.from_agent": "Clerk"}),
        span("a", at=1, attributes={"handoff.from_agent": "Triage", "handoff.to_agent": "Clerk"}),
    ]

    assert handovers(spans) == [Handover("Triage", "Clerk", 1.0), Handover("Clerk", None, 2.0)]


TEAM = "011986d7-238a-457c-ad69-2483af045cf5"


def turn(number: int, agent: str) -> list[Span]:
    """The turn of an agent of an AutoGen team, as AutoGen and its instrumentation write it."""
    manager, member = f"RoundRobinGroupChatManager_{TEAM}", f"{agent}_{TEAM}"
    given = {"sender_agent_type": manager, "recipient_agent_type": member, "messaging.operation": "process"}
    invoked = {"gen_ai.operation.name": "invoke_agent", "gen_ai.system": "autogen", "gen_ai.agent.name": agent}
    told = {"sender_agent_type": member, "recipient_agent_type": manager, "messaging.operation": "process"}
    return [
        span(f"p{number}", at=number, attributes=given),
        span(f"i{number}", f"p{number}", at=number + 0.1, attributes=invoked),
        span(f"m{number}", at=number + 0.2, attributes=told),
    ]


def test_a_turn_in_an_autogen_team_is_a_hand_over_by_the_one_before() -> None:
    spans = [*turn(1, "primary"), *turn(2, "critic"), *turn(3, "critic"), *turn(4, "primary")]
    assert handovers(spans) == [Handover("primary", "critic", 2.1), Handover("critic", "primary", 4.1)]


def test_a_turn_that_was_handed_over_is_told_once() -> None:
    explicit = span("h", at=1.5, attributes={"handoff.from_agent": "primary", "handoff.to_agent": "critic"})
    assert handovers([*turn(1, "primary"), explicit, *turn(2, "critic")]) == [Handover("primary", "critic", 1.5)]


def test_a_message_between_agents_of_autogen_is_a_hand_over() -> None:
    sent = {"sender_agent_type": "asker", "recipient_agent_type": "expert", "messaging.operation": "process"}
    assert handovers([span("m", at=1, attributes=sent)]) == [Handover("asker", "expert", 1.0)]


def test_a_chat_of_ag2_goes_to_and_fro() -> None:
    between = {"ag2.chat.sender": "user", "ag2.chat.recipient": "assistant"}
    spans = [
        span("chat", at=1, attributes=between),
        span("r1", "chat", at=2, attributes={"gen_ai.agent.name": "assistant"}),
        span("r2", "chat", at=3, attributes={"gen_ai.agent.name": "user"}),
        span("r3", "chat", at=4, attributes={"gen_ai.agent.name": "assistant"}),
    ]

    assert [(each.from_agent, each.to_agent) for each in handovers(spans)] == [
        ("user", "assistant"),
        ("assistant", "user"),
        ("user", "assistant"),
    ]


def test_a_trace_that_divides_nothing_has_neither() -> None:
    assert subtasks([span("a", "a")]) == []
    assert handovers([]) == []
