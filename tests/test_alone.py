"""Workers that share a GPU: no other test runs beside one that is marked `alone`."""

import threading
from contextlib import ExitStack

from cases.alone import turn


def has_its_turn(file, alone, limit_s):
    """Return whether another worker gets the lock in time. The worker releases it at once."""
    done = threading.Event()

    def take():
        with turn(file, alone):
            done.set()

    threading.Thread(target=take, daemon=True).start()
    return done.wait(limit_s)


def test_tests_run_beside_each_other_and_one_that_wants_to_be_alone_waits(tmp_path):
    file = tmp_path / "lock"
    with ExitStack() as others:
        for _ in range(3):
            others.enter_context(turn(file, alone=False))
        assert has_its_turn(file, alone=False, limit_s=30)
        assert not has_its_turn(file, alone=True, limit_s=0.2)
    with turn(file, alone=True):
        assert not has_its_turn(file, alone=False, limit_s=0.2)
        assert not has_its_turn(file, alone=True, limit_s=0.2)
    assert has_its_turn(file, alone=True, limit_s=30)
