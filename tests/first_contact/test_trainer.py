"""What one writes in the first hour with a Trainer: resources, an algorithm of one's own, a store, a port."""

import asyncio
from typing import Any

import pytest

import agentlightning as agl

RESOURCES = {"prompt": agl.PromptTemplate(template="Count: {task}", engine="f-string")}


@agl.rollout
def length_of(task: str, prompt_template: agl.PromptTemplate) -> float:
    return float(len(prompt_template.format(task=task)))


def fitted(algorithm: Any, **options: Any) -> agl.LightningStore:
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy="shm", progress="off", **options)
    trainer.fit(length_of, train_dataset=["one"])
    return store


def statuses_of(store: agl.LightningStore) -> list[str]:
    return [rollout.status for rollout in asyncio.run(store.query_rollouts())]


@agl.algo
async def send_all(*, store: agl.LightningStore, train_dataset: Any) -> None:
    sent = [await store.enqueue_rollout(task) for task in train_dataset]
    await store.wait_for_rollouts([rollout.rollout_id for rollout in sent])


class SendAll(agl.Algorithm):
    """Sends every task, without a coroutine."""

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store: Any = self.get_store()
        sent = [store.enqueue_rollout(task) for task in train_dataset]
        store.wait_for_rollouts([rollout.rollout_id for rollout in sent])


# ---------------------------------------------------------------------- resources


def test_no_resources_at_all_count_as_given() -> None:
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(algorithm=send_all, store=store, strategy="shm", progress="off", initial_resources={})

    trainer.fit(lambda task: 1.0, train_dataset=["one"])

    published = asyncio.run(store.get_latest_resources())
    assert statuses_of(store) == ["succeeded"]
    assert published is not None
    assert published.resources == {}


def test_initial_resources_of_dev_are_published_once() -> None:
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(store=store, strategy="shm", progress="off", initial_resources=RESOURCES)

    trainer.dev(length_of, train_dataset=["one"])

    (published,) = asyncio.run(store.query_resources())
    assert (published.version, published.resources) == (1, RESOURCES)


# ---------------------------------------------------------------------- a plain `run`


class Awaiting(agl.Algorithm):
    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        rollout = await self.get_store().enqueue_rollout(train_dataset[0])
        await self.get_store().wait_for_rollouts([rollout.rollout_id])


class Wrapping(agl.Algorithm):
    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = agl.BlockingStore(self.get_store())
        rollout = store.enqueue_rollout(train_dataset[0])
        store.wait_for_rollouts([rollout.rollout_id])
        store.close()


class Mixing(Awaiting):
    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        asyncio.run(super().run(train_dataset))


@pytest.mark.parametrize("kind", [SendAll, Awaiting, Wrapping, Mixing])
@pytest.mark.claim(157, 502)
def test_a_run_calls_the_store_plainly_awaits_it_wraps_it_or_runs_a_coroutine_that_awaits_it(kind: Any) -> None:
    assert statuses_of(fitted(kind(), initial_resources=RESOURCES)) == ["succeeded"]
