"""PNG files of at most 256 colours: a picture of a page becomes a fifth as large, and looks the same."""

import struct
import zlib
from typing import Final

import numpy as np

__all__ = ["shrunk"]

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
CHANNELS: Final = {2: 3, 6: 4}
"""By the colour types that browsers write."""
MOST_COLOURS: Final = 256
KEPT_BITS: Final = 0xFC  # of a channel: the colours of soft edges fall together


def shrunk(picture: bytes) -> bytes:
    """The same picture with a palette of its most frequent colours; others become the nearest of them."""
    pixels = _pixels(picture)[:, :, :3]
    rounded = (pixels & KEPT_BITS).reshape(-1, 3)
    colours, places, counts = np.unique(rounded, axis=0, return_inverse=True, return_counts=True)
    frequent = np.argsort(-counts)[:MOST_COLOURS]
    palette = colours[frequent].astype(int)
    distances = ((colours.astype(int)[:, None, :] - palette[None, :, :]) ** 2).sum(axis=2)
    indices = distances.argmin(axis=1)[places.ravel()].astype(np.uint8).reshape(pixels.shape[:2])
    palette = np.where(palette == KEPT_BITS, 0xFF, palette)  # white stays white
    height, width = indices.shape
    rows = np.hstack([np.zeros((height, 1), np.uint8), indices]).tobytes()
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", head), (b"PLTE", palette.astype(np.uint8).tobytes()), (b"IDAT", zlib.compress(rows, 9)))
    return SIGNATURE + b"".join(_chunk(*part) for part in (*parts, (b"IEND", b"")))


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _pixels(picture: bytes) -> "np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]":
    """Rows of pixels of channels."""
    place, data, head = len(SIGNATURE), b"", b""
    while place < len(picture):
        (size,) = struct.unpack_from(">I", picture, place)
        kind, body = picture[place + 4 : place + 8], picture[place + 8 : place + 8 + size]
        head = body if kind == b"IHDR" else head
        data += body if kind == b"IDAT" else b""
        place += 12 + size
    width, height, _, colour_type = struct.unpack_from(">IIBB", head)
    channels = CHANNELS[colour_type]
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    rows = np.zeros((height, width, channels), np.uint8)
    above = np.zeros((width, channels), np.uint8)
    for number, line in enumerate(lines):
        above = rows[number] = _unfiltered(int(line[0]), line[1:].reshape(width, channels), above)
    return rows


def _unfiltered(kind: int, line: "np.ndarray", above: "np.ndarray") -> "np.ndarray":  # type: ignore[type-arg] # of bytes
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line, axis=0, dtype=np.uint8)
    if kind == 2:
        return line + above
    values, upper = line.tolist(), above.tolist()
    left, corner = [0] * len(upper[0]), [0] * len(upper[0])
    for place, pixel in enumerate(values):
        up = upper[place]
        if kind == 3:
            left = [(v + (a + b) // 2) & 0xFF for v, a, b in zip(pixel, left, up, strict=True)]
        else:
            left = [(v + _paeth(a, b, c)) & 0xFF for v, a, b, c in zip(pixel, left, up, corner, strict=True)]
        values[place], corner = left, up
    return np.array(values, np.uint8)


def _paeth(left: int, up: int, corner: int) -> int:
    estimate = left + up - corner
    return min((left, up, corner), key=lambda value: abs(estimate - value))
