"""Bodies in gzip: what is unpacked, and what is refused before it costs much."""

import gzip
import zlib

import pytest

from agentlightning.asgi import compression
from agentlightning.asgi.compression import MOST_MEMBERS, compressed, decompress, decompressed
from agentlightning.errors import InvalidValue, PayloadTooLarge

EMPTY_MEMBER = gzip.compress(b"")
LIMIT = 64 * 1024 * 1024


@pytest.mark.parametrize(
    "plain",
    [b"", b"x", b"word " * 100_000, bytes(range(256)) * 5000],
    ids=["nothing", "one byte", "text", "more than a piece"],
)
def test_what_is_compressed_comes_back(plain: bytes) -> None:
    assert decompressed(compressed(plain), LIMIT) == plain


def test_members_of_any_size_are_joined() -> None:
    parts = [b"a" * size for size in (0, 1, 70_000, 3, 200_000)]
    assert decompressed(b"".join(map(gzip.compress, parts)), LIMIT) == b"".join(parts)


def test_as_many_members_as_are_allowed_are_unpacked() -> None:
    assert decompressed(gzip.compress(b"x") * MOST_MEMBERS, LIMIT) == b"x" * MOST_MEMBERS


def test_no_more_members_are_opened_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = 0
    make = zlib.decompressobj

    def counting(*arguments: int) -> object:
        nonlocal opened
        opened += 1
        return make(*arguments)

    monkeypatch.setattr(compression.zlib, "decompressobj", counting)
    with pytest.raises(InvalidValue, match="more than 1000 members; compress it as one"):
        decompressed(EMPTY_MEMBER * 75_000, LIMIT)

    assert opened == MOST_MEMBERS


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(b"{}") + b"garbage",
        gzip.compress(b"{}") + b"\0",
        gzip.compress(b"{}")[:-4],
        b"{}",
        EMPTY_MEMBER[:5],
    ],
    ids=["garbage behind", "a zero behind", "cut off", "plain", "half a header"],
)
def test_what_is_not_whole_gzip_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidValue):
        decompressed(body, LIMIT)


@pytest.mark.parametrize("members", [1, 2], ids=["in one member", "spread over two"])
def test_a_bomb_is_refused(members: int) -> None:
    bomb = gzip.compress(bytes(1024 * 1024)) * members
    with pytest.raises(PayloadTooLarge, match="larger than"):
        decompressed(bomb, members * 1024 * 1024 - 1)


async def test_a_large_body_is_unpacked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "THREAD_FROM_BYTES", 10)
    assert await decompress(gzip.compress(b"large"), LIMIT) == b"large"
    with pytest.raises(InvalidValue):
        await decompress(b"not gzip at all", LIMIT)
