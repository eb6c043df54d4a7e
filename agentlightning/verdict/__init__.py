"""Verdicts: what a training gained, or why it gained nothing, each with the figure that shows it and what to try.

`evidence` reads a run from the store, `findings` holds one rule for each thing that goes wrong, and `verdict` puts the
gain and the findings into words. The trainer writes the verdict into the run's summary, where the console, the
dashboard and `agl why` read it.
"""

from agentlightning.verdict.evidence import Evidence, RolloutEvidence, read_evidence, read_rollout
from agentlightning.verdict.verdict import (
    FINDINGS,
    Finding,
    Verdict,
    find,
    verdict_of,
    verdict_of_rollout,
    verdict_of_run,
)

__all__ = [
    "FINDINGS",
    "Evidence",
    "Finding",
    "RolloutEvidence",
    "Verdict",
    "find",
    "read_evidence",
    "read_rollout",
    "verdict_of",
    "verdict_of_rollout",
    "verdict_of_run",
]
