"""The tokenizer and the chat template of the stub model."""

from hypothesis import given
from hypothesis import strategies as st

from tests.stub_model.words import Message, ToolCall, pieces_of, render, words_of

WEATHER = ToolCall.of("weather", city="Oslo", days=2)


@given(st.text())
def test_words_joined_are_the_text(text: str) -> None:
    assert "".join(words_of(text)) == text


@given(st.text(), st.integers(0, 5))
def test_cut_text_has_the_words_of_the_whole(text: str, count: int) -> None:
    words = words_of(text)

    assert words_of("".join(words[:count])) == words[:count]


@given(st.text(), st.text(), st.text())
def test_prompt_of_the_next_turn_begins_with_prompt_and_answer(asked: str, said: str, more: str) -> None:
    first = [Message("system", "Be brief."), Message("user", asked)]
    answer = [token_id for piece in pieces_of(said, [WEATHER]) for token_id in piece.token_ids]
    second = [*first, Message("assistant", said, (), (WEATHER,)), Message("tool", more)]

    before = render(first) + answer

    assert render(second)[: len(before)] == before
