"""The rehearsal: the command without a GPU. Its tests are the same on every machine."""

import sys
import threading
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
import transformers  # noqa: F401  # logs to the stderr of its first import, which a test closes

from bench import cells, options, planning
from bench import processes as isolated

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_without_gpu.py runs this file with the GPU hidden"
)


OVER = object()


def few_chats(folder):
    """Return a file of few chats, because every process tokenizes all of them."""
    chats = folder / "chats.jsonl"
    with (ROOT / "data" / "sft_train.jsonl").open() as published:
        chats.write_text("".join(published.readline() for _ in range(60)))
    return str(chats)


def small(folder, *arguments):
    return ["--device", "cpu", "--data", few_chats(folder), "--cache", str(folder / "cache"),
            "--out", str(folder), *arguments]  # fmt: skip


def plan_of(folder, *arguments):
    """Return the plan of a small command."""
    with planning.planned(options.parse(small(folder, *arguments), ""), []) as (plan, *_):
        return plan


class InThread:
    """`isolated._Process` without the process, which would import everything anew. It runs only
    while somebody listens, and stops where it waits for its turn: two never run at a time."""

    def __init__(self, function, arguments, takes_turns=False):
        turns = {"wait_for_turn": self.wait_for_turn} if takes_turns else {}
        self.function = partial(function, self.send, *arguments, **turns)
        self.sent, self.turns, self.error = SimpleQueue(), SimpleQueue(), None
        self.thread = threading.Thread(target=self.work, daemon=True)

    def work(self):
        try:
            self.function()
        except (Exception, SystemExit) as error:
            self.error = repr(error)
        self.sent.put(OVER)

    def send(self, message):
        if self.function is None:
            sys.exit()
        self.sent.put(message)

    def wait_for_turn(self, phase):
        self.send(isolated._WaitsForTurn(phase))
        return self.turns.get()

    def listen(self, on_message, silence_limit_s):
        if not self.thread.is_alive():
            self.thread.start()
        while (message := self.sent.get()) is not OVER:
            if isinstance(message, isolated._WaitsForTurn):
                return message.phase
            on_message(message)

    def go_on(self, running):
        self.turns.put(running)

    def terminate(self):
        """End it when it next sends something. If it is waiting, it gets a turn to do that."""
        self.function = None
        self.turns.put(0)

    def end(self):
        self.terminate()
        self.thread.join()
        return isolated.Ended(self.error, "")


def measured_cells(plan, variant, *blocks):
    """Return the cells that a process measures for these rounds and lengths."""
    sent = []
    cells.measure_cells(sent.append, plan, variant, list(blocks))
    return [message["cell"] for message in sent if "cell" in message]
