"""The simulated model over HTTP: scores follow the prompt, and what it says as an optimiser leads upwards."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

import agentlightning
from agentlightning.algorithm.prompts import poml
from tests.simulated_model.asking import FULL_PROMPT, REFLECTION_REQUEST, Asker
from tests.simulated_model.bookings import Rule, Task, cases_of, make_tasks
from tests.simulated_model.optimiser import (
    EDIT_FAULTS,
    NO_PROMPT,
    NONSENSE,
    NOTHING_TO_SAY,
    RAMBLING,
    criticise,
    edit,
    kind_of,
    spoilt,
)
from tests.simulated_model.phrases import ADVICE, PHRASINGS, rules_in
from tests.simulated_model.server import MODEL, NO_REQUEST, SEED_PROMPT, SimulatedModel

TASKS = make_tasks(50)
MOST_STEPS = 25
"""Of the way up; most seeds need fewer."""
APO_PROMPTS = Path(agentlightning.__file__).parent / "algorithm" / "prompts" / "files"
TOOL = {
    "type": "function",
    "function": {
        "name": "list_rooms",
        "parameters": {"type": "object", "properties": {"people": {"type": "integer"}, "start": {"type": "string"}}},
    },
}


# ---------------------------------------------------------------------- the assistant


def test_seed_prompt_scores_low_and_full_prompt_high(simulated_model: SimulatedModel) -> None:
    with Asker(simulated_model) as asker:
        assert 0.2 < asker.score(SEED_PROMPT, TASKS) < 0.4
        assert asker.score(FULL_PROMPT, TASKS) > 0.95


@pytest.mark.parametrize("number", range(3))
def test_every_phrasing_of_the_rules_scores_high(number: int) -> None:
    prompt = SEED_PROMPT + "".join(f"\n{phrasings[number]}." for phrasings in PHRASINGS.values())

    with SimulatedModel(noise=0.0) as model, Asker(model) as asker:
        assert asker.score(prompt, TASKS) == 1.0


@pytest.mark.parametrize("rule", Rule)
def test_score_is_the_share_of_tasks_whose_rules_are_told(rule: Rule) -> None:
    known = sum(task.needs <= {rule} for task in TASKS) / len(TASKS)

    with SimulatedModel(noise=0.0) as model, Asker(model) as asker:
        assert asker.score(f"{SEED_PROMPT}\n{PHRASINGS[rule][1]}.", TASKS) == known == pytest.approx(0.42)


def test_noise_makes_right_answers_wrong() -> None:
    with SimulatedModel(noise=0.3) as model, Asker(model) as asker:
        assert 0.5 < asker.score(FULL_PROMPT, TASKS) < 0.9


def test_rambling_prompt_distracts() -> None:
    with SimulatedModel(noise=0.0) as model, Asker(model) as asker:
        assert 0.5 < asker.score(f"{FULL_PROMPT}\n{RAMBLING}", TASKS) < 0.9


def test_prompt_without_the_request_gets_no_room(simulated_model: SimulatedModel) -> None:
    with Asker(simulated_model) as asker:
        assert asker.say(FULL_PROMPT.replace("{request}", "the request")) == NO_REQUEST


def test_rules_may_stand_in_the_system_prompt() -> None:
    task = next(task for task in TASKS if task.needs == {Rule.FREE})
    messages = [
        {"role": "system", "content": "Never offer rooms that are taken."},
        {"role": "user", "content": task.text},
    ]

    with SimulatedModel(noise=0.0) as model, Asker(model) as asker:
        told = asker.post(messages).json()["choices"][0]["message"]["content"]

    assert task.score(told) == 1.0


def test_tool_is_asked_for_rooms_that_are_missing() -> None:
    task = next(task for task in TASKS if task.needs == {Rule.SMALLEST})
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Take the smallest room.\n{task.request}"}]

    with SimulatedModel(noise=0.0) as model, openai.OpenAI(base_url=model.url, api_key="any") as client:
        create: Any = client.chat.completions.create
        first = create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
        (call,) = first.tool_calls
        messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": task.rooms}]
        last = create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message

    (case,) = cases_of(task.text)
    assert (call.function.name, last.tool_calls) == ("list_rooms", None)
    assert json.loads(call.function.arguments) == {"people": case.request.people, "start": case.request.start}
    assert task.score(last.content) == 1.0


def test_answers_do_not_depend_on_the_order_of_callers() -> None:
    texts = [SEED_PROMPT.format(request=task.text) for task in TASKS[:10]] * 3

    def answers(workers: int) -> list[str]:
        with SimulatedModel(noise=0.5) as model, ThreadPoolExecutor(workers) as pool, Asker(model) as asker:
            return sorted(pool.map(asker.say, texts))

    assert answers(1) == answers(8)


def test_other_seeds_and_second_tries_have_other_chances() -> None:
    text = FULL_PROMPT.format(request=TASKS[0].text)

    rows = []
    for seed in (1, 2):
        with SimulatedModel(seed, noise=0.5) as model, Asker(model) as asker:
            rows.append([asker.say(text) for _ in range(20)])

    assert len(set(rows[0])) > 1
    assert rows[0] != rows[1]


# ---------------------------------------------------------------------- the optimiser


def rendered(template: Path, context: dict[str, Any]) -> str:
    """What a model is sent, a message a line."""
    return "\n".join(message["content"] for message in poml.poml(template, context=context)["messages"])


def failing(rule: Rule) -> list[Task]:
    return [task for task in TASKS if task.needs == {rule}][:2]


@pytest.mark.parametrize("rule", Rule)
def test_critic_names_the_rule_that_failed_cases_lack_and_the_editor_adds_it(rule: Rule) -> None:
    with SimulatedModel(noise=0.0) as model, Asker(model) as asker:
        critique = asker.criticise(SEED_PROMPT, failing(rule))
        edited = asker.edit(SEED_PROMPT, critique)
        kinds = {kind: len(model.requests_for(kind)) for kind in ("answer", "critique", "edit", "reflect")}

    assert rules_in(critique) == rules_in(edited) == {rule}
    assert "{request}" in edited
    assert edited.format(request="x").count("Room: <name>") == 1
    assert kinds == {"answer": 2, "critique": 1, "edit": 1, "reflect": 0}


def test_critic_is_content_with_right_answers() -> None:
    with SimulatedModel(noise=0.0) as model, Asker(model) as asker:
        critique = asker.criticise(FULL_PROMPT, TASKS[:8])

        assert critique == NOTHING_TO_SAY
        assert asker.edit(FULL_PROMPT, critique) == FULL_PROMPT


def test_critic_does_not_name_rules_that_the_prompt_has() -> None:
    with SimulatedModel(noise=0.9) as model, Asker(model) as asker:
        assert asker.criticise(FULL_PROMPT, TASKS[:20]) == NOTHING_TO_SAY


def test_editor_fixes_one_point_if_told_so(simulated_model: SimulatedModel) -> None:
    critique = f"- {ADVICE} {PHRASINGS[Rule.CLOCK][0]}.\n- {ADVICE} {PHRASINGS[Rule.FREE][2]}."

    with Asker(simulated_model) as asker:
        assert rules_in(asker.edit(SEED_PROMPT, critique)) == {Rule.CLOCK, Rule.FREE}
        assert rules_in(asker.edit(SEED_PROMPT, critique, "Fix exactly one point.")) == {Rule.CLOCK}


def test_editor_ends_the_rambling_of_another(simulated_model: SimulatedModel) -> None:
    with Asker(simulated_model) as asker:
        edited = asker.edit(f"{FULL_PROMPT}\n{RAMBLING}", NOTHING_TO_SAY)

    assert len(edited.split()) < len(FULL_PROMPT.split()) + 30
    assert rules_in(edited) == set(Rule)


def test_editor_without_a_useful_critique_leaves_the_prompt(simulated_model: SimulatedModel) -> None:
    with Asker(simulated_model) as asker:
        assert asker.edit(SEED_PROMPT, NONSENSE) == SEED_PROMPT
        assert asker.say("Rewrite it as the critique says.") == NO_PROMPT


@pytest.mark.parametrize("prompt", [SEED_PROMPT, "# Task\n\nBook.\n\n## Request\n\n{request}"])
def test_editor_finds_the_prompt_between_tags(simulated_model: SimulatedModel, prompt: str) -> None:
    text = f"Apply the critique.\n<prompt_template>\n{prompt}\n</prompt_template>\n{ADVICE} take the smallest room."

    with Asker(simulated_model) as asker:
        edited = asker.say(text)

    assert set(prompt.splitlines()) < set(edited.splitlines())
    assert rules_in(edited) == {Rule.SMALLEST}


def test_reflection_is_a_new_prompt_between_fences() -> None:
    with SimulatedModel(noise=0.0) as model, Asker(model) as asker:
        experiments = asker.experiments(SEED_PROMPT, failing(Rule.EQUIPMENT))
        said = asker.say(REFLECTION_REQUEST.format(prompt=SEED_PROMPT, experiments=experiments))

    assert (said[:4], said[-4:]) == ("```\n", "\n```")
    assert rules_in(said[4:-4]) == {Rule.EQUIPMENT}
    assert "{request}" in said


@pytest.mark.parametrize("is_steady", [True, False])
def test_steady_model_says_the_same_whatever_ids_stand_around_and_however_often(is_steady: bool) -> None:
    with SimulatedModel(is_steady=is_steady) as model, Asker(model) as asker:
        experiments = asker.experiments(SEED_PROMPT, TASKS[:12])
        asked = REFLECTION_REQUEST.format(prompt=SEED_PROMPT, experiments=experiments)
        said = {asker.say(f"{asked}\nTrace {number % 5}") for number in range(10)}

    assert (len(said) == 1) == is_steady


def test_plain_conversation_is_not_taken_for_optimising() -> None:
    assert {kind_of(SEED_PROMPT.format(request=task.text)) for task in TASKS} == {"answer"}
    assert kind_of("How do you do?") == "answer"


@pytest.mark.parametrize("template", sorted(APO_PROMPTS.glob("gradient*.poml")), ids=lambda path: path.stem)
def test_critic_understands_what_apo_asks(template: Path) -> None:
    experiments = []
    for task in failing(Rule.CLOCK):
        asked = SEED_PROMPT.format(request=task.text)
        said = str(cases_of(task.text)[0].answered(()))
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        attributes = {"gen_ai.completion.0.content": said, "gen_ai.prompt.0.content": asked}
        told = {"messages": [{"messages": messages, "tools": None}], "spans": [{"attributes": attributes}]}
        experiments.append({"status": "succeeded", "final_reward": task.score(said), **told})

    text = rendered(template, {"prompt_template": SEED_PROMPT, "experiments": experiments})

    assert kind_of(text) == "critique"
    assert rules_in(criticise(text, random.Random(0))) == {Rule.CLOCK}


@pytest.mark.parametrize("template", sorted(APO_PROMPTS.glob("edit*.poml")), ids=lambda path: path.stem)
def test_editor_understands_what_apo_asks(template: Path) -> None:
    critique = f"- {ADVICE} {PHRASINGS[Rule.CLOCK][0]}.\n- {ADVICE} {PHRASINGS[Rule.FREE][2]}."

    text = rendered(template, {"prompt_template": SEED_PROMPT, "critique": critique})

    assert kind_of(text) == "edit"
    assert rules_in(edit(text, random.Random(0))) == (
        {Rule.CLOCK} if "one_point" in template.stem else {Rule.CLOCK, Rule.FREE}
    )
    assert kind_of(rendered(template, {"prompt_template": SEED_PROMPT, "critique": NONSENSE})) == "edit"


def test_apo_has_prompts_of_both_kinds() -> None:
    assert {path.stem.split("_")[0] for path in APO_PROMPTS.glob("*.poml")} == {"gradient", "edit"}


# ---------------------------------------------------------------------- faults


def test_faults_of_the_editor_follow_the_seed_and_are_all_there() -> None:
    critique = f"- {ADVICE} {PHRASINGS[Rule.CLOCK][0]}."

    def answers(seed: int) -> list[str]:
        with SimulatedModel(seed, faults=1.0) as model, Asker(model) as asker:
            return [asker.edit(SEED_PROMPT, critique) for _ in range(30)]

    first = answers(1)
    seen = {
        "no placeholder": any("the request" in text and "{" not in text for text in first),
        "broken placeholder": any("{request\n" in text for text in first),
        "rambling": any(RAMBLING in text for text in first),
        "nonsense": NONSENSE in first,
        "silence": "" in first,
    }
    assert all(seen.values()), seen
    assert first == answers(1) != answers(2)


def test_rate_limit_tells_when_to_come_back() -> None:
    with SimulatedModel(faults=1.0) as model, Asker(model) as asker:
        text = "Rewrite it as the critique says."
        answered = [asker.post([{"role": "user", "content": text}]) for _ in range(30)]

    limited = [answer for answer in answered if answer.status_code == 429]
    assert 0 < len(limited) < 30
    assert {answer.headers["retry-after"] for answer in limited} == {"0.01"}


@pytest.mark.parametrize("fault", [fault for fault in EDIT_FAULTS if "placeholder" in fault])
def test_spoilt_prompt_cannot_be_used(fault: Any) -> None:
    with SimulatedModel(noise=0.0) as model, Asker(model) as asker:
        assert asker.score(spoilt(FULL_PROMPT, fault), TASKS[:10]) == 0.0


def test_faults_spare_the_assistant() -> None:
    with SimulatedModel(noise=0.0, faults=1.0) as model, Asker(model) as asker:
        assert asker.score(FULL_PROMPT, TASKS) == 1.0


# ---------------------------------------------------------------------- the way up


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_critique_and_edit_climb_from_the_seed_to_the_top(seed: int) -> None:
    tasks = make_tasks(40, seed=100 + seed)
    best, score = SEED_PROMPT, 0.0

    with SimulatedModel(seed, faults=0.3) as model, Asker(model) as asker:
        first = score = asker.score(best, tasks)
        for step in range(MOST_STEPS):
            if score > 0.9:
                break
            batch = [tasks[(8 * step + number) % len(tasks)] for number in range(8)]
            candidate = asker.edit(best, asker.criticise(best, batch))
            if candidate != best and (reached := asker.score(candidate, tasks)) > score:
                best, score = candidate, reached

    assert first < 0.4
    assert score > 0.9
