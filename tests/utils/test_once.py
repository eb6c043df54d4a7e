"""What a process has one of is made once."""

import multiprocessing
import os
import threading

from agentlightning.utils.once import fork_handlers, once


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


def test_a_forked_child_calls_the_handlers_of_owners_that_are_left() -> None:
    class Owner:
        process_id = os.getpid()

        def notice(self) -> None:
            self.process_id = os.getpid()

    before = len(fork_handlers())
    owner, gone = Owner(), Owner()
    for one in (owner, gone, owner):
        fork_handlers().add(one, Owner.notice)
    del one, gone
    assert len(fork_handlers()) == before + 1

    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: os._exit(0 if owner.process_id == os.getpid() else 1))
    child.start()
    child.join(30)

    assert child.exitcode == 0
    assert owner.process_id == os.getpid()


def test_a_child_that_was_forked_while_a_thing_was_made_makes_its_own() -> None:
    is_making, may_end = threading.Event(), threading.Event()

    @once
    def thing() -> int:
        is_making.set()
        may_end.wait(0 if os.getpid() != parent else 30)
        return os.getpid()

    parent = os.getpid()
    maker = threading.Thread(target=thing)
    maker.start()
    is_making.wait(30)
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if thing() == os.getpid() else 1))
    child.start()
    child.join(30)
    may_end.set()
    maker.join()

    assert child.exitcode == 0
