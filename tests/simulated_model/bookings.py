"""The world of the simulated model: requests for meeting rooms, the rooms, and which room is the right one.

A task is a text such as

    Request (sms): 6 people, start 2:30 pm, 90 minutes, needs projector and whiteboard
    Rooms:
    - Ada: 4 seats; projector; busy 14:00-15:00
    - Curie: 8 seats; projector, whiteboard; busy never

and its right answer is the line `Room: Curie | Start: 14:30`. What makes it right are five rules, of which most tasks
need one, some none and a few two: see `Rule`. Everything is read from text, also from text that came through JSON.
"""

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

MINUTES_A_DAY = 24 * 60
NOON = 12 * 60
NAMES = ("Ada", "Bohr", "Curie", "Darwin", "Euler", "Fermi", "Gauss", "Hopper")
THINGS = ("projector", "whiteboard", "phone", "camera")
NEEDS_IN_TEN = (0, 0, 0, 1, 1, 1, 1, 1, 1, 2)
"""How many rules the tasks need: of ten tasks, three none, six one, one two."""
GREETING = "Happy to help with your booking!"
FAREWELL = "Is there anything more that I can do for you?"

_REQUEST = re.compile(
    r"Request \((?P<channel>mail|sms)\): (?P<people>\d+) people, start (?P<start>\d+:\d\d(?: [ap]m)?), "
    r"(?P<minutes>\d+) minutes(?:, needs (?P<needs>[a-z]+(?: and [a-z]+)*))?"
)
_ROOM = re.compile(r"- (?P<name>\w+): (?P<seats>\d+) seats; (?P<things>[a-z, ]+); busy (?P<busy>[-0-9:, ]+|never)")
_ANSWER = re.compile(r"Room: (?P<room>\w+) \| Start: (?P<start>\d+:\d\d(?: [ap]m)?)")
_ESCAPED_LINE_END = re.compile(r"\\+n")


class Rule(Enum):
    """What an assistant has to be told, because it does not think of it by itself."""

    FREE = "free"
    """Only rooms that are free; otherwise busy ones are offered too."""
    EQUIPMENT = "equipment"
    """Only rooms with everything that is needed; otherwise needs are overlooked."""
    SMALLEST = "smallest"
    """The smallest of those that fit; otherwise the first in the list."""
    CLOCK = "clock"
    """Times as 14:30; otherwise as the request has them."""
    BRIEF = "brief"
    """Nothing but the line; otherwise with a greeting and a farewell, which an answer by SMS must not have."""


ALL_RULES = frozenset(Rule)


@dataclass(frozen=True)
class Room:
    """One room of the list."""

    name: str
    seats: int
    things: frozenset[str]
    busy: tuple[tuple[int, int], ...]
    """From and to, in minutes of the day."""

    def is_free(self, start: int, minutes: int) -> bool:
        return all(end <= start or start + minutes <= begin for begin, end in self.busy)

    def __str__(self) -> str:
        things = ", ".join(sorted(self.things)) or "nothing"
        busy = ", ".join(f"{clock(begin)}-{clock(end)}" for begin, end in self.busy) or "never"
        return f"- {self.name}: {self.seats} seats; {things}; busy {busy}"


@dataclass(frozen=True)
class Request:
    """Who wants a room."""

    channel: str
    people: int
    start: str
    minutes: int
    needs: frozenset[str]

    @property
    def start_minute(self) -> int:
        hours, minutes = map(int, self.start.split()[0].split(":"))
        if self.start[-1] != "m":
            return hours * 60 + minutes
        return hours % 12 * 60 + minutes + (NOON if self.start.endswith("pm") else 0)

    def __str__(self) -> str:
        needs = f", needs {' and '.join(sorted(self.needs))}" if self.needs else ""
        return f"Request ({self.channel}): {self.people} people, start {self.start}, {self.minutes} minutes{needs}"


@dataclass(frozen=True)
class Answer:
    """What was said to a request."""

    room: str
    start: str
    has_greeting: bool = False

    @property
    def line(self) -> str:
        return f"Room: {self.room} | Start: {self.start}"

    def __str__(self) -> str:
        return f"{GREETING}\n{self.line}\n{FAREWELL}" if self.has_greeting else self.line


@dataclass(frozen=True)
class Case:
    """A request with its rooms, and what was answered if that stands in the text."""

    request: Request
    rooms: tuple[Room, ...]
    answer: Answer | None = None

    def answered(self, rules: Collection[Rule]) -> Answer:
        """What an assistant says who knows these rules."""
        request = self.request
        fitting = [room for room in self.rooms if room.seats >= request.people]
        if Rule.FREE in rules:
            fitting = [room for room in fitting if room.is_free(request.start_minute, request.minutes)]
        if Rule.EQUIPMENT in rules:
            fitting = [room for room in fitting if room.things >= request.needs]
        if Rule.SMALLEST in rules:
            fitting.sort(key=lambda room: room.seats)
        start = clock(request.start_minute) if Rule.CLOCK in rules else request.start
        return Answer(fitting[0].name if fitting else "none", start, Rule.BRIEF not in rules)

    def broken_rules(self) -> list[Rule]:
        """The rules that the answer in the text breaks, as far as one can see."""
        if self.answer is None:
            return []
        right, broken = self.answered(ALL_RULES), []
        room = next((room for room in self.rooms if room.name == self.answer.room), None)
        if room is not None and room.name != right.room:
            if not room.is_free(self.request.start_minute, self.request.minutes):
                broken.append(Rule.FREE)
            if not room.things >= self.request.needs:
                broken.append(Rule.EQUIPMENT)
            if not broken:
                broken.append(Rule.SMALLEST)
        if self.answer.start != right.start:
            broken.append(Rule.CLOCK)
        if self.answer.has_greeting and self.request.channel == "sms":
            broken.append(Rule.BRIEF)
        return broken


def clock(minute: int) -> str:
    """The time as 14:30."""
    return f"{minute // 60:02d}:{minute % 60:02d}"


# ---------------------------------------------------------------------- reading


def unescaped(text: str) -> str:
    """The text with the line ends that JSON had written out."""
    return _ESCAPED_LINE_END.sub("\n", text)


def cases_of(text: str) -> list[Case]:
    """Every request of a text that has rooms, in order, with the answer that belongs to it.

    Answers stand behind their requests, as in a conversation, or all before them, as in a span whose attributes are
    sorted by name.
    """
    text = unescaped(text)
    found = list(_REQUEST.finditer(text))
    if not found:
        return []
    first_answer = _ANSWER.search(text)
    before = first_answer is not None and first_answer.start() < found[0].start()
    cases = []
    for number, match in enumerate(found):
        begin = found[number - 1].end() if number else 0
        end = found[number + 1].start() if number + 1 < len(found) else len(text)
        rooms = tuple(_room(room) for room in _ROOM.finditer(text, match.end(), end))
        if rooms:
            said = text[begin : match.start()] if before else text[match.end() : end]
            cases.append(Case(_request(match), rooms, _answer(said, rooms)))
    return cases


def request_of(text: str) -> Request | None:
    """The first request of a text, with rooms or without."""
    match = _REQUEST.search(unescaped(text))
    return _request(match) if match else None


def without_cases(text: str) -> str:
    """What a text says beside requests and rooms: the instructions."""
    text = _ROOM.sub("", _REQUEST.sub("", unescaped(text)))
    return re.sub(r"^\s*Rooms:\s*$", "", text, flags=re.MULTILINE)


def _request(match: re.Match[str]) -> Request:
    needs = frozenset(match["needs"].split(" and ")) if match["needs"] else frozenset()
    return Request(match["channel"], int(match["people"]), match["start"], int(match["minutes"]), needs)


def _room(match: re.Match[str]) -> Room:
    things = frozenset() if match["things"] == "nothing" else frozenset(match["things"].split(", "))
    times = [] if match["busy"] == "never" else re.findall(r"(\d+):(\d\d)-(\d+):(\d\d)", match["busy"])
    busy = tuple((int(a) * 60 + int(b), int(c) * 60 + int(d)) for a, b, c, d in times)
    return Room(match["name"], int(match["seats"]), things, busy)


def _answer(text: str, rooms: Sequence[Room]) -> Answer | None:
    names = {room.name for room in rooms} | {"none"}
    for match in _ANSWER.finditer(text):
        if match["room"] in names:
            return Answer(match["room"], match["start"], GREETING in text[: match.start()])
    return None


# ---------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    """A text for an assistant, and what is right to say."""

    text: str
    answer: str
    """The line."""
    needs: frozenset[Rule]
    """An assistant is right if it knows these rules."""

    @property
    def request(self) -> str:
        """The text without its rooms, for an assistant that asks a tool for them."""
        return self.text.split("\n", 1)[0]

    @property
    def rooms(self) -> str:
        """What such a tool returns."""
        return self.text.split("\n", 1)[1]

    def score(self, said: str) -> float:
        """1 for the right answer, 0 for any other; by SMS it must stand alone."""
        if self.text.startswith("Request (sms)"):
            return float(said.strip() == self.answer)
        return float(self.answer in map(str.strip, said.splitlines()))


def make_tasks(count: int, seed: int = 0) -> list[Task]:
    """Tasks of which every ten need what `NEEDS_IN_TEN` says, each rule as often as the others."""
    rng = random.Random(f"tasks {seed}")
    subsets = {size: list(combinations(Rule, size)) for size in set(NEEDS_IN_TEN)}
    for several in subsets.values():
        rng.shuffle(several)
    tasks: list[Task] = []
    used = dict.fromkeys(subsets, 0)
    while len(tasks) < count:
        sizes = list(NEEDS_IN_TEN)
        rng.shuffle(sizes)
        for size in sizes:
            tasks.append(_task(frozenset(subsets[size][used[size] % len(subsets[size])]), rng))
            used[size] += 1
    return tasks[:count]


def _task(needs: frozenset[Rule], rng: random.Random) -> Task:
    """A random task for which just these rules are needed."""
    while True:
        case = _random_case(needs, rng)
        text = "\n".join([str(case.request), "Rooms:", *map(str, case.rooms)])
        task = Task(text, case.answered(ALL_RULES).line, needs)
        if "none" not in task.answer and _is_needed(task, case):
            return task


def _is_needed(task: Task, case: Case) -> bool:
    """Whether exactly those assistants are right who know the rules that the task needs."""
    known = (frozenset(rules) for size in range(len(Rule) + 1) for rules in combinations(Rule, size))
    return all((task.score(str(case.answered(rules))) == 1.0) == (rules >= task.needs) for rules in known)


def _random_case(needs: frozenset[Rule], rng: random.Random) -> Case:
    minute = rng.randrange(13 * 60, 17 * 60, 30)
    start = f"{minute // 60 - 12}:{minute % 60:02d} pm" if Rule.CLOCK in needs else clock(minute)
    channel = "sms" if Rule.BRIEF in needs else "mail"
    wanted = frozenset(rng.sample(THINGS, rng.choice((1, 2))))
    request = Request(channel, rng.randint(3, 9), start, rng.choice((30, 60, 90)), wanted)
    rooms = []
    for name in rng.sample(NAMES, 4):
        things = frozenset(rng.sample(THINGS, rng.choice((1, 3, 4))))
        begin = rng.choice((9 * 60, minute - 30, minute))
        busy = ((begin, begin + 60),) if rng.random() < 0.6 else ()
        rooms.append(Room(name, rng.choice((2, 4, 6, 8, 10, 12)), things, busy))
    return Case(request, tuple(rooms))
