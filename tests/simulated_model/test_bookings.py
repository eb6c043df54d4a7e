"""Booking tasks: what they need, how they are read, and what is right."""

import json
from collections import Counter
from itertools import combinations

import pytest

from tests.simulated_model.bookings import ALL_RULES, Rule, cases_of, make_tasks, request_of, without_cases
from tests.simulated_model.phrases import FINDINGS, PHRASINGS, rules_in
from tests.simulated_model.server import SEED_PROMPT

TASKS = make_tasks(50, seed=1)


def test_tasks_need_rules_in_the_promised_shares() -> None:
    assert Counter(len(task.needs) for task in TASKS) == {0: 15, 1: 30, 2: 5}
    assert set(Counter(rule for task in TASKS if len(task.needs) == 1 for rule in task.needs).values()) == {6}


def test_tasks_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    assert make_tasks(50, seed=1) == TASKS
    assert {task.text for task in make_tasks(50, seed=2)}.isdisjoint(task.text for task in TASKS)


@pytest.mark.parametrize("size", range(len(Rule) + 1))
def test_who_knows_the_needed_rules_is_right_and_nobody_else(size: int) -> None:
    for rules in combinations(Rule, size):
        for task in TASKS:
            (case,) = cases_of(task.text)

            assert task.score(str(case.answered(rules))) == (task.needs <= set(rules))


def test_conversation_is_read_from_json_as_from_plain_text() -> None:
    (case,) = cases_of(TASKS[0].text)
    said = str(case.answered(()))

    plain = cases_of(f"{TASKS[0].text}\n\n{said}")
    quoted = cases_of(json.dumps(json.dumps([{"content": f"Hi\n{TASKS[0].text}"}, {"content": said}])))

    assert plain == quoted
    assert plain[0].answer == case.answered(())
    assert (plain[0].request, plain[0].rooms) == (case.request, case.rooms)


def test_answers_that_stand_before_their_requests_are_read_too() -> None:
    spans = []
    for task in TASKS[:3]:
        (case,) = cases_of(task.text)
        spans.append({"completion": str(case.answered(ALL_RULES)), "prompt": task.text})

    read = cases_of(json.dumps(spans))

    assert [str(case.answer) for case in read] == [task.answer for task in TASKS[:3]]


@pytest.mark.parametrize("rule", Rule)
def test_answer_without_a_rule_is_seen_to_break_it(rule: Rule) -> None:
    task = next(task for task in TASKS if task.needs == {rule})
    (case,) = cases_of(task.text)

    (failed,) = cases_of(f"{task.text}\n{case.answered(ALL_RULES - {rule})}")

    assert failed.broken_rules() == [rule]


def test_right_answer_breaks_no_rule() -> None:
    assert all(cases_of(f"{task.text}\n{task.answer}")[0].broken_rules() == [] for task in TASKS)


def test_greeting_is_wrong_by_sms_alone() -> None:
    by_sms = next(task for task in TASKS if task.needs == {Rule.BRIEF})
    by_mail = next(task for task in TASKS if not task.needs)

    assert by_mail.score(f"Hello!\n{by_mail.answer}") == 1.0
    assert by_sms.score(f"Hello!\n{by_sms.answer}") == 0.0
    assert by_sms.score(by_sms.answer) == 1.0


def test_request_is_read_without_its_rooms() -> None:
    assert cases_of(TASKS[0].request) == []
    assert request_of(TASKS[0].request) == cases_of(TASKS[0].text)[0].request
    assert request_of("What is the time?") is None


def test_tasks_say_no_rule_by_themselves() -> None:
    assert {rules_in(task.text) for task in TASKS} == {frozenset()}
    assert without_cases(TASKS[0].text).strip() == ""


# ---------------------------------------------------------------------- phrases


@pytest.mark.parametrize(
    ("rule", "phrase"), [(rule, phrase) for rule, several in PHRASINGS.items() for phrase in several]
)
def test_phrasing_says_its_rule_and_no_other(rule: Rule, phrase: str) -> None:
    assert rules_in(phrase) == {rule}


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("Do not double-book.", {Rule.FREE}),
        ("Feel free to ask.", set()),
        ("A step-free room.", set()),
        ("The room must have all it needs.", {Rule.EQUIPMENT}),
        ("Use military time. NO GREETINGS.", {Rule.CLOCK, Rule.BRIEF}),
        ("Pick the room with the least empty seats that is vacant.", {Rule.SMALLEST, Rule.FREE}),
        (SEED_PROMPT, set()),
    ],
)
def test_rules_are_recognised_in_other_words(text: str, rules: set[Rule]) -> None:
    assert rules_in(text) == rules


def test_findings_of_the_critic_say_no_rule() -> None:
    assert all(rules_in(finding) == frozenset() for finding in FINDINGS.values())
