"""The old import paths: silent to import, one warning for each class that is constructed."""

import re
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.client import AgentLightningClient, DevTaskLoader
from agentlightning.runner.legacy import LegacyAgentRunner
from agentlightning.server import AgentLightningServer, ServerDataStore
from agentlightning.tracer import DummyTracer
from tests.legacy.agents import Newer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    QUIET_CLIENT = DevTaskLoader(["a"], {})

IMPORTS = """
from agentlightning.client import AgentLightningClient, DevTaskLoader, rollout_from_result
from agentlightning.server import AgentLightningServer, ServerDataStore
from agentlightning.runner.legacy import LegacyAgentRunner
from agentlightning.trainer.legacy import TrainerLegacy
from agentlightning.tracer.agentops import AgentOpsTracer, LightningSpanProcessor
from agentlightning.instrumentation.agentops import AgentOpsServerManager, instrument_agentops
from agentlightning.instrumentation.agentops_langchain import instrument_agentops_langchain
"""


def warnings_of(construct: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        construct()
    return caught


def test_importing_is_silent() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], check=True, timeout=60)


@pytest.mark.parametrize(
    ("construct", "messages"),
    [
        (lambda: AgentLightningClient("http://localhost"), ["AgentLightningClient .* use LightningStoreClient"]),
        (lambda: AgentLightningServer(), ["AgentLightningServer .* use LightningStoreServer"]),
        (lambda: DevTaskLoader(["a"], {}), [r"DevTaskLoader .* use Trainer\.dev", "AgentLightningClient .*"]),
        (
            lambda: LegacyAgentRunner(Newer(), QUIET_CLIENT, DummyTracer(), TracerTraceToTriplet()),
            ["LegacyAgentRunner .* use LitAgentRunner with a store"],
        ),
        (lambda: ServerDataStore(), []),
    ],
    ids=["client", "server", "loader", "runner", "data store"],
)
def test_each_class_warns_at_the_line_that_constructs_it(construct: Callable[[], object], messages: list[str]) -> None:
    caught = warnings_of(construct)

    assert [warning.category for warning in caught] == [DeprecationWarning] * len(messages)
    assert {warning.filename for warning in caught} <= {__file__}
    for warning, message in zip(caught, messages, strict=True):
        assert re.match(message, str(warning.message))
