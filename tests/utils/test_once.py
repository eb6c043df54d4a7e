"""What a process has one of is made once."""

import threading

from agentlightning.utils.once import once


def test_threads_that_ask_together_get_the_same() -> None:
    begin, found = threading.Barrier(8), []
    made = threading.Event()

    @once
    def thing() -> object:
        made.wait(0.05)
        return object()

    def ask() -> None:
        begin.wait(10)
        found.append(thing())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(map(id, found))) == 1


def test_what_could_not_be_made_is_tried_again() -> None:
    outcomes = iter([ValueError("not yet"), None])

    @once
    def thing() -> str:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return "made"

    try:
        thing()
    except ValueError:
        assert thing() == "made"
    assert thing.__name__ == "thing"
