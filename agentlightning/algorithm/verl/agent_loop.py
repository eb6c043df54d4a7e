"""The agent loop that verl is given by `actor_rollout_ref.rollout.agent.agent_loop_manager_class`.

verl hands over a batch of prompts. Each prompt becomes a group of rollouts in our store, one for each session; whoever
runs the agents claims them there. Their model calls come through a proxy of ours to verl's own servers. When all
sessions of a group are over, their trajectories are put into verl's TransferQueue, and then the group is `finished`, or
`failure` if a session left nothing to learn from. A group that is late is cancelled, so that verl never waits for ever.
"""

import asyncio
import importlib
import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from agentlightning.adapter import TraceToTrajectory
from agentlightning.adapter.call_attributes import version_number, weights_version_of
from agentlightning.algorithm.batches import Batches, FinishedRollout, Sent
from agentlightning.algorithm.comparison import reward_of_failed
from agentlightning.algorithm.grpo.progress import spans_of_model
from agentlightning.algorithm.verl.client_engine import AttributedApp, ClientEngine, LlmClient, Sessions
from agentlightning.algorithm.verl.dataset import TASK
from agentlightning.algorithm.verl.launch import RunParts, read_parts
from agentlightning.algorithm.verl.trajectories import (
    SessionRows,
    TrajectorySettings,
    fields_of,
    placeholder_row,
    session_rows,
    tag_of,
    write_mismatches,
)
from agentlightning.engine.hf_codec import HfChatCodec, end_ids_of
from agentlightning.engine.server import KEEP_ALIVE_SECONDS, EngineApp
from agentlightning.errors import ConfigurationError, StoreError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import EnqueueRolloutRequest, NamedResources, RolloutConfig
from agentlightning.types.records import CURRENT_RUN
from agentlightning.utils.id import rollout_id as new_rollout_id
from agentlightning.utils.json_values import JsonMapping, JsonObject
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import LoopThread
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 60.0
"""How long calls and spans of a group that is over are waited for."""


@dataclass(frozen=True)
class _Prompt:
    """One row of verl's batch: a task, to be run in several sessions."""

    uid: str
    task: Any
    data_source: str
    reward_model: JsonMapping
    global_steps: int
    is_validation: bool

    @property
    def partition(self) -> str:
        return "val" if self.is_validation else "train"

    @property
    def own_version(self) -> int:
        """Of the weights that verl has published for this step, where its servers do not say."""
        return self.global_steps if self.is_validation else max(0, self.global_steps - 1)


@dataclass
class _Session:
    """What one rollout gives to learn from."""

    finished: FinishedRollout
    found: SessionRows
    versions: list[int]
    reward: float | None


class StoreAgentLoopManager:
    """verl's agent loop over a store of ours. `create` is what verl calls."""

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: LlmClient,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> "StoreAgentLoopManager":
        """Start the proxy and publish the model; ConfigurationError for what this loop cannot do."""
        if teacher_client is not None:
            raise ConfigurationError("distillation.enabled is true; the agent loop of Agent Lightning has no teacher.")
        if config.reward.reward_model.enable:
            raise ConfigurationError("reward.reward_model.enable is true; here the agents themselves give the rewards.")
        manager = cls(config, llm_client)
        manager._thread.run(manager._start())
        return manager

    def __init__(self, config: Any, llm_client: LlmClient) -> None:
        own = config.agentlightning
        self._config = config
        self._client = llm_client
        self._parts = _parts_of(own)
        self._store = self._parts.store
        self._adapter = self._parts.adapter or TraceToTrajectory()
        self._settings = TrajectorySettings.from_config(config)
        self._model = str(config.actor_rollout_ref.model.path)
        self._rollout_config = RolloutConfig(
            timeout_seconds=own.rollout_timeout_seconds, unresponsive_seconds=own.rollout_timeout_seconds
        )
        self._wait_seconds = float(own.wait_timeout_seconds)
        self._rollout_batches = Batches(self._store, self._rollout_config)
        self._queue: Any = importlib.import_module("transfer_queue")
        self._sessions = Sessions()
        self._resources_ids: dict[bool, str] = {}
        """By whether they are for validation."""
        self._end_id = 0
        self._batches: set[Future[None]] = set()
        self._thread = LoopThread("agl-verl")
        self._stack = AsyncExitStack()

    def generate_sequences(self, prompts: Any) -> None:
        """Have a batch run; returns at once, and the trajectories come through verl's TransferQueue."""

        def end(running: Future[None]) -> None:
            self._batches.discard(running)
            if not running.cancelled() and (error := running.exception()) is not None:
                logger.error("A batch of prompts was lost, and verl may wait for it for ever.", exc_info=error)

        running = self._thread.start_soon(self._run(_read_batch(prompts)))
        self._batches.add(running)
        running.add_done_callback(end)

    def close(self) -> None:
        """Stop the proxy; batches that still run are dropped. verl ends the process without calling it."""
        self._thread.run(self._stack.aclose())
        self._thread.stop()

    # ------------------------------------------------------------------ the model

    async def _start(self) -> None:
        rollout, data = self._config.actor_rollout_ref.rollout, self._config.data
        model = importlib.import_module("verl.utils.config").omega_conf_to_dataclass(
            self._config.actor_rollout_ref.model
        )
        end_ids = end_ids_of(model.tokenizer, model.generation_config)
        self._end_id = min(end_ids)
        codec = HfChatCodec(model.tokenizer, end_ids=end_ids, template_options=data.get("apply_chat_template_kwargs"))
        engine = ClientEngine(
            self._client,
            self._sessions,
            name=self._model,
            end_ids=end_ids,
            max_length=rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length,
            max_new_tokens=rollout.response_length,
        )
        key = secrets.token_urlsafe(32)
        app = EngineApp(engine, codec, api_key=key)
        await self._stack.enter_async_context(app.running())
        arguments = PythonServerLauncherArgs(
            host="127.0.0.1", port=0, timeout_keep_alive=KEEP_ALIVE_SECONDS, launch_mode="asyncio"
        )
        launcher = PythonServerLauncher(AttributedApp(app), arguments)
        await launcher.start()
        self._stack.push_async_callback(launcher.stop)
        await self._serve(f"http://127.0.0.1:{launcher.port}/v1", key)

    async def _serve(self, address: str, key: str) -> None:
        """Put the proxy before the engine and publish it, for training and for validation."""
        seconds = self._rollout_config.timeout_seconds
        # A proxy with a key takes calls of attempts that run alone, and the key of an attempt ends with it.
        proxy = self._parts.llm_proxy or LLMProxy(api_key=secrets.token_urlsafe(32), deadline_seconds=seconds)
        proxy.set_store(self._store)
        parameters = {"model": f"agl/{self._model}", "api_base": address, "api_key": key, "timeout": seconds}
        others = [entry for entry in proxy.model_list if entry["model_name"] != self._model]
        proxy.update_model_list([*others, {"model_name": self._model, "litellm_params": parameters}])
        CURRENT_RUN.set(self._parts.run_id)  # the trainer's own context is in another process
        await asyncio.to_thread(proxy.start)
        self._stack.push_async_callback(asyncio.to_thread, proxy.stop)
        for is_validation in (True, False):  # the resources of training are the latest
            temperature = self._sampling(is_validation)["temperature"]
            llm = proxy.as_resource(model=self._model, sampling_parameters={"temperature": temperature})
            resources: NamedResources = {**(self._parts.initial_resources or {}), "main_llm": llm}
            update = await self._store.add_resources(resources)
            self._resources_ids[is_validation] = update.resources_id
        logger.info("verl's model '%s' is served at %s.", self._model, proxy.endpoint)

    def _sampling(self, is_validation: bool) -> JsonObject:
        rollout = self._config.actor_rollout_ref.rollout
        chosen = rollout.val_kwargs if is_validation else rollout
        names = ("temperature", "top_p", "top_k")
        return {name: chosen[name] for name in names} | {"repetition_penalty": 1.0}

    # ------------------------------------------------------------------ a batch

    async def _run(self, prompts: Sequence[_Prompt]) -> None:
        first = prompts[0]
        uids = [prompt.uid for prompt in prompts]
        await self._set_status(uids, first.partition, "running")
        rollout = self._config.actor_rollout_ref.rollout
        copies = rollout.val_kwargs.n if first.is_validation else rollout.n
        ids_by_uid = {uid: [new_rollout_id() for _ in range(copies)] for uid in uids}
        sampling = self._sampling(first.is_validation)
        for rollout_ids in ids_by_uid.values():
            for rollout_id in rollout_ids:  # before it is in the queue: a runner may call at once
                self._sessions.open(rollout_id, sampling)
        requests = [request for prompt in prompts for request in self._requests(prompt, ids_by_uid[prompt.uid])]
        is_sent = False
        with log_failures(logger, "%d prompts could not be enqueued.", len(uids)):
            await self._store.enqueue_many_rollouts(requests)
            is_sent = True
        if not is_sent:  # verl must be told of every group
            await self._sessions.close([one for ids in ids_by_uid.values() for one in ids], 0.0)
            await self._set_status(uids, first.partition, "failure")
            return
        settled = await asyncio.gather(*(self._settle(prompt, ids_by_uid[prompt.uid]) for prompt in prompts))
        await self._report(first, [session for sessions in settled for session in sessions])

    def _requests(self, prompt: _Prompt, rollout_ids: Sequence[str]) -> list[EnqueueRolloutRequest]:
        named = {"run_id": self._parts.run_id, "step": prompt.global_steps - 1, "group": prompt.uid}
        return [
            EnqueueRolloutRequest(
                input=prompt.task,
                mode="val" if prompt.is_validation else "train",
                resources_id=self._resources_ids[prompt.is_validation],
                config=self._rollout_config,
                metadata={"data_id": prompt.uid, "is_train": not prompt.is_validation, "session": session, **named},
                rollout_id=rollout_id,
            )
            for session, rollout_id in enumerate(rollout_ids)
        ]

    async def _settle(self, prompt: _Prompt, rollout_ids: Sequence[str]) -> list[_Session]:
        """Wait for the sessions of a prompt and put what they left; the status of the group comes last."""
        status, sessions = "failure", list[_Session]()
        try:  # verl must be told that the group is over, whatever happens
            with log_failures(logger, "The sessions of prompt '%s' could not be collected.", prompt.uid):
                finished = await self._finished(prompt, rollout_ids)
                # What failed counts as the settings say, and in validation the worst.
                own = [one.own_reward for one in finished if one.own_reward is not None]
                failed = reward_of_failed("worst" if prompt.is_validation else self._settings.failed, own)
                sessions = await asyncio.to_thread(lambda: [self._session(prompt, one, failed) for one in finished])
                if await self._put(prompt, sessions):
                    status = "finished"
        finally:
            await self._sessions.close(rollout_ids, CLOSE_SECONDS)
            await self._set_status([prompt.uid], prompt.partition, status)
        return sessions

    async def _finished(self, prompt: _Prompt, rollout_ids: Sequence[str]) -> list[FinishedRollout]:
        """All rollouts of a group in a state that does not change any more."""
        done = await self._store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=self._wait_seconds)
        over = {rollout.rollout_id for rollout in done}
        if late := [one for one in rollout_ids if one not in over]:
            logger.warning(
                "%d of %d rollouts of prompt '%s' are not over after %g s and are cancelled; start more runners, or "
                "raise agentlightning.wait_timeout_seconds.",
                *(len(late), len(rollout_ids), prompt.uid, self._wait_seconds),
            )
            await self._rollout_batches.withdraw(late)
        await self._sessions.close(rollout_ids, CLOSE_SECONDS)
        sent = Sent(dict.fromkeys(rollout_ids, prompt.uid))
        return await asyncio.wait_for(self._rollout_batches.gather(sent), CLOSE_SECONDS)

    def _session(self, prompt: _Prompt, finished: FinishedRollout, failed: float | None) -> _Session:
        reward = failed if finished.own_reward is None else finished.own_reward
        if finished.own_reward is None:
            logger.info("Rollout '%s' counts as failed: %s", finished.rollout.rollout_id, finished.failure)
        spans = spans_of_model(finished.spans, self._model)
        found, versions = SessionRows(), list[int]()
        if spans and reward is not None:
            try:
                trace = self._adapter.adapt(spans)
                found = session_rows(trace, self._settings)
            except ValueError as error:
                logger.warning("The spans of rollout '%s' cannot be read: %s", finished.rollout.rollout_id, error)
            else:
                if self._settings.mismatch_folder is not None:
                    write_mismatches(finished.rollout.rollout_id, prompt.uid, trace, self._settings.mismatch_folder)
            told = {version_number(weights_version_of(span.attributes)) for span in spans}
            versions = [one for one in told if one is not None]
        return _Session(finished, found, versions or [prompt.own_version], reward)

    # ------------------------------------------------------------------ verl's TransferQueue

    async def _put(self, prompt: _Prompt, sessions: Sequence[_Session]) -> bool:
        """Put the trajectories of a group; whether every session has one."""
        keys: list[str] = []
        fields: list[JsonObject] = []
        tags: list[JsonObject] = []
        is_complete = True
        for number, session in enumerate(sessions):
            rows = session.found.rows
            is_complete = is_complete and bool(rows)
            if not rows and prompt.is_validation:
                rows = (placeholder_row(self._end_id),)
            if session.reward is None:
                continue
            others = self._other_fields(prompt, session)
            for index, row in enumerate(rows):
                keys.append(f"{prompt.uid}_{number}_{index}")
                fields.append(fields_of(row, session.reward, others))
                tags.append(tag_of(row, global_steps=prompt.global_steps, versions=session.versions))
        if keys:
            stacked = importlib.import_module("verl.utils.tensordict_utils").list_of_dict_to_tensordict(fields)
            await self._queue.async_kv_batch_put(keys=keys, fields=stacked, tags=tags, partition_id=prompt.partition)
        return is_complete

    def _other_fields(self, prompt: _Prompt, session: _Session) -> JsonObject:
        rollout = session.finished.rollout
        return {
            "num_turns": session.found.calls,
            "uid": prompt.uid,
            "data_source": prompt.data_source,
            "reward_model": dict(prompt.reward_model),
            "extra_fields": {
                "rollout_id": rollout.rollout_id,
                "min_global_steps": min(session.versions),
                "max_global_steps": max(session.versions),
                "reward_extra_info": {"failed": float(session.finished.own_reward is None)},
            },
        }

    async def _set_status(self, uids: Sequence[str], partition: str, status: str) -> None:
        tags = [{"status": status} for _ in uids]
        await self._queue.async_kv_batch_put(keys=list(uids), partition_id=partition, tags=tags)

    async def _report(self, prompt: _Prompt, sessions: Sequence[_Session]) -> None:
        """Add what became of a batch to the run in the store, and say what was left out of it."""
        prefix = "val" if prompt.is_validation else "training"
        found = [session.found for session in sessions]
        metrics = {
            "n_rollouts": len(sessions),
            "n_rollouts_w_trace": sum(bool(one.rows) for one in found),
            "n_rollouts_failed": sum(session.finished.own_reward is None for session in sessions),
            "n_triplets": sum(len(one.rows) for one in found),
            "n_triplets_prompt_too_long": sum(one.too_long for one in found),
            "n_truncated_triplets": sum(one.truncated for one in found),
            "n_calls_without_tokens": sum(one.without_tokens for one in found),
        }
        named = {f"{prefix}/{name}": float(value) for name, value in metrics.items()}
        if rewards := [session.reward for session in sessions if session.reward is not None]:
            named[f"{prefix}/reward"] = fmean(rewards)
        logger.info("Step %d: %s", prompt.global_steps, named)
        if self._parts.run_id is not None:
            try:
                await self._store.add_metrics(self._parts.run_id, prompt.global_steps, named)
            except StoreError as error:
                logger.warning("The metrics of step %d could not be stored: %s", prompt.global_steps, error)


def _parts_of(own: Any) -> RunParts:
    """What the program left for us, or the store that the configuration names."""
    if folder := own.get("run_folder"):
        return read_parts(folder)
    if url := own.get("store_url"):
        return RunParts(store=LightningStoreClient(url))
    raise ConfigurationError(
        "verl's configuration names no store; start the training with agl.Trainer(algorithm=agl.VERL(config)), or set "
        "agentlightning.store_url to the address of `agl store`."
    )


def _read_batch(batch: Any) -> list[_Prompt]:
    columns = {name: _column(batch, name) for name in ("uid", TASK, "data_source", "reward_model", "global_steps")}
    is_validation = bool(batch["validate"]) if "validate" in batch else False
    if any("_" in uid for uid in columns["uid"]):
        raise ConfigurationError("A uid of verl's batch has an underscore, which separates the parts of its keys.")
    return [
        _Prompt(uid, task["input"], data_source, reward_model or {}, int(global_steps), is_validation)
        for uid, task, data_source, reward_model, global_steps in zip(*columns.values(), strict=True)
    ]


def _column(batch: Any, name: str) -> list[Any]:
    """The values of a column, one for each row; what holds for the whole batch is repeated."""
    if name not in batch:
        raise ConfigurationError(
            f"verl's batch has no column '{name}'; leave data.custom_cls as it is, at our AgentDataset."
        )
    values = batch.get(name)
    return list(values.tolist()) if hasattr(values, "tolist") else [getattr(values, "data", values)] * len(batch)
