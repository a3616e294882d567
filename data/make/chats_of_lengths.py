"""Chats with the lengths of data sets that people train on, and how much padding those make.

    python data/make/chats_of_lengths.py                       # a table of the padding, ours too
    python data/make/chats_of_lengths.py dolly chats.jsonl     # chats for `lora_bench.py --data`

The means are of rounds in a chat, and of tokens in a prompt and in an answer, after Wang et al.,
arXiv 2306.04751, table 1, and not yet checked against it. Lengths are drawn with those means from a
log-normal distribution, whose deviation of 1 is ours, and cut at what such data is trained with.
The words are those of sft_train.jsonl, and mean nothing.
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parents[1]
SEED, DEVIATION = 0, 1.0
TOKENS = 600_000  # of the chats that are written
FULL_BATCH = 16_384  # tokens of a batch if all its rows were full


class Lengths(NamedTuple):
    """Mean rounds of a chat, mean tokens of a round's two sides, and where chats are cut."""

    rounds: float
    prompt: float
    answer: float
    most: int

    @property
    def mean(self) -> float:
        return self.rounds * (self.prompt + self.answer)


SETS = {
    "alpaca": Lengths(1, 27.8, 64.6, 512),
    "dolly": Lengths(1, 118.1, 91.3, 512),
    "oasst1": Lengths(1.6, 34.8, 212.5, 1024),
    "sharegpt": Lengths(3.2, 71.0, 357.8, 2048),
}


def draw(of: Lengths, count: int, seed: int = SEED) -> list[int]:
    """Return `count` lengths in tokens, at least two and at most the cut."""
    draws = random.Random(seed)
    middle = math.log(of.mean) - DEVIATION**2 / 2
    drawn = (round(draws.lognormvariate(middle, DEVIATION)) for _ in range(count))
    return [min(max(length, 2), of.most) for length in drawn]


def padding(lengths: list[int], rows: int) -> float:
    """Return the share of padding where each batch is as long as its longest row."""
    batches = [lengths[at : at + rows] for at in range(0, len(lengths) - rows + 1, rows)]
    tokens = sum(map(sum, batches))
    return 1 - tokens / sum(rows * max(batch) for batch in batches)


def ours(most: int = 512) -> list[int]:
    """Return the lengths of the benchmark's own chats, in ChatML, cut at `most`."""
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    lines = (HERE / "sft_train.jsonl").read_text(encoding="utf-8").splitlines()
    told = [
        "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in messages
        )
        for messages in (json.loads(line)["messages"] for line in lines)
    ]
    encoded = tokenizer.encode_batch(told, add_special_tokens=False)
    return [min(len(one.ids), most) for one in encoded]


def chats(of: Lengths, count: int):
    """Yield chats of about the lengths drawn, as {"messages": [...]}."""
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    lines = (HERE / "sft_train.jsonl").read_text(encoding="utf-8").splitlines()
    said = (message["content"] for line in lines for message in json.loads(line)["messages"])
    words = tokenizer.encode(" ".join(said), add_special_tokens=False).ids
    markers = "".join(f"<|im_start|>{role}\n<|im_end|>\n" for role in ("user", "assistant"))
    around = tokenizer.encode(markers, add_special_tokens=False)
    at = 0
    for length in draw(of, count):
        length = max(length - len(around.ids), 2)
        prompt = min(max(round(length * of.prompt / (of.prompt + of.answer)), 1), length - 1)
        messages = []
        for role, tokens in (("user", prompt), ("assistant", length - prompt)):
            at = at if at + tokens <= len(words) else 0
            messages.append({"role": role, "content": tokenizer.decode(words[at : at + tokens])})
            at += tokens
        yield {"messages": messages}


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] in SETS:
        of = SETS[arguments[0]]
        count = round(TOKENS / of.mean)
        lines = (json.dumps(chat, ensure_ascii=False) for chat in chats(of, count))
        Path(arguments[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return 0
    if arguments:
        print(f"wanted one of {', '.join(SETS)} and a file to write; or nothing, for the table")
        return 2
    print("| lengths as in | mean tokens | cut at | rows of a batch | padding |")
    print("|---|---|---|---|---|")
    drawn = [(name, draw(of, 20_000), of.most) for name, of in SETS.items()]
    for name, lengths, most in (*drawn, ("sft_train.jsonl", ours(), 512)):
        mean, rows = sum(lengths) / len(lengths), FULL_BATCH // most
        print(f"| {name} | {mean:.0f} | {most} | {rows} | {padding(lengths, rows):.0%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
