"""ClientServerExecutionStrategy: algorithm and runners as processes, on one machine or many, around a store server."""

import asyncio
import copy
import errno
import functools
import logging
import os
import secrets
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, Final, Literal, get_args

from agentlightning.env_var import LightningEnvVar, resolve_int_env_var, resolve_str_env_var
from agentlightning.errors import ConfigurationError, RunnersKilled
from agentlightning.execution import processes as children
from agentlightning.execution.base import (
    AlgorithmBundle,
    ExecutionStrategy,
    PreparingBundle,
    RunnerBundle,
    at_start,
    owned_by,
    resolve_managed_store_flag,
)
from agentlightning.execution.events import ExecutionEvent, MultiprocessingEvent, StopToken, run_until_stopped
from agentlightning.execution.watch import PlacedRunners, Watch
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.forwarding import innermost
from agentlightning.store.http.codec import prepare_codecs
from agentlightning.store.http.reader_file import LOOPBACK, reader_token_file
from agentlightning.store.http.tokens import refuse_open_address
from agentlightning.utils.deadline import POLL_SECONDS, until
from agentlightning.utils.server_launcher import reserved_socket
from agentlightning.utils.spelling import suggests_arguments

__all__ = ["ClientServerExecutionStrategy"]

logger = logging.getLogger(__name__)

DEFAULT_PORT: Final = 4747
LEAVING = "Leaving when what runs has finished, in {:g} s at the latest; Ctrl-C again leaves at once."

REPORT_SECONDS: Final = 2.0
"""How much longer than their grace runners are served, so that they can tell what they had to leave."""
Role = Literal["algorithm", "runner", "both"]
_SERVER_SECONDS: Final = 30.0
"""How long a runner waits for the server to come up, in silence."""
_CONNECT_SECONDS: Final = 0.025
"""Between two tries to connect."""


@suggests_arguments
class ClientServerExecutionStrategy(ExecutionStrategy):
    """The algorithm serves the store; runners are clients of it, each in a process of its own.

    A store that is a client of a server already is not served again: runners are clients of that server. Where both
    sides run here, the server demands a token: AGL_STORE_TOKEN, or one that only this training and its runners have.

    On several machines, start the same script with AGL_CURRENT_ROLE=algorithm on one and AGL_CURRENT_ROLE=runner on the
    others, with AGL_SERVER_HOST and AGL_SERVER_PORT saying where the algorithm is.
    """

    alias = "cs"
    _token: str | None = None
    """What the server of both sides demands; None leaves it to AGL_STORE_TOKEN."""

    def __init__(
        self,
        role: Role | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 5.0,
        terminate_timeout: float = 5.0,
        main_process: Literal["algorithm", "runner"] = "algorithm",
        managed_store: bool | None = None,
        allowed_exit_codes: Sequence[int] = (0, -15),
        *,
        max_restarts: int = 0,
        start_method: Literal["fork", "spawn"] | None = None,
        insecure: bool = False,
    ) -> None:
        """Nothing runs yet.

        Args:
            role: Which side runs here; AGL_CURRENT_ROLE if left out, else both.
            server_host: Where the store is served; AGL_SERVER_HOST if left out, else localhost.
            server_port: Its port; AGL_SERVER_PORT if left out, else 4747, or a free one where that is taken and both
                sides run here. 0 takes one that is free now, and keeps it.
            n_runners: How many runner processes.
            graceful_timeout: Seconds a process has to end by itself once it is told to.
            terminate_timeout: Seconds it has after each stronger signal.
            main_process: Which side runs in the calling process, where a debugger is.
            managed_store: False if the store is reached by other means than our server; None asks AGL_MANAGED_STORE.
            allowed_exit_codes: With which a runner may end.
            max_restarts: How often each runner that died is started again.
            start_method: How processes are made; fork where there is fork, if left out. With spawn the agent, the
                runner and the hooks must be picklable.
            insecure: Serve without a token, other machines too.
        """
        self.role = resolve_str_env_var(LightningEnvVar.AGL_CURRENT_ROLE, role, "both")
        if self.role not in get_args(Role):
            raise ConfigurationError(f"role must be algorithm, runner or both; it is {self.role!r}.")
        self.server_host = resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST, server_host, "localhost")
        self._reserved: socket.socket | None = None
        given_port = resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, server_port)
        self._own_port = DEFAULT_PORT if given_port is None else None
        """A port that nobody asked for, and that another may replace."""
        self.set_port(DEFAULT_PORT if given_port is None else given_port)
        if n_runners < 1:
            raise ConfigurationError(f"n_runners must be at least 1; it is {n_runners}.")
        if main_process == "runner" and self.role != "both":
            raise ConfigurationError(f"main_process='runner' requires role 'both'; it is {self.role!r}.")
        if main_process == "runner" and n_runners != 1:
            raise ConfigurationError(f"main_process='runner' requires n_runners to be 1; it is {n_runners}.")
        if main_process not in ("algorithm", "runner"):
            raise ConfigurationError(f"main_process must be 'algorithm' or 'runner'; it is {main_process!r}.")
        self.n_runners = n_runners
        self.graceful_timeout = graceful_timeout
        self.terminate_timeout = terminate_timeout
        self.main_process = main_process
        self.managed_store = resolve_managed_store_flag(managed_store)
        self.allowed_exit_codes = tuple(allowed_exit_codes)
        self.max_restarts = max_restarts
        self.start_method = start_method
        self.insecure = insecure

    def set_port(self, port: int) -> None:
        """Serve the store on another port; 0 takes one that is free now, and keeps it from others until then."""
        self.release_port()
        self.server_port = port or self._reserve(0)

    def _reserve(self, port: int) -> int:
        self._reserved = reserved_socket(self.server_host, port)
        weakref.finalize(self, self._reserved.close)
        bound: int = self._reserved.getsockname()[1]
        return bound

    def release_port(self) -> None:
        """Let go of a port that was kept; a runner's process does, or the port would outlive the server."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.close()

    def _secure_port(self, store: LightningStore) -> None:
        """Keep the default port for the server; where somebody has it already, keep a free one."""
        if self.server_port != self._own_port or not self._serves(store):
            return
        taken = self.server_port
        self.release_port()
        try:
            self._reserve(taken)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # the server says what is wrong with the address
            self.set_port(0)
            self._own_port = self.server_port
            logger.warning(
                "Port %d is taken, so this training serves its store on port %d; to use a store that is served there "
                "already, write Trainer(store='http://%s:%d').",
                taken,
                self.server_port,
                self.server_host,
                taken,
            )

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_reserved": None}

    # ------------------------------------------------------------------ the store

    def _serves(self, store: LightningStore) -> bool:
        """Whether a server of ours makes the store reachable; a store on a server is reachable already."""
        return self.managed_store and not isinstance(innermost(store), LightningStoreClient)

    def _client(self, store: LightningStore | None) -> LightningStoreClient | None:
        """What runners use in the place of the store, where None is one that we serve; None if they use it itself."""
        if not self.managed_store:
            return None
        inner = None if store is None else innermost(store)
        if isinstance(inner, LightningStoreClient):
            return copy.copy(inner)  # the same address, token and patience, and connections of its own
        return LightningStoreClient(f"http://{self._bound_host}:{self.server_port}", **self._credentials)

    @property
    def _credentials(self) -> dict[str, Any]:
        return {} if self._token is None else {"token": self._token}

    @property
    def _bound_host(self) -> str:
        """Where the server listens; a token is not shown at the other address of localhost, which others may have."""
        return LOOPBACK if self.server_host == "localhost" and self._token is not None else self.server_host

    # ------------------------------------------------------------------ the two sides

    async def _execute_algorithm(
        self,
        algorithm: AlgorithmBundle,
        store: LightningStore,
        stop_evt: ExecutionEvent,
        runners: PlacedRunners | None = None,
    ) -> None:
        """Serve the store and run the algorithm against it; an algorithm that prepares it first is served then.

        Args:
            runners: Those that we placed, which are stopped when the algorithm has ended; None if others place them.
        """
        runners = runners or PlacedRunners()
        server: LightningStoreServer | None = None
        served = ExitStack()
        try:
            if self._serves(store):
                server = self._server(store)
                start = functools.partial(self._start_server, server, served)
                if isinstance(algorithm, PreparingBundle):
                    algorithm.on_prepared = start
                else:
                    await start()
            served_store = store if server is None else server
            async with Watch(algorithm, served_store, stop_evt, runners, grace_seconds=self.graceful_timeout):
                await algorithm(served_store, stop_evt)
        except BaseException:
            stop_evt.set()
            raise
        finally:
            await runners.dismiss(self.graceful_timeout + REPORT_SECONDS)  # while they are served, so that they report
            served.close()
            if server is not None:
                await server.stop()

    def _server(self, store: LightningStore) -> LightningStoreServer:
        token = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, None)
        refuse_open_address(self.server_host, token, is_insecure=self.insecure, option="server_host")
        server = LightningStoreServer(store, host=self._bound_host, port=self.server_port, **self._credentials)
        if self._reserved is not None and self._reserved.getsockname()[1] == self.server_port:
            server.launcher_args.reserved, self._reserved = self._reserved, None
        return server

    async def _start_server(self, server: LightningStoreServer, served: ExitStack) -> None:
        await server.start()
        if self._token is not None:
            served.enter_context(reader_token_file(self.server_host, self.server_port, self._token))

    async def _execute_runner(
        self, runner: RunnerBundle, worker_id: int, store: LightningStore | None, stop_evt: ExecutionEvent
    ) -> None:
        """Run one worker as a client of the store; None is one that we serve."""
        client: LightningStoreClient | None = None
        try:
            client = self._client(store)
            if store is None or self._serves(store):
                await self._until_served(stop_evt)
            used = client or store
            assert used is not None  # a store that we do not serve is given
            await runner(used, worker_id, stop_evt)
        except BaseException:
            stop_evt.set()
            raise
        finally:
            if client is not None:
                await client.close()

    async def _until_served(self, stop: ExecutionEvent) -> None:
        """Wait for the server, which starts beside us; one that does not come in time is the client's business."""
        for _ in range(round(_SERVER_SECONDS / _CONNECT_SECONDS)):
            try:
                _, writer = await asyncio.open_connection(self._bound_host, self.server_port)
            except OSError:
                if await until(stop.is_set, timeout_seconds=_CONNECT_SECONDS):
                    return
            else:
                writer.close()
                return

    # ------------------------------------------------------------------ processes

    def _spawn_runners(
        self, runner: RunnerBundle, store: LightningStore, stop_evt: ExecutionEvent, *, ctx: Any, deaths: Any = None
    ) -> list[BaseProcess]:
        """Start the runners; the queue `deaths` gets number and exit code of each that dies and is started again."""
        # Not every store can travel: runners need none that we serve, and of another server's only the client.
        owned = None if self._serves(store) else self._client(store) or store
        started: list[BaseProcess] = []
        for number in range(self.n_runners):
            work = functools.partial(self._work_in_child, runner, number, owned, stop_evt)
            if self.max_restarts > 0:
                restarts = (deaths or ctx.SimpleQueue(), number, self.max_restarts, self.allowed_exit_codes)
                work = functools.partial(children.restart_on_failure, work, stop_evt, *restarts)
            started.append(children.start_process(ctx, work, f"runner-{number}"))
        return started

    def _work_in_child(
        self, runner: RunnerBundle, number: int, store: LightningStore | None, stop: ExecutionEvent, start: int = 0
    ) -> None:
        run = functools.partial(self._run_in_runner_process, at_start(runner, start), number, store)
        children.run_in_child(run, stop, self.graceful_timeout)

    def _spawn_algorithm_process(
        self,
        algorithm: AlgorithmBundle,
        store: LightningStore,
        stop_evt: ExecutionEvent,
        *,
        ctx: object,
        runners: PlacedRunners | None = None,
    ) -> BaseProcess:
        run = functools.partial(self._execute_algorithm, algorithm, store, runners=runners)
        work = functools.partial(children.run_in_child, run, stop_evt, self.graceful_timeout)
        return children.start_process(ctx, work, "algorithm")

    async def _run_in_runner_process(
        self, runner: RunnerBundle, number: int, store: LightningStore | None, stop: ExecutionEvent
    ) -> None:
        self.release_port()
        token = StopToken(stop)
        signal.signal(signal.SIGINT, token.interrupt)
        work = self._execute_runner(runner, number, store, token)
        await run_until_stopped(work, token.is_set, self.graceful_timeout)

    def _join_until_deadline(self, processes: Sequence[BaseProcess], timeout: float) -> list[BaseProcess]:
        """Wait for all, for so long altogether; returns those that still run."""
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process for process in processes if process.is_alive()]

    def _shutdown_processes(self, processes: Sequence[BaseProcess], stop_evt: ExecutionEvent) -> None:
        """Set the stop event, and send those that do not end ever stronger signals."""
        if not processes:
            return
        stop_evt.set()
        alive = self._join_until_deadline(processes, self.graceful_timeout)
        steps: tuple[tuple[str, Callable[[BaseProcess], None]], ...] = (
            ("interrupted", lambda process: os.kill(process.pid or 0, signal.SIGINT)),
            ("terminated", lambda process: process.terminate()),
            ("killed", lambda process: process.kill()),
        )
        for what, action in steps:
            if not alive:
                return
            logger.warning("Processes did not end and are %s: %s.", what, ", ".join(p.name for p in alive))
            for process in alive:
                try:
                    action(process)
                except (OSError, ValueError) as error:  # it has just ended; the others are signalled all the same
                    logger.warning("Process %s could not be signalled: %s", process.name, error)
            alive = self._join_until_deadline(alive, self.terminate_timeout)
        if alive:
            logger.error("Processes are still there after being killed: %s.", ", ".join(p.name for p in alive))

    def _check_process_exitcodes(self, processes: Sequence[BaseProcess]) -> None:
        bad = [p for p in processes if p.exitcode not in (None, *self.allowed_exit_codes)]
        if bad:
            kind = RunnersKilled if all(children.was_killed(p) for p in bad) else RuntimeError
            raise kind(f"Subprocesses failed: {', '.join(f'{p.name} (exit code {p.exitcode})' for p in bad)}")

    # ------------------------------------------------------------------ placing both

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Run what belongs here until the algorithm is done; what this process raises is raised."""
        ctx = children.start_context(self.start_method)
        stop = MultiprocessingEvent(ctx=ctx)
        self.is_interrupted = False
        try:
            if self.role == "both":
                self._secure_port(store)
                own = None if self.insecure else secrets.token_urlsafe()
                self._token = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN) or own
            if self.role == "runner":
                self._execute_runners_only(runner, store, stop, ctx)
            elif self.main_process == "runner":
                self._execute_around_runner(algorithm, runner, store, stop, ctx)
            else:
                with self._own_runners(runner, store, stop, ctx) as runners:
                    asyncio.run(self._execute_algorithm(algorithm, store, stop, runners))
        except KeyboardInterrupt:
            self._note_interrupt()
            logger.warning("KeyboardInterrupt received; everything has been stopped.")

    @contextmanager
    def _own_runners(
        self, runner: RunnerBundle, store: LightningStore, stop: ExecutionEvent, ctx: Any
    ) -> Iterator[PlacedRunners]:
        """Runner processes of ours, for as long as the block; raises if one of them has failed."""
        if self.role == "algorithm":
            yield PlacedRunners()
            return
        if self.managed_store:
            prepare_codecs()
        # Runners are started first, while this process has no threads that a fork could tear apart.
        deaths = ctx.SimpleQueue()
        processes = self._spawn_runners(runner, store, stop, ctx=ctx, deaths=deaths)
        runners = children.RunnerProcesses(processes, deaths, runner, stop, self.allowed_exit_codes)
        try:
            yield runners
        finally:
            self._shutdown_processes(runners.processes, stop)
            asyncio.run(runners.recover(store))
        try:
            self._check_process_exitcodes(runners.processes)
        except RunnersKilled as error:
            error.rollout_ids = tuple(runners.recovered)
            raise

    def _execute_runners_only(
        self, runner: RunnerBundle, store: LightningStore, stop: ExecutionEvent, ctx: object
    ) -> None:
        if self.n_runners == 1:
            # In this process; Ctrl-C or SIGTERM lets it finish what it runs, if that does not take too long.
            token = StopToken(stop, LEAVING.format(self.graceful_timeout))
            work = self._execute_runner(runner, 0, store, token)
            with children.handle_signals(token.interrupt, self._note_interrupt):
                asyncio.run(run_until_stopped(work, token.is_set, self.graceful_timeout))
            return
        handling = children.handle_signals(signal.default_int_handler, self._note_interrupt)
        with self._own_runners(runner, store, stop, ctx) as runners, handling:
            asyncio.run(self._until_runners_end(runners, store))

    async def _until_runners_end(self, runners: PlacedRunners, store: LightningStore) -> None:
        """Wait for the runners to exit, and give back the work of any that died."""
        client = self._client(store)
        try:
            while not runners.have_ended():
                await runners.recover(client or store)
                await asyncio.sleep(POLL_SECONDS)
            await runners.recover(client or store)
        except asyncio.CancelledError:  # by Ctrl-C, of which the runners got the signal too
            logger.warning(LEAVING.format(self.graceful_timeout))
            await runners.dismiss(self.graceful_timeout + REPORT_SECONDS)
            raise
        finally:
            if client is not None:
                await client.close()

    def _note_interrupt(self) -> None:
        self.is_interrupted = True

    def _execute_around_runner(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, stop: ExecutionEvent, ctx: Any
    ) -> None:
        has_left = MultiprocessingEvent(ctx=ctx)
        runners = PlacedRunners(has_left.is_set, owned_by(runner), stop)
        process = self._spawn_algorithm_process(algorithm, store, stop, ctx=ctx, runners=runners)
        self.release_port()

        def is_stopped() -> bool:
            if process.exitcode is not None:  # the runner would work for nobody
                stop.set()
            return stop.is_set()

        try:
            work = self._execute_runner(runner, 0, store, stop)
            asyncio.run(run_until_stopped(work, is_stopped, self.graceful_timeout))
            has_left.set()
            process.join()
        except BaseException:
            has_left.set()
            self._shutdown_processes([process], stop)
            raise
        self._check_process_exitcodes([process])
