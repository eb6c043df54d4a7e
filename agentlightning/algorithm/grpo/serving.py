"""The policies of a training as agents reach them: an engine behind each, and one proxy before all.

The proxy stamps every call with the version of its entry, so the entry is replaced after each publication. A call that
began before it keeps the older stamp, also where its last tokens come from newer weights: at worst it looks older than
it is, and `max_staleness` holds.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from agentlightning.algorithm.grpo.policy import Policy, undisturbed
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.types import NamedResources

__all__ = ["ServedPolicies"]

MAIN: Final = "main_llm"


class ServedPolicies:
    """What `serve` begins ends with its stack."""

    def __init__(self, policies: Sequence[Policy], overrides: Mapping[str, dict[str, Any]]) -> None:
        """Prepare; nothing runs before `serve`.

        Args:
            overrides: Sampling parameters, by id of the resources, that are used whatever agents ask for.
        """
        self._policies = policies
        self._overrides = overrides
        self._proxy: LLMProxy | None = None
        self._others: list[Any] = []
        """Entries of the proxy that are not ours."""
        self._ours: list[Any] = []

    @property
    def proxy(self) -> LLMProxy:
        assert self._proxy is not None
        return self._proxy

    async def serve(
        self, stack: AsyncExitStack, given: LLMProxy | None, store: LightningStore, *, is_training: bool
    ) -> None:
        """Start the engines, and have a proxy serve them beside its other models.

        Args:
            stack: Undoes all of it.
            given: The trainer's proxy; without one, we have our own.
            is_training: Load what learns as well.
        """
        for policy in self._policies:
            stack.push_async_callback(policy.stop)
        await self._start(is_training)
        self._proxy = proxy = LLMProxy(store=store, journal=False) if given is None else given
        before = list(proxy.model_list)
        stack.callback(proxy.update_model_list, before)
        names = {policy.name for policy in self._policies}
        self._others = [entry for entry in before if entry["model_name"] not in names]
        await self._announce()
        if not proxy.is_running():
            proxy.start()
            stack.push_async_callback(proxy.stop)

    async def _start(self, is_training: bool) -> None:
        starts = [policy.start if is_training else policy.start_engine for policy in self._policies]
        if all(policy.is_embedded for policy in self._policies):
            await undisturbed(*(start() for start in starts))
            return
        for start in starts:  # one after the other: each measures how much memory of the GPU is left
            await start()

    def resources(self, initial: NamedResources | None, temperature: float) -> NamedResources:
        """What agents run with: the models, and whatever the user put beside them."""
        resources: NamedResources = dict(initial or {})
        for policy in self._policies:
            name = MAIN if len(self._policies) == 1 else policy.name
            resources[name] = self.proxy.as_resource(
                model=policy.name, sampling_parameters={"temperature": temperature}
            )
        return resources

    async def publish_first(self, *, is_restored: bool) -> None:
        """Give engines the weights that training begins with, unless they have loaded the same themselves."""
        for policy in self._policies:
            if is_restored or not policy.is_embedded:
                await undisturbed(self.publish(policy))

    async def publish(self, policy: Policy) -> dict[str, float]:
        """Give a policy's engine its new weights, and have the proxy stamp calls with their version."""
        figures = await policy.publish()
        await self._announce()
        return figures

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """A block in which no call comes, so that engines that share a GPU with the learner may sleep."""
        try:
            await undisturbed(*(policy.sleep() for policy in self._policies))
            yield
        finally:
            await undisturbed(*(policy.wake() for policy in self._policies))

    async def _announce(self) -> None:
        ours = [policy.model_config(self._overrides) for policy in self._policies]
        if ours != self._ours:
            await asyncio.to_thread(self.proxy.update_model_list, [*self._others, *ours])
            self._ours = ours
