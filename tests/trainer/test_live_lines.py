"""The live view on a terminal that runners, and the programs they start, write to as well."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

HEIGHT, WIDTH = 24, 100
PROGRAM = """\
import os, subprocess, sys, time
import agentlightning as agl

@agl.rollout
def agent(task):
    os.write(1, f"agent {task} here\\n".encode())  # in one piece, as no other line may come between
    if task % 8 == 0:
        subprocess.run([sys.executable, "-S", "-c", f"import os; os.write(1, b'program {task} here\\\\n')"], check=True)
    time.sleep(0.1)
    return 1.0

@agl.algo
async def algorithm(*, store, train_dataset):
    sent = [(await store.enqueue_rollout(task)).rollout_id for task in train_dataset]
    await store.wait_for_rollouts(rollout_ids=sent)

if __name__ == "__main__":
    strategy = {"type": "cs", "server_port": 0}
    agl.Trainer(algorithm=algorithm, strategy=strategy, n_runners=2, progress="rich").fit(agent, list(range(40)))
    print("the program ends here", flush=True)
"""
_SEQUENCE = re.compile(r"\x1b\[(?P<parameters>[?\d;]*)(?P<final>[A-Za-z])|\x1b(?P<escape>[78D])|(?P<text>.)", re.DOTALL)


class Screen:
    """A terminal as far as the live view uses one: a scrolling region, a saved cursor, erased lines."""

    def __init__(self) -> None:
        self.scrolled_off: list[str] = []
        self.lines = [""] * HEIGHT
        self._row = self._column = self._top = 0
        self._bottom = HEIGHT - 1
        self._saved = (0, 0)

    def feed(self, output: str) -> None:
        for match in _SEQUENCE.finditer(output):
            if match["final"]:
                numbers = [int(number) for number in re.findall(r"\d+", match["parameters"])]
                self._control(match["final"], numbers)
            elif match["escape"] == "7":
                self._saved = (self._row, self._column)
            elif match["escape"] == "8":
                self._row, self._column = self._saved
            elif match["escape"] or match["text"] == "\n":
                self._next_line()
            elif match["text"] == "\r":
                self._column = 0
            else:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + match["text"] + line[self._column + 1 :]
                self._column += 1

    def _next_line(self) -> None:
        if self._row != self._bottom:
            self._row = min(self._row + 1, HEIGHT - 1)
            return
        gone = self.lines.pop(self._top)
        self.scrolled_off += [gone] if self._top == 0 else []
        self.lines.insert(self._bottom, "")

    def _control(self, final: str, numbers: list[int]) -> None:
        if final == "A":
            self._row = max(self._row - numbers[0], self._top)
        elif final == "H":
            self._row, self._column = numbers[0] - 1, numbers[1] - 1
        elif final == "r":
            self._top, self._bottom = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, HEIGHT - 1)
            self._row = self._column = 0
        elif final == "K":
            self.lines[self._row] = ""
        elif final == "J":
            self.lines[self._row] = self.lines[self._row][: self._column]
            self.lines[self._row + 1 :] = [""] * (HEIGHT - self._row - 1)
        else:
            assert final in "mhl", final  # colours, and whether the cursor is shown


def output_on_a_terminal(program: Path) -> str:
    """Everything that a program and its children write to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, program], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        return b"".join(iter(lambda: _read(ours), b"")).decode()
    finally:
        os.close(ours)
        process.kill()
        process.wait()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # nobody has the other end any more
        return b""


@pytest.mark.slow
def test_lines_of_runners_and_programs_survive_the_live_view(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    screen, draws = Screen(), 0

    for part in re.split(r"(?<=\x1b8)", output_on_a_terminal(program)):
        screen.feed(part)
        if "── fit" in part and part.endswith("\x1b8"):  # the rows were drawn last
            draws += 1
            assert "── fit" in "".join(screen.lines[-6:])

    lines = [line.rstrip() for line in (*screen.scrolled_off, *screen.lines) if line.endswith("here")]
    agents = [f"agent {task} here" for task in range(40)]
    programs = [f"program {task} here" for task in range(0, 40, 8)]
    assert sorted(lines) == sorted([*agents, *programs, "the program ends here"])
    assert draws > 1
    assert any("40/40   40 succeeded" in line for line in screen.lines)
