"""The first code that a reader of README.md pastes."""

import re
import sys
from pathlib import Path

from tests import warm_python

ROOT = Path(__file__).parents[2]


def test_the_first_code_of_the_readme_shows_each_task_with_its_reward(tmp_path: Path) -> None:
    found = re.search(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    (tmp_path / "first.py").write_text(found[1], encoding="utf-8")

    done = warm_python.run([sys.executable, "first.py"], cwd=tmp_path, check=True, timeout=100)

    lines = done.stdout.splitlines()
    assert lines[0].split() == ["task", "output", "reward", "time", "error"]
    assert lines[-1] == "2 rollouts, mean reward 0.50, 0 failed"
    assert [path.name for path in tmp_path.iterdir()] == ["first.py"]
