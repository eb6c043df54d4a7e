"""The package from outside: what it exports, what importing it costs, how it is taken apart."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.utils.deprecation import REMOVED

HEAVY = ("fastapi", "aiohttp", "openai", "litellm", "torch", "transformers", "agentops", "pydantic", "opentelemetry")
LONGEST_IMPORT_SECONDS = 0.25

NAMES = {
    "adapter": "TraceAdapter OtelTraceAdapter Adapter TraceToTripletBase TracerTraceToTriplet LlmProxyTraceToTriplet "
    "TraceToMessages",
    "algorithm": "Algorithm algo FastAlgorithm Baseline APO VERL",
    "client": "AgentLightningClient DevTaskLoader",
    "config": "lightning_cli",
    "emitter": "reward emit_reward get_reward_value is_reward_span find_reward_spans find_final_reward emit_message "
    "emit_object emit_exception operation emit_annotation get_message_value get_object_value get_rewards_from_span",
    "execution": "ExecutionStrategy ClientServerExecutionStrategy ExecutionEvent ThreadingEvent MultiprocessingEvent "
    "SharedMemoryExecutionStrategy RayExecutionStrategy",
    "litagent": "LitAgent llm_rollout prompt_rollout rollout",
    "llm_proxy": "LLMProxy",
    "logging": "configure_logger setup_logging setup_module_logging",
    "env_var": "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var",
    "runner": "Runner LegacyAgentRunner LitAgentRunner",
    "server": "AgentLightningServer",
    "store": "LightningStore LightningStoreClient LightningStoreServer InMemoryLightningStore LightningStoreThreaded "
    "LightningStoreCapabilities LightningStoreStatistics SqliteLightningStore SQLiteLightningStore",
    "tracer": "AgentOpsTracer Tracer OtelTracer DummyTracer get_active_tracer set_active_tracer clear_active_tracer",
    "trainer": "Trainer build_component",
    "types": "Triplet RolloutLegacy Task TaskInput TaskIfAny RolloutRawResultLegacy RolloutRawResult RolloutMode "
    "GenericResponse ParallelWorkerBase Dataset AttemptStatus RolloutStatus RolloutConfig Rollout Attempt "
    "AttemptedRollout Hook Resource LLM ProxyLLM PromptTemplate ResourceUnion NamedResources ResourcesUpdate "
    "AttributeValue Attributes TraceState SpanContext TraceStatus Event Link OtelResource Span SpanNames "
    "SpanAttributeNames SpanLike EnqueueRolloutRequest Worker WorkerStatus PaginatedResult FilterOptions SortOptions "
    "FilterField StatusCode SpanCoreFields SpanRecordingContext",
}

MODULES = """
    adapter adapter.base adapter.messages adapter.trajectory adapter.triplet algorithm algorithm.base
    algorithm.decorator algorithm.fast algorithm.utils cli cli.agentops_server cli.runner cli.store
    cli.tokens client config emitter emitter.annotation emitter.exception emitter.message emitter.object
    emitter.reward emitter.utils env_var errors events execution execution.base execution.client_server
    execution.events execution.inter_process execution.shared_memory instrumentation instrumentation.agentops
    instrumentation.agentops_langchain instrumentation.litellm instrumentation.vllm legacy
    litagent litagent.decorator litagent.litagent logging runner runner.agent runner.base runner.legacy semconv server
    store store.base store.client_server store.memory store.sqlite store.threading store.utils tracer tracer.agentops
    tracer.base tracer.dummy tracer.otel trainer trainer.init_utils trainer.legacy
    trainer.registry trainer.trainer types types.core types.resources types.tracer utils.otel
    utils.server_launcher utils.id utils.metrics utils.system_snapshot
"""


def all_names() -> list[str]:
    return [name for names in NAMES.values() for name in names.split()]


@pytest.mark.parametrize("name", all_names())
@pytest.mark.claim(300)
def test_public_name_resolves_or_is_announced(name: str) -> None:
    assert hasattr(agl, name)


def test_everything_in_the_table_resolves() -> None:
    for name in agl.__all__:
        assert getattr(agl, name) is not None
    assert set(agl.__all__) <= set(dir(agl))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        agl.nonsense  # type: ignore[attr-defined] # noqa: B018


REMOVED_NAMES = [
    ("agentlightning", "HttpTracer", "HttpTracer is gone; use OtelTracer, or the LLM proxy."),
    ("agentlightning.tracer", "HttpTracer", "HttpTracer is gone; use OtelTracer, or the LLM proxy."),
    ("agentlightning", "WeaveTracer", "WeaveTracer is gone; use OtelTracer"),
    ("agentlightning.tracer", "WeaveTracer", "WeaveTracer is gone; use OtelTracer"),
    ("agentlightning.instrumentation", "WEAVE_INSTALLED", "WEAVE_INSTALLED is gone"),
    ("agentlightning.llm_proxy", "LightningSpanExporter", "LightningSpanExporter is gone; the LLM proxy"),
    ("agentlightning.llm_proxy", "StreamConversionMiddleware", "StreamConversionMiddleware is gone; the LLM proxy"),
    ("agentlightning.utils.metrics", "ConsoleMetricsBackend", "ConsoleMetricsBackend is gone; a store server"),
]


@pytest.mark.parametrize(("module", "name", "sentence"), REMOVED_NAMES)
def test_removed_name_says_what_to_use(module: str, name: str, sentence: str) -> None:
    with pytest.raises(ImportError, match=sentence):
        exec(f"from {module} import {name}", {})
    with pytest.raises(ImportError, match=sentence):
        getattr(importlib.import_module(module), name)
    assert name not in dir(importlib.import_module(module))


@pytest.mark.parametrize("module", ["tracer.http", "tracer.weave", "instrumentation.weave"])
def test_removed_module_is_not_found(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"agentlightning.{module}"):
        importlib.import_module(f"agentlightning.{module}")


def test_every_removed_name_is_in_the_table_of_the_migration_page() -> None:
    page = (Path(__file__).parents[1] / "docs/how-to/migrate.md").read_text()
    table = page.partition("## What went, and what to use")[2].partition("\n## ")[0]

    assert [name for name in REMOVED if f"`{name}`" not in table] == []


def test_table_lists_all_of_the_types_and_of_the_store() -> None:
    from agentlightning import store, types

    assert {*types.__all__, *store.__all__} <= set(agl.__all__)


@pytest.mark.parametrize("name", MODULES.split())
def test_documented_module_is_importable(name: str) -> None:
    assert importlib.import_module(f"agentlightning.{name}").__doc__


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_pulls_in_nothing_heavy() -> None:
    loaded = run_python("import agentlightning, sys; print(*sys.modules)").split()
    assert [name for name in HEAVY if name in loaded] == []


def test_importing_is_quick() -> None:
    code = "import time; b = time.process_time(); import agentlightning; print(time.process_time() - b)"
    assert min(float(run_python(code)) for _ in range(3)) < LONGEST_IMPORT_SECONDS


def test_importing_the_store_needs_no_server_and_no_model() -> None:
    loaded = run_python("import agentlightning.store, sys; print(*sys.modules)").split()
    assert [name for name in HEAVY[:7] if name in loaded] == []


def test_importing_configures_no_logging() -> None:
    code = "import agentlightning.store, logging as l; print(l.getLogger('agentlightning').handlers, l.root.handlers)"
    assert run_python(code) == "[] []\n"


def test_version_is_text() -> None:
    assert agl.__version__.count(".") >= 2


def test_packages_can_be_reached_through_the_package() -> None:
    names = ["adapter", "emitter", "events", "store", "tracer", "types"]

    told = run_python(f"import agentlightning as agl; print([getattr(agl, name).__name__ for name in {names}])")

    assert told.strip() == str([f"agentlightning.{name}" for name in names])
