"""The simulated model as an optimiser: it criticises a prompt by its failed cases, and rewrites it as a critique says.

What it is asked for is seen in the text:

- *reflect*: "write a new instruction", as GEPA asks: cases in, a whole new prompt out, between fences;
- *critique*: cases together with words about prompts, critiques, experiments or rewards;
- *edit*: a critique and words about rewriting, but no cases.

The prompt is found between tags (`<prompt_template>`), else under a heading (`# Prompt template`), which ends at the
next heading that speaks of a critique, of experiments, of the answer or to "you", else between fences; a reflection has
it between the first fences. Whoever writes a prompt here says nothing twice, so that a rambling one recovers.
"""

import random
import re
from collections import Counter
from typing import Literal

from tests.simulated_model.bookings import Rule, cases_of, request_of, unescaped
from tests.simulated_model.phrases import ADVICE, FINDINGS, PHRASINGS, rules_in

Kind = Literal["answer", "critique", "edit", "reflect"]
Fault = Literal["no placeholder", "broken placeholder", "rambling", "nonsense", "silence", "rate limit"]
EDIT_FAULTS: tuple[Fault, ...] = (
    "no placeholder",
    "broken placeholder",
    "rambling",
    "nonsense",
    "silence",
    "rate limit",
)
CRITIQUE_FAULTS: tuple[Fault, ...] = ("nonsense", "silence", "rate limit")
MOST_ADVICE = 2
"""How many rules a critique names."""
NOTHING_TO_SAY = "- The answers are as they should be; leave the prompt as it is."
NO_PROMPT = "I could not find a prompt to rewrite."
NONSENSE = "Bananas ripen faster next to apples, which is why the moon has no fruit stalls."
RAMBLING = " ".join(
    ["Remember that booking is a noble art with a long history, and that every meeting is a meeting of minds."] * 20
)

_REFLECT = re.compile(r"write a new instruction|new instructions? within ```", re.IGNORECASE)
_OPTIMISING = re.compile(r"\b(prompt template|experiments?|critique|final_reward|textual gradient)\b", re.IGNORECASE)
_REWRITING = re.compile(r"\b(rewrit\w+|rewrite|revis\w+|edit\w*|apply|improved? prompt|fix)\b", re.IGNORECASE)
_ONE_POINT = re.compile(r"\b(exactly|only|just) one\b|\bone (point|change|issue|problem)\b|\bsingle\b", re.IGNORECASE)
_TAGGED = re.compile(r"<((?:current_|original_)?(?:prompt|template|prompt_template))>\n?(.*?)\n?</\1>", re.DOTALL)
_HEADED = re.compile(
    r"^(?:#+ |\*\*)(?:(?:the|current|original|given) )*prompt(?: template)?\b[^\n]*\n(.*?)"
    r"(?=^(?:#+ |\*\*)(?:the |your |output|answer|critique|feedback|experiment|result|rollout|case|what |how )|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_FENCED = re.compile(r"```\w*\n(.*?)\n```", re.DOTALL)
_REPEATED = re.compile(r"(?P<sentence>[A-Z][^.\n{}]{20,}\.)(?: (?P=sentence))+")
_PLACEHOLDER = re.compile(r"\{\w+\}")


def kind_of(text: str) -> Kind:
    """What a text asks of the model; anything that is not about prompts is to be answered."""
    if _REFLECT.search(text):
        return "reflect"
    is_about_prompts = _OPTIMISING.search(text) is not None
    if request_of(text) is not None:
        return "critique" if is_about_prompts else "answer"
    if not is_about_prompts and ADVICE not in text:
        return "answer"
    return "edit" if ADVICE in text or _REWRITING.search(text) else "critique"


def prompt_in(text: str) -> str | None:
    """The prompt that a text is about."""
    for pattern in (_FENCED,) if kind_of(text) == "reflect" else (_TAGGED, _HEADED, _FENCED):
        found = pattern.search(text)
        if found:
            return found[found.lastindex or 1].strip()
    return None


def criticise(text: str, rng: random.Random) -> str:
    """Names rules that failed cases show to be missing, each with an advice in words of its own."""
    missing = _missing_rules(text)
    if not missing:
        return NOTHING_TO_SAY
    chosen = rng.sample(missing, rng.randint(1, min(MOST_ADVICE, len(missing))))
    return "\n".join(f"- In one case {FINDINGS[rule]}. {ADVICE} {rng.choice(PHRASINGS[rule])}." for rule in chosen)


def edit(text: str, rng: random.Random) -> str:
    """The prompt with the rules that the critique names and the prompt lacks; with one of them if one is asked for."""
    prompt = prompt_in(text)
    if prompt is None:
        return NO_PROMPT
    critique = text.replace(prompt, "")
    advised = [line for line in unescaped(critique).splitlines() if ADVICE in line]
    named = [rule for line in advised for rule in Rule if rule in rules_in(line) - rules_in(prompt)]
    # What is around the critique asks for one point, not the critique itself.
    wants_one = _ONE_POINT.search("\n".join(line for line in critique.splitlines() if ADVICE not in line))
    return _with_rules(prompt, named[:1] if wants_one else named, rng)


def reflect(text: str, rng: random.Random) -> str:
    """A new prompt straight from the cases, between fences."""
    prompt = prompt_in(text)
    if prompt is None:
        return NO_PROMPT
    missing = _missing_rules(text)
    chosen = rng.sample(missing, rng.randint(1, min(MOST_ADVICE, len(missing)))) if missing else []
    return f"```\n{_with_rules(prompt, chosen, rng)}\n```"


def spoilt(written: str, fault: Fault) -> str:
    """What a fault makes of a good answer; a rate limit is not said but answered with its status."""
    if fault == "no placeholder":
        return _PLACEHOLDER.sub("the request", written)
    if fault == "broken placeholder":
        return _PLACEHOLDER.sub(lambda match: match[0][:-1], written)
    if fault == "rambling":
        return _before_the_end(written, RAMBLING)
    return "" if fault == "silence" else NONSENSE


def _missing_rules(text: str) -> list[Rule]:
    """Rules that answers in the text break and that the prompt does not say; the most broken first."""
    known = rules_in(prompt_in(text) or "")
    broken = Counter(rule for case in cases_of(text) for rule in case.broken_rules())
    return [rule for rule, _ in broken.most_common() if rule not in known]


def _with_rules(prompt: str, rules: list[Rule], rng: random.Random) -> str:
    """The prompt with an instruction for each rule, before its placeholder or at its end; nothing is said twice."""
    prompt = _REPEATED.sub(r"\g<sentence>", prompt)
    lines = "\n".join(
        f"- {phrase[0].upper()}{phrase[1:]}." for phrase in (rng.choice(PHRASINGS[rule]) for rule in rules)
    )
    if not lines:
        return prompt
    found = _PLACEHOLDER.search(prompt)
    if found is None or rng.random() < 0.5:
        return f"{prompt}\n{lines}"
    begin = prompt.rfind("\n", 0, found.start()) + 1
    return f"{prompt[:begin]}{lines}\n{prompt[begin:]}"


def _before_the_end(written: str, added: str) -> str:
    """Adds to a text, inside its fences if it has them."""
    return f"{written[:-4]}\n{added}\n```" if written.endswith("\n```") else f"{written}\n{added}"
