"""Bodies in gzip: compressed for the way, and decompressed within limits of size and work.

A few bytes of gzip can stand for gigabytes, and a body can consist of any number of members, each with a cost of its
own. Both are bounded here, so that a request costs no more than its announced limit.
"""

import asyncio
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from agentlightning.errors import InvalidValue, PayloadTooLarge

COMPRESS_FROM_BYTES: Final = 1024
"""Bodies above this travel compressed."""
GZIP_MAGIC: Final = b"\x1f\x8b"
"""How every gzip body begins."""
MOST_MEMBERS: Final = 1000
"""Members of one body; clients send one."""
THREAD_FROM_BYTES: Final = 1024 * 1024
"""Bodies above this are decompressed in a thread, so that the event loop serves others meanwhile."""
_GZIP_LEVEL: Final = 1
_GZIP_FORMAT: Final = 31  # zlib's number for a gzip header, with the largest window
_PIECE_BYTES: Final = 64 * 1024
"""Fed at a time: zlib copies what is left of a piece behind each member."""


def too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request is larger than {max_bytes} bytes; send it in several smaller ones.")


def compressed(body: bytes) -> bytes:
    """A body as gzip."""
    return b"".join(compressed_parts([body]))


def compressed_parts(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The parts of a body as those of its gzip; none of them is empty."""
    compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_FORMAT)
    yield from filter(None, map(compressor.compress, parts))
    yield compressor.flush()


async def decompress(body: bytes, max_bytes: int) -> bytes:
    """As `decompressed`, off the event loop where it takes long."""
    if len(body) > THREAD_FROM_BYTES:
        return await asyncio.to_thread(decompressed, body, max_bytes)
    return decompressed(body, max_bytes)


def decompressed(body: bytes, max_bytes: int) -> bytes:
    """What gzip holds; refused if it is broken, or larger than the limit once unpacked."""
    plain = bytearray()
    rest = memoryview(body)
    members = 0
    while rest:
        members += 1
        if members > MOST_MEMBERS:
            raise InvalidValue(f"The gzip body has more than {MOST_MEMBERS} members; compress it as one.")
        rest = rest[_unpack_member(rest, plain, max_bytes) :]
    return bytes(plain)


def _unpack_member(packed: memoryview, plain: bytearray, max_bytes: int) -> int:
    """Append what the first member holds; the length of that member."""
    decompressor = zlib.decompressobj(_GZIP_FORMAT)
    for start in range(0, len(packed), _PIECE_BYTES):
        piece = packed[start : start + _PIECE_BYTES]
        try:
            plain += decompressor.decompress(piece, max_bytes - len(plain) + 1)
        except zlib.error as error:
            raise InvalidValue(f"The body is not gzip: {error}.") from error
        if len(plain) > max_bytes:
            raise too_large(max_bytes)
        if decompressor.eof:
            return start + len(piece) - len(decompressor.unused_data)
    raise InvalidValue("The gzip body ends too early.")
