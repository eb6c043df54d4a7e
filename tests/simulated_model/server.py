"""A language model that follows rules, behind the OpenAI API: its answers depend on the text it is sent and no more.

    with SimulatedModel(seed=3) as model:
        client = OpenAI(base_url=model.url, api_key="any")

It books meeting rooms (see `bookings`), and it is a mediocre assistant: it has to be told five things, of which it
thinks by itself of none. They are recognised in any of many phrasings (`phrases`), in the system prompt or around the
request:

- offer only rooms that are free;
- offer only rooms with everything that is needed;
- of those that fit take the smallest;
- write times on the 24-hour clock;
- answer with the line and nothing else, which matters by SMS alone.

With `SEED_PROMPT` three answers of ten are right, with all five rules all are, but for the noise: in the share `noise`
of them another room is named. Instructions of more than `DISTRACTING_WORDS` words distract it: then it is wrong more
often, by `DISTRACTION`. Where a request comes without rooms and tools are offered, it calls the first of them, with as
many of `people`, `start`, `minutes` and `needs` as that has parameters, and answers when the rooms have come.

The same model is the optimiser (`optimiser`): it criticises prompts by the cases it is shown, rewrites them as a
critique says, and reflects as GEPA asks. Of its answers as an optimiser the share `faults` goes wrong: a prompt without
its placeholder or with a broken one, a rambling prompt, nonsense, an empty answer, or status 429.

All chance is drawn from the seed, the text of the request and how often that text came before. So concurrent callers
get the same answers in any order, and somebody who asks again may get another.
"""

import json
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tests.simulated_model.bookings import Case, Request, cases_of, request_of, without_cases
from tests.simulated_model.optimiser import (
    CRITIQUE_FAULTS,
    EDIT_FAULTS,
    criticise,
    edit,
    kind_of,
    reflect,
    spoilt,
)
from tests.simulated_model.phrases import rules_in
from tests.stub_model import script
from tests.stub_model.script import Failure, Script, Turn
from tests.stub_model.server import running
from tests.stub_model.words import ToolCall

SEED_PROMPT = "You book meeting rooms.\n\n{request}\n\nAnswer with a line such as: Room: <name> | Start: <time>"
MODEL = "simulated-model"
OPTIMISER_MODELS = ("gpt-5-mini", "gpt-4.1-mini")
"""The names by which APO asks for its models unless it is told others."""
DISTRACTING_WORDS = 250
DISTRACTION = 0.3
RETRY_AFTER_SECONDS = 0.01
NO_REQUEST = "I see no request for a room here."
TOOL_ROLES = ("tool", "function")


class SimulatedModel:
    """The model, served while it is entered.

    Args:
        seed: Another seed is another row of chances.
        noise: How often a wrong room is named although the rules are known.
        faults: How often the optimiser's answers go wrong.
        models: The names it answers to.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        noise: float = 0.02,
        faults: float = 0.0,
        models: tuple[str, ...] = (MODEL, *OPTIMISER_MODELS),
    ) -> None:
        self.seed = seed
        self.noise = noise
        self.faults = faults
        self.models = models
        self.url = ""
        """Base URL for OpenAI's client, once it is served."""
        self._asked: Counter[str] = Counter()
        self._served = ExitStack()

    def __enter__(self) -> Self:
        self.url = self._served.enter_context(running(Script(self.react), models=self.models)).openai_url
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._served.close()

    def react(self, request: script.Request) -> Turn:
        """The turn for a request."""
        kind = kind_of(request.prompt)
        self._asked[request.prompt] += 1
        rng = random.Random(f"{self.seed} {self._asked[request.prompt]} {request.prompt}")
        if kind == "answer":
            return self._answered(request, rng)
        write = {"critique": criticise, "edit": edit, "reflect": reflect}[kind]
        written = write(request.prompt, rng)
        if rng.random() >= self.faults:
            return written
        fault = rng.choice(CRITIQUE_FAULTS if kind == "critique" else EDIT_FAULTS)
        if fault == "rate limit":
            return Failure(429, "Rate limit reached.", retry_after_seconds=RETRY_AFTER_SECONDS)
        return spoilt(written, fault)

    # ------------------------------------------------------------------ the assistant

    def _answered(self, request: script.Request, rng: random.Random) -> str | script.Answer:
        said = "\n".join(message.text for message in request.messages if message.role not in ("assistant", *TOOL_ROLES))
        shown = "\n".join(message.text for message in request.messages if message.role in TOOL_ROLES)
        cases = cases_of(f"{said}\n{shown}")
        if cases:
            return self._booked(cases[0], said, rng)
        wanted, tools = request_of(said), request.body.get("tools")
        if wanted is not None and tools and not shown:
            return script.Answer(tool_calls=(_call(tools[0], wanted),))
        return NO_REQUEST

    def _booked(self, case: Case, said: str, rng: random.Random) -> str:
        right = case.answered(rules_in(said))
        is_distracted = len(without_cases(said).split()) > DISTRACTING_WORDS
        if rng.random() >= self.noise + DISTRACTION * is_distracted:
            return str(right)
        others = [room.name for room in case.rooms if room.name != right.room]
        return str(replace(right, room=rng.choice(others or ["none"])))


def _call(tool: dict[str, Any], wanted: Request) -> ToolCall:
    function = tool["function"]
    known = {
        "people": wanted.people,
        "start": wanted.start,
        "minutes": wanted.minutes,
        "needs": sorted(wanted.needs),
    }
    parameters = (function.get("parameters") or {}).get("properties") or {}
    return ToolCall(function["name"], json.dumps({name: known[name] for name in known if name in parameters}))
