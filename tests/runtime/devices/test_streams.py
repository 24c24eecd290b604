"""Tickets, workers and the ledger of copies."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import pytest

from forebay.runtime.devices import streams
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.devices.streams import CopyLedger, Ticket, Worker


class Trouble(Exception):
    pass


def test_ticket_is_done_when_all_parts_are() -> None:
    ticket = Ticket(3)
    for _ in range(2):
        ticket.done()
        assert not ticket.ready()
    ticket.done()
    assert ticket.ready()
    ticket.wait()


def test_ticket_keeps_the_first_error_and_raises_it_every_time() -> None:
    ticket = Ticket(3)
    ticket.done()
    ticket.done(Trouble("first"))
    ticket.done(Trouble("second"))
    for _ in range(2):
        with pytest.raises(Trouble, match="first"):
            ticket.wait()


def test_wait_blocks_until_another_thread_is_done() -> None:
    ticket, order = Ticket(), []

    def wait() -> None:
        ticket.wait()
        order.append("waited")

    thread = threading.Thread(target=wait)
    thread.start()
    order.append("done")
    ticket.done()
    thread.join(10)
    assert order == ["done", "waited"]


def test_worker_runs_first_in_first_out_and_outlives_an_error() -> None:
    worker, ran = Worker("test"), []

    def fail() -> None:
        raise Trouble("once")

    for i in range(50):
        worker.submit(lambda i=i: ran.append(i))
        if i == 20:
            worker.submit(fail)
            worker.submit(lambda: 1 / 0)
    worker.close()
    assert ran == list(range(50)), "a waiter behind the error must still be woken"
    assert isinstance(worker.error, Trouble), "the first error is kept"


def test_record_stands_for_all_copies_begun_so_far_and_none_later() -> None:
    ledger = CopyLedger()
    first, second = ledger.begin(), ledger.begin()
    both = ledger.record()
    third = ledger.begin()
    all_three = ledger.record()
    second(None)  # out of order
    assert not both.ready()
    first(None)
    assert both.ready() and not all_three.ready()
    third(None)
    assert all_three.ready()
    assert ledger.record().ready(), "nothing is under way"


def test_record_uses_the_ticket_it_is_given() -> None:
    ledger, ticket = CopyLedger(), Ticket()
    done = ledger.begin()
    assert ledger.record(ticket) is ticket and not ticket.ready()
    done(None)
    assert ticket.ready()


def test_error_reaches_every_ticket_that_stands_for_the_copy_and_all_later_ones() -> None:
    ledger = CopyLedger()
    bad = ledger.begin()
    one = ledger.record()
    good = ledger.begin()
    two = ledger.record()
    good(None)
    bad(Trouble("disk"))
    for ticket in (one, two, ledger.record()):
        with pytest.raises(Trouble, match="disk"):
            ticket.wait()


@pytest.mark.parametrize("seed", range(5))
def test_no_ticket_is_early_or_lost_under_many_threads(seed: int) -> None:
    """Copies end in any order on eight threads; a ticket is never ready before all that it stands for."""
    ledger, chance = CopyLedger(), random.Random(seed)
    finished: set[int] = set()
    lock = threading.Lock()
    early: list[int] = []
    waiting: list[tuple[int, Ticket]] = []
    calls = []
    for i in range(200):
        done = ledger.begin()

        def end(i: int = i, done=done) -> None:
            with lock:
                finished.add(i)
            done(None)

        calls.append(end)
        if i % 3 == 0:
            waiting.append((i, ledger.record()))
    chance.shuffle(calls)

    def watch() -> None:
        for last, ticket in waiting:
            ticket.wait()
            with lock:
                if not set(range(last + 1)) <= finished:
                    early.append(last)

    watcher = threading.Thread(target=watch)
    watcher.start()
    workers = [Worker(f"test{i}") for i in range(8)]
    for i, call in enumerate(calls):
        workers[i % 8].submit(call)
    for worker in workers:
        worker.close()
    watcher.join(20)
    assert not watcher.is_alive() and not early


def test_a_mark_stands_for_all_copies_begun_so_far() -> None:
    ledger = CopyLedger()
    ledger.wait(ledger.mark())  # nothing is under way
    first, second = ledger.number(), ledger.number()
    mark, third = ledger.mark(), ledger.number()
    passed = threading.Event()

    def watch() -> None:
        ledger.wait(mark)
        passed.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    ledger.end(second, None)
    assert not passed.wait(0.02), "the first is still under way"
    ledger.end(first, None)
    assert passed.wait(20)
    watcher.join()
    ledger.end(third, Trouble("disk"))
    with pytest.raises(Trouble, match="disk"):
        ledger.wait(ledger.mark())


def test_nobody_waits_for_a_worker_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WATCH_S", 0.01)
    worker = Worker("test")
    assert worker.fault() is None
    ticket = Ticket(watch=worker.fault)
    worker._queue.put(None)  # what ends it, though nobody closed it
    worker._thread.join()
    worker.submit(ticket.done)
    for wait in (ticket.wait, worker.wait_idle):
        with pytest.raises(RuntimeFault, match="what a step waits for will not come: the thread forebay-test has end"):
            wait()
    worker.close()
    assert worker.fault() is None  # as it was asked to


def test_what_ends_a_worker_does_not_end_who_waits_for_it() -> None:
    def leave() -> None:
        raise SystemExit

    worker = Worker("test")
    worker.submit(leave)
    with pytest.raises(RuntimeFault, match="the thread forebay-test has ended"):
        worker.wait_idle()
    worker.close()


def test_nobody_waits_for_copies_that_nobody_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WATCH_S", 0.01)
    found: list[BaseException] = []
    ledger = CopyLedger(lambda: found[0] if found else None)
    end = ledger.begin()
    waiting = [threading.Thread(target=_expect_fault, args=(wait, found)) for wait in (
        lambda: ledger.wait(ledger.mark()), ledger.record().wait)]
    for thread in waiting:
        thread.start()
        assert thread.is_alive()
    found.append(Trouble("gone"))
    for thread in waiting:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert found[1:] == ["told", "told"]
    end(None)
    ledger.wait(ledger.mark())  # what has come has come, whoever has gone


def _expect_fault(wait, found: list) -> None:
    try:
        wait()
    except RuntimeFault as error:
        found.append("told" if "gone" in str(error) else error)


ENDING = """
import threading, torch
from forebay.runtime.devices.streams import Worker

worker, begun, x = Worker("test"), threading.Event(), torch.randn(300, 300)

def multiply():
    begun.set()
    for _ in range(400):
        x.copy_(x @ x / 100)

for _ in range(1000):
    worker.submit(multiply)
begun.wait()
print("done")
"""


def test_a_process_ends_well_while_a_worker_is_inside_torch() -> None:
    """It waits for the call under way, not for the thousand behind it; a thread that is let go on aborts it."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
