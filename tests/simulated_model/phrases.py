"""How the rules are said, and how they are recognised in whatever words an instruction uses.

A rule is recognised by any of several words and turns of phrase. There is no understanding behind it: a sentence that
forbids what a rule says is taken for the rule.
"""

import re

from tests.simulated_model.bookings import Rule, without_cases

PATTERNS = {
    Rule.FREE: r"(?<!feel )(?<!-)\bfree\b|\b(available|availability|vacant|busy|booked|taken|occupied)\b"
    r"|\b(overlap|clash|conflict|double.book)\w*",
    Rule.EQUIPMENT: r"\b(equipment|equipped|amenit\w+|facilit\w+|features)\b"
    r"|\b(everything|all|whatever) (that )?(the request|the people|they|it|is|are) (needs?|needed|asks? for)\b",
    Rule.SMALLEST: r"\bsmallest\b|\b(fewest|least) (\w+ )?seats\b"
    r"|\b(tightest|snuggest|closest) fit\b|\bno (larger|bigger) than\b",
    Rule.CLOCK: r"\b(24|twenty-four).?hours?\b|\bmilitary time\b|\bHH:MM\b|\b(without|no|never) (am|a\.m\.)",
    Rule.BRIEF: r"\bnothing (else|more)\b|\bonly (with )?(that|the|this|one|a single) (line|answer)\b"
    r"|\b(no|without|omit|skip|drop)( any| all)? (greeting|pleasantr|small talk|explanation|farewell)\w*",
}

PHRASINGS = {
    Rule.FREE: (
        "choose only rooms that are free for the whole meeting",
        "check availability and leave out any room that is already booked at that time",
        "never offer a room whose bookings overlap with the meeting",
    ),
    Rule.EQUIPMENT: (
        "choose only rooms that have everything the request needs",
        "make sure that the room is equipped as requested",
        "leave out rooms that lack any of the requested equipment",
    ),
    Rule.SMALLEST: (
        "if several rooms fit, take the smallest",
        "among the rooms that fit, prefer the one with the fewest spare seats",
        "break ties by the tightest fit, so that large rooms stay open for large groups",
    ),
    Rule.CLOCK: (
        "write every time on the 24-hour clock",
        "give times as HH:MM, so that half past two after noon is 14:30",
        "convert times to twenty-four hour notation",
    ),
    Rule.BRIEF: (
        "reply with that line and nothing else",
        "skip greetings and closing words",
        "write only the line, without any explanation",
    ),
}

FINDINGS = {
    Rule.FREE: "the assistant offered a room in which somebody else has a meeting then",
    Rule.EQUIPMENT: "the room lacked something that was asked for",
    Rule.SMALLEST: "the room was larger than it had to be",
    Rule.CLOCK: "the start was copied in the wrong notation",
    Rule.BRIEF: "the answer had words around it that nobody wanted",
}
"""What a critic says about an answer that breaks the rule."""

ADVICE = "Tell the assistant to"
"""How the critic begins every advice."""


def rules_in(text: str) -> frozenset[Rule]:
    """The rules that the instructions of a text say, in whatever words."""
    said = without_cases(text)
    return frozenset(rule for rule, pattern in PATTERNS.items() if re.search(pattern, said, re.IGNORECASE))
