"""Functions in child processes. They stand at the top of the module: a child imports them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import processes as isolated

ROOT = Path(__file__).resolve().parents[2]
SILENCE_LIMIT_S = 4.0  # a process starts in a few tenths of a second, slower on a busy host
SILENT = f"nothing was heard of it for {SILENCE_LIMIT_S:g} s"


def send_three(send, first):
    print("printed, not shown")
    for value in range(first, first + 3):
        send(value)


def send_one_then_raise(send):
    send("kept")
    raise RuntimeError("the reason")


def send_one_then_be_killed(send):
    send("kept")
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_for_ever(send, pid_file):
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(600)


def send_then_clean_up(send, file):
    try:
        send("ready")
        time.sleep(600)
    finally:
        Path(file).write_text("cleaned up")


def fall_silent(send):
    print("the last words", flush=True)
    send("ready")
    time.sleep(600)


def send_now_and_then(send, times, pause_s):
    for number in range(times):
        send(number)
        time.sleep(pause_s)


def write_in_turns(send, file, name, turns, ends=None, phases=(), wait_for_turn=None):
    """Note the begin and end of each turn in a file. May die or hang before the last turn."""
    time.sleep(0.2 * turns)  # they reach their first wait one after the other
    for turn in range(turns):
        wait_for_turn(phases[turn] if phases else 0)
        with open(file, "a") as notes:
            notes.write(f"{name}{turn}(")
            notes.flush()
            time.sleep(0.05)
            notes.write(")\n")
        send(turn)
        if ends == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if ends == "hangs":
            time.sleep(600)


def refuse(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("function", "arguments", "wanted", "error", "last_words"),
    [
        (send_three, (5,), [5, 6, 7], None, "printed, not shown"),
        (send_one_then_raise, (), ["kept"], "ended with exit code 1", "RuntimeError: the reason"),
        (send_one_then_be_killed, (), ["kept"], "killed by SIGKILL", ""),
        (fall_silent, (), ["ready"], SILENT, "the last words"),
        # longer than the limit in all
        (send_now_and_then, (6, SILENCE_LIMIT_S / 4), [0, 1, 2, 3, 4, 5], None, ""),
    ],
)
def test_what_a_process_sends_is_kept_with_how_it_ended_and_its_last_words(
    function, arguments, wanted, error, last_words, capfd
):
    messages = []
    ended = isolated.run(
        function, *arguments, on_message=messages.append, silence_limit_s=SILENCE_LIMIT_S
    )
    assert (messages, ended.error) == (wanted, error)
    assert ended.output_tail.endswith(last_words)
    assert "printed" not in capfd.readouterr().out


def test_a_process_whose_messages_are_refused_is_ended_and_cleans_up_first(tmp_path, monkeypatch):
    # a busy host may stand still for longer than the usual grace
    monkeypatch.setattr(isolated, "TERMINATE_GRACE_S", isolated.EXIT_GRACE_S)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        isolated.run(send_then_clean_up, str(tmp_path / "file"), on_message=refuse)
    assert time.monotonic() - began < isolated.EXIT_GRACE_S
    assert (tmp_path / "file").read_text() == "cleaned up"


def in_turns(tmp_path, *each, **limits):
    """Return the notes of `write_in_turns`, the messages, and how all ended."""
    file, messages = tmp_path / "notes", []
    ended = isolated.run_in_turns(
        write_in_turns,
        [(str(file), *arguments) for arguments in each],
        on_message=lambda index, message: messages.append((index, message)),
        **limits,
    )
    return file.read_text().split(), messages, ended


def test_turns_go_round_in_order_one_at_a_time_and_short_ones_leave(tmp_path):
    notes, messages, ended = in_turns(tmp_path, ("a", 3), ("b", 1), ("c", 2))
    assert notes == ["a0()", "b0()", "c0()", "a1()", "c1()", "a2()"]
    assert messages == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]
    assert [one.error for one in ended] == [None] * 3


def test_nobody_begins_a_phase_while_others_are_in_an_earlier_one(tmp_path):
    quick, slow = (2, None, (0, 1)), (3, None, (0, 0, 1))  # a cell that fails takes fewer turns
    notes, *_ = in_turns(tmp_path, ("a", *quick), ("b", *slow))
    assert notes == ["a0()", "b0()", "b1()", "a1()", "b2()"]


def test_who_ends_in_its_turn_leaves_the_rest_to_the_others(tmp_path):
    each = ("a", 2), ("b", 2, "dies"), ("c", 2, "hangs"), ("d", 2)
    notes, messages, ended = in_turns(tmp_path, *each, silence_limit_s=SILENCE_LIMIT_S)
    assert notes == ["a0()", "b0()", "c0()", "d0()", "a1()", "d1()"]
    assert [index for index, _ in messages] == [0, 1, 2, 3, 0, 3]
    assert [one.error for one in ended] == [None, "killed by SIGKILL", SILENT, None]


def send_name(send, name, then=None):
    send(name)
    if then:
        then(send)
    time.sleep(0 if name == "quick" else 600)


@pytest.mark.parametrize(
    ("each", "error", "last_words"),
    [
        ([("quick",), ("quick",)], None, ""),
        (
            [("slow",), ("quick", send_one_then_raise)],
            "process 1: ended with exit code 1",
            "the reason",
        ),
        ([("slow",), ("quick", send_one_then_be_killed)], "process 1: killed by SIGKILL", ""),
        ([("slow",), ("over",)], None, ""),  # `on_message` has heard enough
        pytest.param([("slow",), ("slow",)], SILENT, "", marks=pytest.mark.slow),
    ],
)
def test_processes_at_once_end_with_the_first_that_fails_or_when_enough_is_heard(
    each, error, last_words
):
    heard, began = [], time.monotonic()

    def hear(index, message):
        heard.append((index, message))
        return message == "over"

    ended = isolated.run_at_once(send_name, each, hear, SILENCE_LIMIT_S)
    assert {(1, each[1][0])} <= {*heard} <= {(0, each[0][0]), (1, each[1][0]), (1, "kept")}
    assert ended.error == error and ended.output_tail.endswith(last_words)
    assert time.monotonic() - began < isolated.EXIT_GRACE_S
    assert multiprocessing.active_children() == []


def ignore_the_end(send):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a GPU does that waits for another
    send("deaf")
    time.sleep(600)


@pytest.mark.slow
def test_processes_that_do_not_end_when_told_are_killed_together(monkeypatch):
    monkeypatch.setattr(isolated, "TERMINATE_GRACE_S", 2)
    heard = []

    def hear(index, message):
        heard.append(time.monotonic())
        return len(heard) == 3

    isolated.run_at_once(ignore_the_end, [()] * 3, hear)
    assert 2 <= time.monotonic() - heard[-1] < 2 * 2


def be_killed_while_waiting(send, folder, name, wait_for_turn=None):
    """Let a kill b in its turn, while b waits."""
    Path(folder, name).write_text(str(os.getpid()))
    wait_for_turn(0)
    if name == "a":
        other = int(Path(folder, "b").read_text())
        os.kill(other, signal.SIGKILL)
        wait_for(lambda: not is_running(other))
    send(wait_for_turn(0))


def test_one_that_is_killed_while_it_waits_leaves_the_rest(tmp_path):
    heard = []
    ended = isolated.run_in_turns(
        be_killed_while_waiting,
        [(str(tmp_path), name) for name in "abc"],
        on_message=lambda index, message: heard.append((index, message)),
    )
    assert heard == [(0, 2), (2, 1)]  # as many still ran
    assert [one.error for one in ended] == [None, "killed by SIGKILL", None]


def test_all_that_take_turns_are_ended_when_a_message_is_refused(tmp_path):
    began = time.monotonic()
    each = [(str(tmp_path / "notes"), name, 2) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        isolated.run_in_turns(write_in_turns, each, on_message=refuse)
    assert time.monotonic() - began < isolated.EXIT_GRACE_S
    assert multiprocessing.active_children() == []


def test_the_process_dies_with_a_killed_parent(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "import test_isolated as t, sys\n"
        "if __name__ == '__main__':\n"
        "    t.isolated.run(t.sleep_for_ever, sys.argv[1], on_message=print)"
    )
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))
    parent = subprocess.Popen(
        [sys.executable, "-c", code, pid_file], env={**os.environ, "PYTHONPATH": paths}
    )
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    child = int(pid_file.read_text())
    assert is_running(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_running(child))


def wait_for(condition, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False
