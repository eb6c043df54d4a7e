"""Ids are short, random, and never repeated by a fork."""

import os
import re

import pytest

from agentlightning.utils.id import attempt_id, generate_id, resources_id, rollout_id, run_id


@pytest.mark.parametrize("length", [0, 1, 7, 12, 33])
def test_id_has_the_wanted_number_of_hex_digits(length: int) -> None:
    assert re.fullmatch(rf"[0-9a-f]{{{length}}}", generate_id(length))


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (rollout_id, "ro-[0-9a-f]{12}"),
        (attempt_id, "at-[0-9a-f]{8}"),
        (resources_id, "rs-[0-9a-f]{12}"),
        (run_id, "run-[0-9a-f]{12}"),
    ],
    ids=["rollout", "attempt", "resources", "run"],
)
def test_prefix_says_what_the_id_names(make: type[str], pattern: str) -> None:
    assert re.fullmatch(pattern, make())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_processes_draw_different_ids() -> None:
    generate_id(12)
    reader, writer = os.pipe()

    child = os.fork()
    if child == 0:
        os.write(writer, generate_id(12).encode())
        os._exit(0)
    mine = generate_id(12)
    os.waitpid(child, 0)

    assert os.read(reader, 12).decode() != mine
    os.close(reader)
    os.close(writer)
