"""The optimiser's patience, and what makes a prompt unfit."""

import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.algorithm.prompts.budget import BudgetSpent, Ledger, OptimisationBudget
from agentlightning.algorithm.prompts.model import TRIES, OptimiserFailed, OptimiserModel
from agentlightning.algorithm.prompts.results import Candidate, Lineage
from agentlightning.algorithm.prompts.templates import unwrapped, why_unfit
from agentlightning.errors import ConfigurationError
from agentlightning.types import PromptTemplate


class ApiError(Exception):
    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"status {status}")
        self.status_code = status
        self.response = SimpleNamespace(headers={name.replace("_", "-"): text for name, text in headers.items()})


def optimiser(*outcomes: Any) -> tuple[OptimiserModel, list[float]]:
    """One whose model raises or says these in turn, and the waits it made."""
    left, waits = list(outcomes), []

    async def create(**asked: Any) -> Any:
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=outcome))])

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    return OptimiserModel(client, sleep), waits


async def test_a_rate_limit_is_waited_for_as_long_as_the_server_says() -> None:
    model, waits = optimiser(ApiError(429, retry_after="3"), ApiError(429, retry_after_ms="250"), "yes")
    assert await model.ask("m", [], 1.0) == "yes"
    assert waits == [3.0, 0.25]
    assert model.ledger.model_calls == 3


async def test_a_rate_limit_that_ends_at_a_date_is_waited_for() -> None:
    model, waits = optimiser(ApiError(429, retry_after=formatdate(time.time() + 300, usegmt=True)), "yes")
    assert await model.ask("m", [], 1.0) == "yes"
    assert waits == [pytest.approx(300.0, abs=60)]


async def test_after_the_last_try_it_fails() -> None:
    model, waits = optimiser(ApiError(429, retry_after="1"))
    with pytest.raises(OptimiserFailed, match="status 429"):
        await model.ask("m", [], 1.0)
    assert (model.ledger.model_calls, len(waits)) == (TRIES, TRIES - 1)


@pytest.mark.parametrize("error", [ApiError(401), ApiError(400), ApiError(429, retry_after="100000")])
async def test_what_will_not_help_is_not_tried_again(error: Exception) -> None:
    model, waits = optimiser(error)
    with pytest.raises(OptimiserFailed):
        await model.ask("m", [], 1.0)
    assert (model.ledger.model_calls, waits) == (1, [])


async def test_tries_count_against_the_budget() -> None:
    model, _ = optimiser(ApiError(429, retry_after="0"))
    model.ledger = Ledger(OptimisationBudget(model_calls=2))

    with pytest.raises(BudgetSpent):
        await model.ask("m", [], 1.0)

    assert model.ledger.model_calls == 2


# ---------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("engine", "original", "candidate", "fault"),
    [
        ("f-string", "{a}", "so {a} and {a}", None),
        ("f-string", "{a.name} {a[0]:>5}", "{a[0]:>5}, {a} and {a.name}", None),
        ("f-string", "{a.name}", "{a.other}", "code that the seed does not have: {a.other}"),
        ("f-string", "{a}", "{a!r:>5}", "code that the seed does not have: {a!r:>5}"),
        ("f-string", "{a}", "{a.__class__}", "code"),
        ("f-string", "{a} {b}", "{a:{b}} {b}", "code"),
        ("f-string", "{a}", "nothing {{a}}", "drops the placeholders a"),
        ("f-string", "{a}", "{a} {b}", "new placeholders 'b'"),
        ("f-string", "{a}", "{a} {", "does not parse"),
        ("f-string", "{a}", "  ", "empty"),
        ("jinja", "{{ a }}", "So: {{ a }}{# note #}{% raw %}{{ b.c }}{% endraw %}", None),
        ("jinja", "{% for x in a if x %}{{ x.y }}{% endfor %}", "A{% for x in a if x %}{{ x.y }}, {% endfor %}", None),
        (
            "jinja",
            "{% if a %}x{% elif b | e %}y{% endif %}",
            "{% if a %}u{% elif b | e %}v{% else %}w{% endif %}",
            None,
        ),
        ("jinja", "{{ a }}", "{% for x in a %}{{ x }}{% endfor %}", "code that the seed does not have: For"),
        ("jinja", "{{ a }}", "{{ a.__class__ }}", "code that the seed does not have: Getattr"),
        ("jinja", "{{ a }}", "{{ a }}{{ a | upper }}", "code that the seed does not have: Filter"),
        ("jinja", "{{ a }}", "{% set x = 1 %}{{ a }}", "code that the seed does not have: Assign"),
        ("jinja", "{{ a }}", "{{ a }}{{ [1] * 9 }}", "code"),
        ("jinja", "{% if a %}{% endif %}", "{% if a %}{{ a() }}{% endif %}", "code that the seed does not have: Call"),
        ("jinja", "{{ a }}", "{{ b }}", "drops the placeholders a and has new placeholders 'b'"),
        ("jinja", "{{ a }}", "{{ a", "does not parse"),
        ("poml", "<p>{{a}}</p>", "<poml><role>You</role><b>{{ a }}</b> & <list><item>x</item></list></poml>", None),
        ("poml", '<p for="x in a">{{x.y}}</p>', '<task caption="T"/><p for="x in a">See {{ x.y }}, {{x}}</p>', None),
        ("poml", "<p>{{a}}</p>", "<b>{{ a.x }}</b>", "code that the seed does not have: {{ a.x }}"),
        ("poml", "<p>{{a}}</p>", "<p>{{a}} {{ a + process.env }}</p>", "code"),
        ("poml", "<p>{{a}}</p>", '<p if="process.exit()">{{a}}</p>', "code that the seed does not have: <p if="),
        ("poml", "<p>{{a}}</p>", '<p for="x in a">{{a}}</p>', "code that the seed does not have: <p for="),
        ("poml", "<p>{{a}}</p>", '<let name="b" value="1"/><p>{{a}}</p>', "code that the seed does not have: <let"),
        ("poml", "<p>{{a}}</p>", "<p>{{a}}</p><output-schema>z.any()</output-schema>", "does not have: <output-schema"),
        ("poml", "<p>{{a}}</p>", '<p caption="{{ a.x }}">{{a}}</p>', "code that the seed does not have: <p caption="),
        ("poml", "<p>{{a}}</p>", '<document src="/etc/passwd"/><p>{{a}}</p>', "does not have: <document"),
        ("poml", "<p>{{a}}</p>", '<p src="/etc/passwd">{{a}}</p>', "does not have: <p src="),
        ("poml", "<p>{{a}}</p>", "<p>{{a}} &#123;&#123; a.x }}</p>", "code"),
        ("poml", "<p>{{a}}</p>", "<p>{{a}}", "does not parse"),
        ("poml", "<p>{{a}}</p>", "<b></b>", "drops the placeholders a"),
    ],
)
def test_unfit_prompts_are_told_apart(engine: Any, original: str, candidate: str, fault: str | None) -> None:
    reason = why_unfit(
        PromptTemplate(template=candidate, engine=engine), PromptTemplate(template=original, engine=engine)
    )
    assert reason is None if fault is None else fault in (reason or "")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("plain {a}", "plain {a}"),
        ("```\nfenced\n```\n", "fenced"),
        ("```markdown\na\n\nb\n```", "a\n\nb"),
        ("<prompt_template>\ntagged\n</prompt_template>", "tagged"),
        ("before\n```\ncode\n```", "before\n```\ncode\n```"),
    ],
)
def test_what_a_model_puts_around_the_whole_answer_is_taken_off(answer: str, text: str) -> None:
    assert unwrapped(answer) == text


# ---------------------------------------------------------------------- lineage and crowds


def test_promotion_is_not_undone_by_the_beam() -> None:
    lineage = Lineage([Candidate("v0", "p", "x", fate="seed"), Candidate("v1", "p", "y", parent="v0")])

    lineage.settle("v1", "promoted", "because")
    lineage.settle("v1", "dropped")
    lineage.settle("v0", "dropped")

    assert [(one.fate, one.reason) for one in lineage] == [("seed", None), ("promoted", "because")]
    with pytest.raises(ConfigurationError, match="no candidate 'v9'"):
        lineage.ancestry("v9")
