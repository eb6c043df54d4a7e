"""A model that follows rules, for those who have no key: it writes SQL, and it improves prompts.

As a writer it knows the shop's tables but not its customs: unless the prompt says so, it forgets that prices are in
cents, that cancelled orders do not count, and that lists are sorted. Besides, it calls a product's title `label` until
the database refuses that.

As an optimiser it answers the two questions of APO. A critique names customs that failed answers needed and the prompt
does not say; an edit adds to the prompt what a critique advises.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass

from shop import QUERIES

from tests.stub_model.script import Request

ADVICE = "Tell the writer:"
_TEMPLATE = re.compile(r"<prompt_template>\n(.*?)\n</prompt_template>", re.DOTALL)
_QUESTION = re.compile(r"Question: ([^?]+\?)")
_EXPERIMENT = re.compile(r"Final reward: (?P<reward>[\d.]+|none)\.(?P<shown>.*?)(?=Final reward: |\Z)", re.DOTALL)


@dataclass(frozen=True)
class Custom:
    """What has to be said, because the tables do not say it."""

    said: str
    """A word by which it is recognised in a prompt."""
    forgotten: str
    """The part of a query that is left out without it, as a pattern."""
    phrasings: tuple[str, ...]

    def is_in(self, text: str) -> bool:
        return re.search(self.said, text, re.IGNORECASE) is not None


CUSTOMS = (
    Custom(
        r"\bcents?\b",
        r" / 100\.0|100 \* ",
        ("Prices are in cents.", "A price is in cents; 100 of them are a euro.", "Convert prices from cents to euros."),
    ),
    Custom(
        r"\bcancelled\b",
        r" AND status <> 'cancelled'",
        ("Leave out cancelled orders.", "Cancelled orders do not count.", "Ignore orders that were cancelled."),
    ),
    Custom(
        r"\balphabet",
        r" ORDER BY \w+",
        ("Put lists into alphabetical order.", "Return names alphabetically.", "Sort by the alphabet."),
    ),
)


class SimulatedModel:
    """Reacts to requests; what is drawn depends on the prompt in question and on how often it came."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def react(self, request: Request) -> str:
        template = _TEMPLATE.search(request.prompt)
        if template is None:
            return written_query(request.prompt)
        self._seen[template[1]] += 1
        chance = random.Random(f"{self._seen[template[1]]} {template[1]}")
        return (edited if "<critique>" in request.prompt else criticised)(template[1], request.prompt, chance)


def right_query(question: str) -> str | None:
    """The query of one who knows all customs; None for a question of another kind."""
    for kind, query in QUERIES.items():
        found = re.fullmatch(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(kind)), question)
        if found is not None:
            return query.format(**found.groupdict())
    return None


def written_query(prompt: str) -> str:
    """What the writer answers, told what the prompt says."""
    questions = _QUESTION.findall(prompt)
    query = right_query(questions[-1]) if questions else None
    if query is None:
        return "I do not understand the question."
    for custom in CUSTOMS:
        if not custom.is_in(prompt):
            query = re.sub(custom.forgotten, "", query)
    return query if "no such column: label" in prompt else query.replace("title", "label")


def criticised(template: str, text: str, chance: random.Random) -> str:
    """One bullet for each custom that a failed answer needed."""
    failed = [found["shown"] for found in _EXPERIMENT.finditer(text) if not found["reward"].startswith("1")]
    needed = [right_query(question) or "" for shown in failed for question in _QUESTION.findall(shown)]
    missing = [
        custom
        for custom in CUSTOMS
        if not custom.is_in(template) and any(re.search(custom.forgotten, query) for query in needed)
    ]
    if not missing:
        return "- The answers are right; leave the prompt as it is."
    chance.shuffle(missing)
    return "\n".join(f"- An answer was wrong. {ADVICE} {chance.choice(custom.phrasings)}" for custom in missing)


def edited(template: str, text: str, chance: random.Random) -> str:
    """The prompt with what the critique advises in its first paragraph; with one point of it if one is wanted."""
    advised = [line.partition(f"{ADVICE} ")[2] for line in text.splitlines() if ADVICE in line]
    points = advised[:1] if "exactly one point" in text else advised
    first, gap, rest = template.partition("\n\n")
    return " ".join([first, *points]) + gap + rest
