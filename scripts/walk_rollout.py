"""How many of our files and functions one GRPO rollout passes, in all processes: `python scripts/walk_rollout.py`.

A training of three steps runs on the tiny model, with two rollouts a step. What is called during the second step, in
the algorithm's, the runner's and the model's process alike, is recorded by `sys.setprofile`: the first step warms up,
the third keeps the shutdown out. Prints the files and functions by package, and with `--list` each file with its
functions.
"""

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "agentlightning"
FOLDER_VARIABLE = "WALK_FOLDER"
SWITCH = "recording"
TIMEOUT_SECONDS = 300

# Python imports a module of this name at its start, in every process whose PYTHONPATH has it.
RECORDER = textwrap.dedent(
    """
    import mmap, os, sys, threading

    _folder = os.environ.get("{variable}")
    if _folder:
        _switch = mmap.mmap(os.open(os.path.join(_folder, "{switch}"), os.O_RDWR), 1)
        _package = {package!r} + os.sep
        _seen = set()

        def _record(frame, event, argument):
            if event != "call" or _switch[0] == 0:
                return
            code = frame.f_code
            if (os.getpid(), code) in _seen or not code.co_filename.startswith(_package):
                return
            _seen.add((os.getpid(), code))
            name = getattr(code, "co_qualname", code.co_name)
            line = f"{{os.getpid()}}\\t{{code.co_filename}}\\t{{code.co_firstlineno}}\\t{{name}}\\n"
            with open(os.path.join(_folder, f"walk-{{os.getpid()}}"), "a") as file:
                file.write(line)

        sys.setprofile(_record)
        threading.setprofile(_record)
    """
)

TRAINING = textwrap.dedent(
    """
    import itertools, mmap, os, openai
    import agentlightning as agl
    from agentlightning.algorithm.grpo import GRPO

    switch = mmap.mmap(os.open(os.path.join(os.environ["{variable}"], "{switch}"), os.O_RDWR), 1)

    numbers = itertools.count()  # rewards of 0 and 1 in turn: a group without spread would teach nothing

    class Tasks:
        draws = 0

        def __len__(self):
            return 1

        def __getitem__(self, index):
            Tasks.draws += 1
            switch[0] = 1 if Tasks.draws == 2 else 0
            return "What is 2 + 3?"

    @agl.rollout
    def agent(task, llm):
        client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none")
        client.chat.completions.create(model=llm.model, messages=[{{"role": "user", "content": task}}])
        return float(next(numbers) % 2)

    algorithm = GRPO("tiny", steps=3, tasks_per_step=1, group_size=2)
    trainer = agl.Trainer(algorithm=algorithm, strategy={{"type": "cs", "server_port": 0}}, progress="off")
    trainer.fit(agent, train_dataset=Tasks())
    assert Tasks.draws >= 3, Tasks.draws
    """
)


def walk() -> Iterator[tuple[int, Path, str]]:
    """Every function that was called in the second step: process, file and name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / SWITCH).write_bytes(b"\0" * mmap.PAGESIZE)
        values = {"variable": FOLDER_VARIABLE, "switch": SWITCH, "package": str(PACKAGE)}
        (folder / "sitecustomize.py").write_text(RECORDER.format(**values), encoding="utf-8")
        (folder / "training.py").write_text(TRAINING.format(**values), encoding="utf-8")
        environment = {**os.environ, FOLDER_VARIABLE: name, "PYTHONPATH": os.pathsep.join([name, str(ROOT)])}
        command = [sys.executable, str(folder / "training.py")]
        subprocess.run(command, env=environment, check=True, timeout=TIMEOUT_SECONDS)  # our own script
        for record in sorted(folder.glob("walk-*")):
            for line in record.read_text(encoding="utf-8").splitlines():
                process, file, number, function = line.split("\t")
                yield int(process), Path(file).relative_to(PACKAGE), f"{function}:{number}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="each file with its functions")
    arguments = parser.parse_args()
    functions_by_file: defaultdict[Path, set[str]] = defaultdict(set)
    processes = set()
    for process, file, function in walk():
        functions_by_file[file].add(function)
        processes.add(process)
    by_package: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(functions_by_file):
        by_package[file.parts[0]].append(file)
    print(f"{'package':<20}{'files':>8}{'functions':>12}")
    for package, files in by_package.items():
        print(f"{package:<20}{len(files):>8}{sum(len(functions_by_file[file]) for file in files):>12}")
        if arguments.list:
            for file in files:
                print(f"    {file}: {', '.join(sorted(functions_by_file[file]))}")
    n_functions = sum(map(len, functions_by_file.values()))
    print(f"One step passes {len(functions_by_file)} files and {n_functions} functions in {len(processes)} processes.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
