"""WeaveTracer: for programs that use W&B Weave."""

import importlib.util

from agentlightning.instrumentation.weave import weave_management
from agentlightning.store.base import LightningStore
from agentlightning.tracer.otel import OtelTracer

__all__ = ["WeaveTracer"]


class WeaveTracer(OtelTracer):
    """Records the calls of Weave's ops, what is emitted, and what is written with OpenTelemetry.

    Weave's service is not used: ops are recorded without a login, and `weave.init` asks for none. A program that has
    called `weave.init` before `init_worker` keeps its client, and its service; its ops are recorded besides if
    `instrument` is true.
    """

    def __init__(self, *, instrument: bool = True) -> None:
        """ImportError if the package weave is missing.

        Args:
            instrument: Apply `agentlightning.instrumentation.instrument_all` in each worker.
        """
        if importlib.util.find_spec("weave") is None:
            raise ImportError("WeaveTracer needs the package weave: pip install weave, or use OtelTracer.")
        super().__init__(instrument=instrument)
        self._is_managing = False

    def init_worker(self, worker_id: int, store: LightningStore | None = None, *args: object, **kwargs: object) -> None:
        super().init_worker(worker_id, store)
        if not self._is_managing:
            weave_management().acquire()
            self._is_managing = True

    def teardown_worker(self, worker_id: int, *args: object, **kwargs: object) -> None:
        if self._is_managing:
            self._is_managing = False
            weave_management().release()
        super().teardown_worker(worker_id)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_is_managing": False}
