"""The data models as the notes draw them: fields, defaults, what is refused, JSON and back."""

import importlib
import typing
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import agentlightning as agl
from agentlightning.adapter.triplet import Transition
from agentlightning.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Dataset,
    GenericResponse,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Resource,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutLegacy,
    RolloutMode,
    RolloutStatus,
    Task,
    TaskIfAny,
    TaskInput,
    Triplet,
    WorkerStatus,
)

MODULES = {
    1: "types.core",
    2: "types.resources",
    3: "store.base",
    4: "store.client_server",
    5: "store.memory",
    6: "client",
    7: "server",
    8: "runner.legacy",
    101: "emitter.message emitter.reward execution.events execution.base runner.base trainer.trainer algorithm.base",
    346: "instrumentation.agentops_langchain",
    464: "cli cli.vllm cli.store cli.agentops_server",
    488: "config",
    489: "types.tracer",
}


@pytest.mark.parametrize("names", [pytest.param(names, marks=pytest.mark.claim(n)) for n, names in MODULES.items()])
def test_modules_of_the_notes_can_be_imported(names: str) -> None:
    for name in names.split():
        module = importlib.import_module(f"agentlightning.{name}")
        assert callable(module.main) if name.partition(".")[0] == "cli" else module.__all__


@pytest.mark.claim(9)
def test_there_is_an_example_calc_x() -> None:
    folder = Path(__file__).parents[2] / "examples" / "calc_x"

    assert {"README.md", "train.py"} <= {path.name for path in folder.iterdir()}


# ------------------------------------------------------------------ fields

_TASK: dict[str, Any] = {"rollout_id": "ro-1", "input": {"q": 1}}
_LEGACY: dict[str, Any] = {"rollout_id": "ro-1"}
_LLM: dict[str, Any] = {"endpoint": "http://localhost:8000/v1", "model": "m"}
_PROMPT: dict[str, Any] = {"template": "Hi {name}", "engine": "f-string"}
_TRIPLET: dict[str, Any] = {"prompt": "p", "response": "r"}
_UPDATE: dict[str, Any] = {"resources_id": "rs-1", "resources": {}}


def _field(number: int, model: type[BaseModel], base: dict[str, Any], field: str, good: Any, bad: Any) -> Any:
    return pytest.param(model, base, field, good, bad, id=f"{model.__name__}.{field}", marks=pytest.mark.claim(number))


@pytest.mark.parametrize(
    ("model", "base", "field", "good", "bad"),
    [
        _field(11, Task, _TASK, "rollout_id", "ro-2", 3),
        _field(13, Task, _TASK, "mode", "val", "other"),
        _field(14, Task, _TASK, "resources_id", "rs-1", 5),
        _field(15, Task, _TASK, "create_time", 1.5, "soon"),
        _field(16, Task, _TASK, "last_claim_time", 2.5, "soon"),
        _field(17, Task, _TASK, "num_claims", 2, 0.5),
        _field(18, Task, _TASK, "metadata", {"a": 1}, "text"),
        _field(22, ResourcesUpdate, _UPDATE, "resources_id", "rs-2", 7),
        _field(29, LLM, _LLM, "endpoint", "http://localhost:1/v1", 1),
        _field(30, LLM, _LLM, "model", "other", 1),
        _field(31, LLM, _LLM, "api_key", "key", 1),
        _field(32, LLM, _LLM, "sampling_parameters", {"temperature": 0.1}, "hot"),
        _field(39, PromptTemplate, _PROMPT, "template", "Bye", 1),
        _field(40, PromptTemplate, _PROMPT, "engine", "jinja", "mustache"),
        _field(45, RolloutLegacy, _LEGACY, "rollout_id", "ro-2", 3),
        _field(46, RolloutLegacy, _LEGACY, "task", Task(**_TASK), "text"),
        _field(47, RolloutLegacy, _LEGACY, "final_reward", 0.5, "high"),
        _field(48, RolloutLegacy, _LEGACY, "triplets", [Triplet(**_TRIPLET)], ["text"]),
        _field(49, RolloutLegacy, _LEGACY, "trace", [{"name": "s"}], ["text"]),
        _field(50, RolloutLegacy, _LEGACY, "logs", ["line"], [1]),
        _field(51, RolloutLegacy, _LEGACY, "metadata", {"a": 1}, "text"),
        _field(54, Triplet, _TRIPLET, "reward", 0.5, "high"),
        _field(55, Triplet, _TRIPLET, "metadata", {"a": 1}, "text"),
    ],
)
@pytest.mark.claim(57)
def test_a_field_takes_what_it_is_for_and_refuses_the_rest(
    model: type[BaseModel], base: dict[str, Any], field: str, good: Any, bad: Any
) -> None:
    assert getattr(model(**{**base, field: good}), field) == good
    with pytest.raises(ValidationError):
        model(**{**base, field: bad})


@pytest.mark.parametrize(
    ("model", "base", "field"),
    [
        pytest.param(Task, _TASK, "rollout_id", marks=pytest.mark.claim(11)),
        pytest.param(Task, _TASK, "input", marks=pytest.mark.claim(12)),
        pytest.param(ResourcesUpdate, _UPDATE, "resources_id", marks=pytest.mark.claim(22)),
        pytest.param(ResourcesUpdate, _UPDATE, "resources", marks=pytest.mark.claim(23)),
        pytest.param(RolloutLegacy, _LEGACY, "rollout_id", marks=pytest.mark.claim(45)),
        pytest.param(Triplet, _TRIPLET, "prompt", marks=pytest.mark.claim(52)),
        pytest.param(Triplet, _TRIPLET, "response", marks=pytest.mark.claim(53)),
    ],
)
def test_a_required_field_cannot_be_left_out(model: type[BaseModel], base: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        model(**{name: value for name, value in base.items() if name != field})


@pytest.mark.claim(93, 18, 51, 55)
def test_optional_fields_have_sensible_defaults() -> None:
    task, legacy, triplet = Task(**_TASK), RolloutLegacy(**_LEGACY), Triplet(**_TRIPLET)

    assert task.model_dump(exclude={"rollout_id", "input"}) == {
        "mode": None,
        "resources_id": None,
        "create_time": None,
        "last_claim_time": None,
        "num_claims": None,
        "metadata": {},
    }
    assert (legacy.task, legacy.final_reward, legacy.triplets, legacy.trace, legacy.logs) == (None,) * 5
    assert legacy.metadata == triplet.metadata == {}


@pytest.mark.claim(12, 52, 53)
@pytest.mark.parametrize("payload", ["text", 3, None, {"a": [1]}, [1, "b"], 2.5, True])
def test_payloads_may_be_anything(payload: Any) -> None:
    assert Task(rollout_id="ro-1", input=payload).input == payload
    assert Triplet(prompt=payload, response=payload).prompt == payload


@pytest.mark.claim(10)
def test_task_comes_from_both_places() -> None:
    import agentlightning.types as types

    assert agl.Task is types.Task
    assert issubclass(agl.Task, BaseModel)


@pytest.mark.claim(19, 438)
def test_a_task_input_is_of_any_type() -> None:
    assert TaskInput is Any


@pytest.mark.parametrize(
    ("alias", "words"),
    [
        pytest.param(RolloutMode, {"train", "val", "test"}, marks=pytest.mark.claim(20, 442)),
        pytest.param(
            RolloutStatus,
            {"queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"},
            marks=pytest.mark.claim(440),
        ),
        pytest.param(
            AttemptStatus,
            {"preparing", "running", "failed", "succeeded", "unresponsive", "timeout"},
            marks=pytest.mark.claim(441),
        ),
        pytest.param(WorkerStatus, {"idle", "busy", "unknown"}),
    ],
)
def test_a_closed_set_has_exactly_these_words(alias: Any, words: set[str]) -> None:
    assert set(get_args(alias)) == words


@pytest.mark.parametrize(
    ("model", "names"),
    [
        pytest.param(
            Rollout,
            "rollout_id input start_time end_time mode resources_id status config metadata",
            marks=pytest.mark.claim(322),
        ),
        pytest.param(
            Attempt,
            "rollout_id attempt_id sequence_id start_time end_time status worker_id last_heartbeat_time metadata",
            marks=pytest.mark.claim(323),
        ),
        pytest.param(Triplet, "prompt response reward metadata", marks=pytest.mark.claim(326)),
        pytest.param(
            Task,
            "rollout_id input mode resources_id create_time last_claim_time num_claims metadata",
            marks=pytest.mark.claim(333),
        ),
        pytest.param(TaskIfAny, "is_available task", marks=pytest.mark.claim(76)),
    ],
)
def test_a_model_has_the_fields_of_the_notes(model: type[BaseModel], names: str) -> None:
    assert set(names.split()) <= set(model.model_fields)


@pytest.mark.claim(327)
def test_a_transition_has_the_fields_of_the_notes() -> None:
    transition = Transition(state=[1, 2], action=[3], response_id="r", agent_name="a", reward=0.5)

    assert (transition.state, transition.action, transition.reward) == ([1, 2], [3], 0.5)
    assert (transition.response_id, transition.agent_name) == ("r", "a")


@pytest.mark.claim(324, 325, 517)
def test_an_attempted_rollout_is_made_of_both_and_gives_both() -> None:
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-2", sequence_id=2, start_time=1.0)

    rollout = Rollout(rollout_id="ro-1", input="q", start_time=0.0, mode="val", output={"a": 1})

    both = AttemptedRollout(rollout=rollout, attempt=attempt)

    assert both == AttemptedRollout(**rollout.model_dump(), attempt=attempt)
    assert (both.rollout, both.attempt, both.input) == (rollout, attempt, "q")
    assert not isinstance(both.rollout, AttemptedRollout)


# ------------------------------------------------------------------ resources


@pytest.mark.claim(26, 443, 444)
def test_named_resources_map_names_to_resources() -> None:
    update = ResourcesUpdate(resources_id="rs-1", resources={"main": LLM(**_LLM)})

    assert typing.get_origin(NamedResources) is dict
    assert update.resources["main"].model == "m"  # type: ignore[union-attr] # it is the LLM that was given


@pytest.mark.claim(27)
@pytest.mark.parametrize(
    ("written", "kind"),
    [
        pytest.param({"resource_type": "llm", **_LLM}, LLM, id="llm"),
        pytest.param({"resource_type": "proxy_llm", **_LLM}, ProxyLLM, id="proxy_llm"),
        pytest.param({"resource_type": "prompt_template", **_PROMPT}, PromptTemplate, id="prompt_template"),
    ],
)
def test_a_resource_is_read_back_by_its_type(written: dict[str, Any], kind: type[Resource]) -> None:
    adapter: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)

    assert type(adapter.validate_python({"one": written})["one"]) is kind


@pytest.mark.parametrize(
    ("kind", "base", "parent", "word"),
    [
        pytest.param(LLM, _LLM, Resource, "llm", marks=pytest.mark.claim(28, 329, 330)),
        pytest.param(ProxyLLM, _LLM, LLM, "proxy_llm", marks=pytest.mark.claim(34, 331)),
        pytest.param(PromptTemplate, _PROMPT, Resource, "prompt_template", marks=pytest.mark.claim(38, 332)),
    ],
)
def test_a_resource_knows_its_type(kind: type[Resource], base: dict[str, Any], parent: type, word: str) -> None:
    assert kind(**base).resource_type == word
    assert issubclass(kind, parent)


@pytest.mark.claim(33)
def test_an_llm_has_a_base_url() -> None:
    assert LLM(**_LLM).get_base_url() == "http://localhost:8000/v1"


@pytest.mark.claim(35, 36, 37)
def test_a_proxied_llm_is_bound_to_an_attempt() -> None:
    shared: Any = {"api_key": "key", "sampling_parameters": {"temperature": 0.5}}
    proxied = ProxyLLM(**_LLM, **shared)
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0)
    rollout = AttemptedRollout(rollout_id="ro-1", input="q", start_time=0.0, attempt=attempt)

    bound = proxied.with_attempted_rollout(rollout)

    assert proxied._initialized
    assert type(bound) is LLM
    assert bound.endpoint == proxied.get_base_url("ro-1", "at-1")
    assert bound == LLM(endpoint="http://localhost:8000/rollout/ro-1/attempt/at-1/v1", model="m", **shared)


@pytest.mark.parametrize(
    ("engine", "template"),
    [
        pytest.param("f-string", "Answer: {question}", marks=pytest.mark.claim(41)),
        pytest.param("jinja", "Answer: {{question}}", marks=pytest.mark.claim(42)),
        pytest.param("poml", "<p>Answer: {{question}}</p>", marks=pytest.mark.claim(43)),
    ],
)
def test_a_template_is_filled(engine: Any, template: str) -> None:
    assert PromptTemplate(template=template, engine=engine).format(question="why?").strip() == "Answer: why?"


# ------------------------------------------------------------------ JSON


@pytest.mark.claim(58, 486)
@pytest.mark.parametrize(
    "model",
    [
        Task(**_TASK, mode="val", metadata={"a": [1]}),
        TaskIfAny(is_available=True, task=Task(**_TASK)),
        RolloutLegacy(**_LEGACY, task=Task(**_TASK), final_reward=0.5, triplets=[Triplet(**_TRIPLET)], logs=["l"]),
        GenericResponse(status="ok", message="stored"),
        Triplet(**_TRIPLET, reward=1.0),
        LLM(**_LLM, sampling_parameters={"temperature": 0.1}),
        PromptTemplate(**_PROMPT),
        ResourcesUpdate(resources_id="rs-1", resources={"llm": ProxyLLM(**_LLM), "p": PromptTemplate(**_PROMPT)}),
        Rollout(rollout_id="ro-1", input={"q": 1}, start_time=1.0, config=RolloutConfig(max_attempts=3)),
        Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=1.0, metadata={"a": 1}),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_goes_to_json_and_back(model: BaseModel) -> None:
    assert type(model).model_validate_json(model.model_dump_json()) == model


@pytest.mark.claim(445)
def test_a_data_set_is_anything_with_a_length_and_samples() -> None:
    assert {"__getitem__", "__len__"} <= set(vars(Dataset))
