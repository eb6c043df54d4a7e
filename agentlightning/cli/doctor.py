"""`agl doctor`: what is installed, what is missing or too old, and what would get in the way of a training.

Each check looks at one thing of this machine and says in a line that it is well, or returns a finding with what to do.
Nothing is sent anywhere but to this machine's own loopback address.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import operator
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentlightning.cli.command import (
    argument,
    cli_command,
    print_json,
)
from agentlightning.litagent import rollout
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer import Trainer
from agentlightning.utils.installation import install_command
from agentlightning.verdict.verdict import Finding

LEAST_DISK_GB: Final = 1.0
LOOPBACK: Final = "127.0.0.1"
_SHARED_MEMORY: Final = Path("/dev/shm")
_REQUIREMENT: Final = re.compile(
    r"^(?P<name>[\w.-]+)(?:\[[^\]]*\])?\s*\(?(?P<versions>[^;()]*)\)?\s*(?:;(?P<marker>.*))?$"
)
_EXTRA: Final = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_LIMIT: Final = re.compile(r"(>=|<=|==|!=|<|>)\s*(\d[\w.]*)")
_EXTRAS: Final[Mapping[str, tuple[str, str]]] = {
    "openai": ("openai", "apo_room_selector, calc_x, calc_x_verl, multi_agent, notebook, observe_openai, sql_agent"),
    "langchain": ("langgraph", "sql_agent"),
    "train": ("torch", "any_language, calc_x, multi_agent, notebook"),
    "verl": ("verl", "calc_x_verl"),
}
"""Extras that the examples need: a module of each, and the examples."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    said: str
    """What was found, in a line."""
    finding: Finding | None = None
    """What is wrong with it."""


def examine() -> Iterator[Check]:
    """Look at everything, one thing at a time: some of it takes a second."""
    for check in (
        _python,
        _packages,
        _examples,
        _graphics_card,
        _loopback,
        _proxy_variables,
        _disk,
        _open_files,
        _one_rollout,
    ):
        yield check()


def _wrong(name: str, said: str, advice: str, **figures: float) -> Check:
    return Check(name, said, Finding(name, said, advice, figures))


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", f"Python {version} on {sys.platform}")


# ---------------------------------------------------------------------- packages


def _packages() -> Check:
    """What is installed of the required and the optional packages, against the versions that this release knows."""
    try:
        requirements = importlib.metadata.requires("agentlightning") or []
    except importlib.metadata.PackageNotFoundError:
        return _wrong("packages", "The package is not installed, only its folder is there.", "Run `pip install -e .`.")
    missing, outside, present = [], [], []
    for name, limits, extra in filter(None, map(_read_requirement, requirements)):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing += [name] if extra is None else []
            continue
        present += [f"{name} {version}"]
        if not _fits(version, limits):
            outside.append(f"{name} {version} (known: {', '.join(a + b for a, b in limits)})")
    if missing:
        return _wrong(
            "packages", f"Missing: {', '.join(missing)}.", "Run `pip install -e .` again.", missing=len(missing)
        )
    if outside:
        said = f"Of a version that this release does not know: {', '.join(sorted(set(outside)))}."
        return _wrong(
            "packages", said, "Install a version that it knows, where the package is used.", outside=len(outside)
        )
    return Check("packages", f"{len(set(present))} packages, all of a known version")


def _read_requirement(text: str) -> tuple[str, list[tuple[str, str]], str | None] | None:
    match = _REQUIREMENT.match(text)
    if match is None:
        return None
    extra = _EXTRA.search(match["marker"] or "")
    if match["name"] == "agentlightning" or (extra is not None and extra[1] in {"dev", "docs", "test"}):
        return None
    return match["name"], _LIMIT.findall(match["versions"]), None if extra is None else extra[1]


_COMPARE: Final[Mapping[str, Callable[..., bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def _fits(version: str, limits: Sequence[tuple[str, str]]) -> bool:
    return all(_COMPARE[sign](_numbers(version), _numbers(limit)) for sign, limit in limits)


def _numbers(version: str) -> list[int]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:  # 1.0 is 1
        numbers.pop()
    return numbers


def _examples() -> Check:
    """An extra that only some examples need is not missing, but its lack explains why these do not start."""
    lacking = [extra for extra, (module, _) in _EXTRAS.items() if importlib.util.find_spec(module) is None]
    told = [f"{_EXTRAS[extra][1]} need the extra '{extra}' (`{install_command(extra)}`)" for extra in lacking]
    return Check("examples", "; ".join(told) or "the packages of all are here")


def _graphics_card() -> Check:
    has_card = shutil.which("nvidia-smi") is not None
    if importlib.util.find_spec("torch") is None:
        if has_card:
            advice = f"To train on it, run `{install_command('train', 'hf')}`."
            return _wrong("gpu", "There is an NVIDIA card, and torch is not installed.", advice)
        return Check("gpu", "torch is not installed: prompts can be optimised, weights cannot be trained")
    import torch

    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        return Check("gpu", f"torch {torch.__version__}, {card.name} with {card.total_memory / 1e9:.0f} GB")
    if has_card:
        advice = "Install a build of torch for the driver that `nvidia-smi` shows."
        return _wrong("gpu", f"There is an NVIDIA card, and torch {torch.__version__} cannot use it.", advice)
    return Check("gpu", f"torch {torch.__version__} without a GPU: the tiny model trains, larger ones take long")


# ---------------------------------------------------------------------- the machine


def _loopback() -> Check:
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
            return Check("loopback", f"servers can be reached at {LOOPBACK}")
    except OSError as error:
        advice = "Allow programs to listen on the loopback address: store, proxy and engine do."
        return _wrong("loopback", f"A server at {LOOPBACK} cannot be reached: {error}.", advice)


def _proxy_variables() -> Check:
    """Clients send calls to local servers through a proxy of the environment, unless it is told to leave them out."""
    names = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)]
    left_out = f"{os.environ.get('no_proxy', '')},{os.environ.get('NO_PROXY', '')}"
    if names and not re.search(r"127\.0\.0\.1|localhost|\*", left_out):
        advice = f"Set NO_PROXY={LOOPBACK},localhost."
        return _wrong("proxy", f"{names[0]} is set and NO_PROXY does not leave out this machine.", advice)
    return Check("proxy", "calls to this machine go straight")


def _disk() -> Check:
    free = shutil.disk_usage(tempfile.gettempdir()).free / 1e9
    shared = shutil.disk_usage(_SHARED_MEMORY).free / 1e9 if _SHARED_MEMORY.is_dir() else None
    if free < LEAST_DISK_GB:
        return _wrong("disk", f"{free:.1f} GB are free for temporary files.", "Free some, or set TMPDIR.", free_gb=free)
    if shared is not None and shared < LEAST_DISK_GB:
        advice = "Weights go through it; give the container more (docker run --shm-size=4g)."
        return _wrong("disk", f"{shared:.1f} GB of shared memory are free.", advice, free_gb=shared)
    more = "" if shared is None else f", {shared:.0f} GB of shared memory"
    return Check("disk", f"{free:.0f} GB for temporary files{more}")


def _open_files() -> Check:
    try:
        import resource
    except ImportError:  # not on Windows
        return Check("files", "this system sets no limit of open files")
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Open files that a training with a few dozen runners needs.
    if limit != resource.RLIM_INFINITY and limit < 1024:
        return _wrong("files", f"{limit} files may be open at once.", f"Run `ulimit -n {most}` first.", limit=limit)
    return Check("files", f"{limit} files may be open at once")


def _one_rollout() -> Check:
    """The smallest loop there is: one task goes to an agent, and its reward comes back."""
    store = InMemoryLightningStore()
    try:
        Trainer(store=store, n_runners=1, progress="off").dev(rollout(lambda task: task), [1.0])
    except Exception as error:  # noqa: BLE001 # whatever it is, it is what the user wants to know
        return _wrong("rollout", f"A rollout failed: {type(error).__name__}: {error}", "Report it with this line.")
    done = asyncio.run(store.query_rollouts(status_in=["succeeded"]))
    if len(done) != 1:
        return _wrong("rollout", "A rollout did not succeed.", "Run `agl demo` and report what it prints.")
    return Check("rollout", "a task went to an agent, and its reward came back")


@cli_command(
    "doctor",
    description="Look at the installation: what is there, what is missing, and what would get in the way.",
    examples="""\
examples:
  agl doctor           a line for each thing that was looked at; exit code 1 if something is wrong
  agl doctor --json    the same as one line of JSON""",
    arguments=(argument("--json", action="store_true", help="one line of JSON"),),
)
def main(arguments: argparse.Namespace) -> int:
    checks = []
    for check in examine():
        checks.append(check)
        if not arguments.json:
            advice = "" if check.finding is None else f" {check.finding.advice}"
            sys.stdout.write(f"{'ok   ' if check.finding is None else 'WRONG'} {check.name:<9} {check.said}{advice}\n")
    is_well = all(check.finding is None for check in checks)
    if arguments.json:
        told = [{"name": one.name, "said": one.said, "advice": one.finding and one.finding.advice} for one in checks]
        print_json({"is_well": is_well, "checks": told})
    return 0 if is_well else 1
