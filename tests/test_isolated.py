"""The functions below run in processes of their own, so they stand at the top of the module."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import isolated

ROOT = Path(__file__).resolve().parent.parent
SILENCE_LIMIT_S = 2.5  # a process takes a few tenths of a second to start


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


def collect(function, *arguments):
    messages = []
    ended = isolated.run(function, *arguments, on_message=messages.append)
    return messages, ended


def test_messages_arrive_in_order_and_output_is_kept_off_the_terminal(capfd):
    messages, ended = collect(send_three, 5)
    assert messages == [5, 6, 7]
    assert ended.error is None
    assert ended.output_tail == "printed, not shown"
    assert "printed" not in capfd.readouterr().out


def test_an_exception_is_an_outcome_with_its_last_words():
    messages, ended = collect(send_one_then_raise)
    assert messages == ["kept"]
    assert ended.error == "ended with exit code 1"
    assert ended.output_tail.endswith("RuntimeError: the reason")


def test_a_kill_is_an_outcome():
    messages, ended = collect(send_one_then_be_killed)
    assert messages == ["kept"]
    assert ended.error == "killed by SIGKILL"


def test_the_process_is_ended_when_its_messages_are_refused():
    def refuse(message):
        raise KeyboardInterrupt

    began = time.monotonic()
    try:
        isolated.run(send_three, 0, on_message=refuse)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("KeyboardInterrupt was swallowed")
    assert time.monotonic() - began < isolated.EXIT_GRACE_S


def test_a_process_that_is_stopped_cleans_up_first(tmp_path):
    def refuse(message):
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        isolated.run(send_then_clean_up, str(tmp_path / "file"), on_message=refuse)
    assert (tmp_path / "file").read_text() == "cleaned up"


def test_a_process_that_falls_silent_is_ended_and_its_last_words_are_kept():
    messages, began = [], time.monotonic()
    ended = isolated.run(fall_silent, on_message=messages.append, silence_limit_s=SILENCE_LIMIT_S)
    assert messages == ["ready"]
    assert ended.error == f"nothing was heard of it for {SILENCE_LIMIT_S:g} s"
    assert ended.output_tail == "the last words"
    took = time.monotonic() - began
    assert SILENCE_LIMIT_S <= took < SILENCE_LIMIT_S + isolated.TERMINATE_GRACE_S + 20


def test_a_process_that_keeps_sending_may_take_longer_than_the_limit():
    messages, began, pause_s = [], time.monotonic(), 0.4
    times = int(SILENCE_LIMIT_S / pause_s) + 2
    ended = isolated.run(
        send_now_and_then,
        times,
        pause_s,
        on_message=messages.append,
        silence_limit_s=SILENCE_LIMIT_S,
    )
    assert time.monotonic() - began > SILENCE_LIMIT_S
    assert (messages, ended.error) == (list(range(times)), None)


def test_the_process_dies_with_a_killed_parent(tmp_path):
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import isolated, test_isolated as t, sys\n"
            "if __name__ == '__main__':\n"
            f"    isolated.run(t.sleep_for_ever, {str(pid_file)!r}, on_message=print)",
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
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
