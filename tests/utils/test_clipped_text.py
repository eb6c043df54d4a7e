"""Text of any length in bounded memory."""

import pytest

from agentlightning.utils.clipped_text import ClippedText


def clipped(text: str, *, piece: int = 7, size: int = 10) -> ClippedText:
    clip = ClippedText(size)
    whole = text.encode()
    for start in range(0, len(whole), piece):
        clip.add(whole[start : start + piece])
    return clip


@pytest.mark.parametrize("piece", [1, 3, 100])
@pytest.mark.parametrize("text", ["", "short", "0123456789abcdefghij"])
def test_what_fits_is_kept_whole(text: str, piece: int) -> None:
    clip = clipped(text, piece=piece)
    assert (clip.text(), clip.end(), clip.cut_bytes) == (text, text, 0)


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_the_middle_is_left_out_with_a_note(piece: int) -> None:
    clip = clipped("abcdefghij" * 10, piece=piece)

    assert clip.text() == "abcdefghij\n[… 80 bytes are left out here …]\nabcdefghij"
    assert (clip.end(), clip.byte_count, clip.cut_bytes) == ("abcdefghij", 100, 80)


@pytest.mark.parametrize("shift", range(5))
def test_no_character_is_cut_through(shift: int) -> None:
    assert "\ufffd" not in clipped("x" * shift + "é€😀" * 50).text()


@pytest.mark.parametrize("shift", range(12))
def test_no_secret_is_seen_even_where_the_cut_goes_through_it(shift: int) -> None:
    text = "." * shift + "sk-abcdef" * 20

    shown = clipped(text, size=30).text(("sk-abcdef",)).replace("bytes are left out here", "")

    assert not set("abcdef") & set(shown.replace("***", ""))


def test_memory_is_bounded() -> None:
    clip = ClippedText(1000)

    for _ in range(1000):
        clip.add(b"x" * 5000)

    assert len(clip._head) + len(clip._tail) <= 3000
