"""Which POML templates agents may format: the program's own, and those of the store where that was allowed."""

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm import algo
from agentlightning.cli import main
from agentlightning.errors import TemplateNotAllowed, TrainingError
from agentlightning.execution import ClientServerExecutionStrategy
from agentlightning.litagent import rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, SqliteLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.trainer import Trainer
from agentlightning.types import NamedResources, PromptTemplate
from tests.e2e.server_process import ServerProcess, free_port

OWN = PromptTemplate(template="<poml><p>Own {{ name }}</p></poml>", engine="poml")
FOREIGN = PromptTemplate(template="<poml><p>Foreign {{ name }}</p></poml>", engine="poml")


@rollout
def formatting(task: Any, prompt_template: PromptTemplate) -> float:
    """Fails where the template may not be formatted."""
    assert prompt_template.format(name="Ada").endswith("Ada")
    return 1.0


@algo
async def publishing(*, store: LightningStore, train_dataset: Any) -> None:
    """Has an agent run with each of the templates that are its tasks."""
    for template in train_dataset:
        update = await store.add_resources({"prompt": template})
        sent = await store.enqueue_rollout("task", resources_id=update.resources_id)
        await store.wait_for_rollouts(rollout_ids=[sent.rollout_id], timeout=100)


@pytest.fixture(autouse=True)
def nothing_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGL_ALLOW_POML", "AGL_STORE_TOKEN", "AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allowed is rendered by nobody, in this process and in its forks; node takes a second each time."""
    monkeypatch.setattr("agentlightning.types.resources.render_poml", lambda template, values: str(values["name"]))


def statuses(store: LightningStore) -> list[str]:
    return [one.status for one in asyncio.run(store.query_rollouts(sort_by="start_time"))]


def fitted(strategy: Any, templates: list[PromptTemplate], **options: Any) -> list[str]:
    """How the rollouts with these templates ended."""
    resources: NamedResources = {"prompt": OWN}
    options = {"initial_resources": resources, "tracer": DummyTracer(), "progress": "off", **options}
    trainer = Trainer(strategy=strategy, algorithm=publishing, **options)
    with suppress(TrainingError):  # every rollout failed
        trainer.fit(formatting, templates)
    return statuses(trainer.store)


def over(name: str) -> Any:
    if name == "shm":
        return name
    return ClientServerExecutionStrategy(server_port=free_port(), start_method=name)  # type: ignore[arg-type] # fork or spawn


# ---------------------------------------------------------------------- out of a store


@pytest.fixture(params=["memory", "sqlite", "client"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LightningStore]:
    if request.param == "memory":
        yield InMemoryLightningStore()
    elif request.param == "sqlite":
        yield SqliteLightningStore(tmp_path / "runs.db")
    else:
        with ServerProcess() as server:
            yield LightningStoreClient(server.url)


async def test_a_poml_template_out_of_a_store_is_refused_with_the_way_out(store: LightningStore) -> None:
    async with store:
        added = await store.add_resources({"prompt": FOREIGN})
        latest, found = await store.get_latest_resources(), await store.get_resources_by_id(added.resources_id)
        (queried,) = await store.query_resources()

    for update in (added, latest, found, queried):
        assert update is not None
        template = update.resources["prompt"]
        assert isinstance(template, PromptTemplate)
        for one in (template, template.model_copy(deep=True), pickle.loads(pickle.dumps(template))):
            with pytest.raises(TemplateNotAllowed, match=r"AGL_ALLOW_POML=1, Trainer\(allow_poml=True\)"):
                one.format(name="Ada")


async def test_a_template_out_of_a_store_equals_the_one_that_went_in() -> None:
    update = await InMemoryLightningStore().add_resources({"prompt": FOREIGN})

    assert update.resources == {"prompt": FOREIGN}
    assert update.resources != {"prompt": OWN}


async def test_templates_of_other_engines_are_filled_wherever_they_come_from() -> None:
    resources: NamedResources = {"prompt": PromptTemplate(template="Hello {name}", engine="f-string")}

    update = await InMemoryLightningStore().add_resources(resources)

    template = update.resources["prompt"]
    assert isinstance(template, PromptTemplate)
    assert template.format(name="Ada") == "Hello Ada"


async def test_the_program_may_format_what_it_put_into_a_store_and_what_the_environment_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentlightning.types.resources.render_poml", lambda template, values: f"{template} {values}")
    update = await InMemoryLightningStore().add_resources({"prompt": FOREIGN})
    rendered = FOREIGN.format(name="Ada")

    monkeypatch.setenv("AGL_ALLOW_POML", "1")

    template = update.resources["prompt"]
    assert isinstance(template, PromptTemplate)
    assert template.format(name="Ada") == rendered


# ---------------------------------------------------------------------- in runners


@pytest.mark.slow
@pytest.mark.usefixtures("no_node")
@pytest.mark.parametrize("strategy", ["shm", "fork", "spawn"])
def test_runners_format_the_initial_resources_and_no_other_poml(strategy: str) -> None:
    assert fitted(over(strategy), [OWN, FOREIGN]) == ["succeeded", "failed"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_node")
@pytest.mark.parametrize("strategy", ["shm", "fork"])
def test_the_trainer_allows_poml_in_all_runners(strategy: str) -> None:
    assert fitted(over(strategy), [FOREIGN], allow_poml=True) == ["succeeded"]


@pytest.mark.slow
def test_a_template_from_a_store_stays_one_as_an_initial_resource() -> None:
    update = asyncio.run(InMemoryLightningStore().add_resources({"prompt": FOREIGN}))

    assert fitted("shm", [FOREIGN], initial_resources=update.resources) == ["failed"]


@pytest.mark.usefixtures("no_node")
async def test_resources_of_a_step_are_the_programs_own() -> None:
    runner: LitAgentRunner[Any] = LitAgentRunner(DummyTracer(), heartbeat_interval=0)
    store = InMemoryLightningStore()

    with runner.run_context(agent=formatting, store=store):
        done = await runner.step("task", resources={"prompt": OWN})
        await store.add_resources({"prompt": FOREIGN})
        with pytest.raises(TemplateNotAllowed):
            await runner.step("task")

    assert done.status == "succeeded"


@pytest.mark.usefixtures("no_node")
@pytest.mark.parametrize(("options", "status"), [([], "failed"), (["--allow-poml"], "succeeded")])
def test_a_runner_of_the_command_line_formats_poml_where_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], status: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poml_agent.py").write_text("from tests.trainer.test_poml_permission import formatting as agent\n")
    with ServerProcess() as server:
        client = LightningStoreClient(server.url)

        async def enqueue() -> None:
            async with client:
                await client.add_resources({"prompt": FOREIGN})
                await client.enqueue_rollout("task")

        asyncio.run(enqueue())
        assert main(["runner", "--store", server.url, "--max-rollouts", "1", *options, "poml_agent:agent"]) == 0

        assert statuses(LightningStoreClient(server.url)) == [status]
