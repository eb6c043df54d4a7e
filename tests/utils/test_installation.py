"""The line that installs an extra: from a clone by its folder, elsewhere by the names of the packages."""

from pathlib import Path

import pytest

from agentlightning.utils import installation
from agentlightning.utils.installation import install_command, resolve_with_extras

ROOT = Path(__file__).parents[2]
METADATA = """\
Metadata-Version: 2.4
Name: agentlightning
Version: 9
Provides-Extra: train
Provides-Extra: hf
Requires-Dist: rich>=13
Requires-Dist: numpy; extra == 'hf'
Requires-Dist: transformers>=4.50; extra == "hf"
Requires-Dist: numpy; extra == 'train'
Requires-Dist: torch[cpu]>=2.10,<3; extra == 'train'
"""


def installed_at(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This package as if it had been installed from a wheel into that folder."""
    (place / "agentlightning-9.dist-info").mkdir(parents=True)
    (place / "agentlightning-9.dist-info" / "METADATA").write_text(METADATA, encoding="utf-8")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(installation, "_PLACE", place)


def test_clone_is_installed_from_its_folder_and_leaves_other_versions_alone() -> None:
    assert install_command("train", "hf") == f'pip install -e "{ROOT}[train,hf]"'


def test_wheel_names_the_packages_of_the_extras_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_at(tmp_path, monkeypatch)

    assert install_command("train") == 'pip install "numpy" "torch[cpu]>=2.10,<3"'
    assert install_command("train", "hf") == 'pip install "numpy" "transformers>=4.50" "torch[cpu]>=2.10,<3"'


def test_metadata_of_another_project_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_at(tmp_path / "other", monkeypatch)
    monkeypatch.setattr(installation, "_PLACE", tmp_path / "copied")

    assert install_command("train") == 'pip install -e ".[train]"'


def test_name_that_is_missing_in_this_package_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"agentlightning\.nowhere"):
        resolve_with_extras("agentlightning.nowhere:name", "train")
