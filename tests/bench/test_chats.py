"""The data that `--data` accepts, and the one line that says what is wrong with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from cases.one_line import refused

from batches import Message, read_chats, sha256_of
from bench.chats import gather

DATA = Path(__file__).resolve().parents[2] / "data"


def line(*messages: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": r, "content": c} for r, c in messages]})


GOOD = line(("user", "2 + 2?"), ("assistant", "4"))
CHAT = [Message("user", "2 + 2?"), Message("assistant", "4")]


def gathered(tmp_path, text: str | bytes) -> list[list[Message]]:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_chats(gather(str(path), tmp_path))


def test_the_published_chats_are_gathered_byte_for_byte(tmp_path):
    """Keep data_sha256 and all batches those of the file in the repository."""
    path = gather(str(DATA / "sft_train.jsonl"), tmp_path)
    assert path.read_bytes() == (DATA / "sft_train.jsonl").read_bytes()
    assert path.stem == sha256_of(path)[:12] and path.is_relative_to(tmp_path)


SYSTEM = Message("system", "Be brief.")
USUAL = [
    (json.loads(GOOD) | {"id": 7}, CHAT),
    ({"messages": None, "prompt": "2 + 2?", "completion": "4"}, CHAT),
    ({"prompt": [vars(CHAT[0])], "completion": [vars(CHAT[1])]}, CHAT),
    ({"conversations": [{"from": "system", "value": "Be brief."},
                        {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
     [SYSTEM, *CHAT]),
    ({"messages": [vars(CHAT[0]), vars(CHAT[1]) | {"tool_calls": None, "content": ""}]},
     [CHAT[0], Message("assistant", "")]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "chat"), USUAL)
def test_the_usual_forms_are_chats(tmp_path, row, chat):
    text = f"\ufeff{json.dumps(row)}\n\n{json.dumps(row)}\r\n"
    assert gathered(tmp_path, text) == [chat, chat]


def test_texts_stay_as_they_are(tmp_path):
    texts = ["", " \n", "é ∫ 🙂", "\x00\x7f\u2028", "2024-01-01", "null", r"\int\, dx"]
    chats = [[("system", text), ("assistant", text)] for text in texts]
    read = gathered(tmp_path, "\n".join(line(*chat) for chat in chats))
    assert read == [[Message(*message) for message in chat] for chat in chats]


def test_a_data_set_of_the_hub_is_kept_as_a_file(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split, cache_dir):
        asked.append((name, split, Path(cache_dir).is_relative_to(tmp_path)))
        return datasets.Dataset.from_list([json.loads(GOOD)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    paths = {gather(name, tmp_path) for name in ("some-one/chats", "some-one/chats:test[:2]")}
    assert asked == [("some-one/chats", "train", True), ("some-one/chats", "test[:2]", True)]
    assert [read_chats(path) for path in paths] == [[CHAT]]  # the same chats, the same file


@pytest.mark.parametrize(
    ("bad", "given"),
    [
        ("{'messages': 1}", ", line 3: not JSON (Expecting property name"),
        (b"\xff", ", line 3: not JSON ('utf-8' codec can't decode byte 0xff"),
        (b'{"a":' * 100_000, ", line 3: not JSON (maximum recursion depth exceeded"),
        ("9" * 5000, ", line 3: not JSON (Exceeds the limit"),
        ("4", ', line 3: no "messages" list'),
        ('{"text": "hello"}', ', line 3: no "messages" list'),
        ('{"messages": "hello"}', ', line 3: no "messages" list'),
        ('{"messages": ["hello"]}', ', line 3: message 1 lacks a "content" string or'),
        ('{"messages": [{"role": "user"}]}', ', line 3: message 1 lacks a "content" string or'),
        ('{"prompt": "a", "completion": 4}', ", line 3: message 2 lacks"),
        ('{"prompt": "a"}', ", line 3: message 2 lacks"),
        (line(("assistant", "4"), ("narrator\n", "5")), ", line 3: message 2 lacks"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', ", line 3: message 1"),
        (line(("assistant", "4"), ("tool", "5")), ", line 3: message 2 calls a tool or answers"),
        ('{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}',
         ", line 3: message 1 calls a tool or answers one; drop such chats; wanted"),
        (line(("user", "2 + 2?")), ", line 3: no assistant message"),
        (r'{"messages": [{"role": "assistant", "content": "\ud800"}]}',
         ", line 3: message 1 has half a surrogate pair at character 1"),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_named_in_one_line(tmp_path, bad, given):
    bad = bad if isinstance(bad, bytes) else bad.encode()
    said = refused(gathered, tmp_path, b"%b\n\n%b\n%b\n" % (GOOD.encode(), bad, GOOD.encode()))
    assert said.startswith(f"--data {tmp_path / 'chats.jsonl'}{given}") and "; wanted " in said


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_chats_is_an_error(tmp_path, text):
    said = refused(gathered, tmp_path, text)
    assert said.startswith(f"--data {tmp_path / 'chats.jsonl'}: empty; wanted chats, ")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("nowhere.jsonl", "no file to read; give chats as JSON lines, or a data set of the hub"),
        (str(DATA), "no file to read"),
        ("some-one/nothing", "no such data set (Couldn't reach"),
    ],
)
def test_data_that_is_not_there_is_an_error(tmp_path, monkeypatch, data, said):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert refused(gather, data, tmp_path).startswith(f"--data {data}: {said}")


def test_reading_says_nothing_and_leaves_nothing_in_the_users_home(tmp_path):
    """Run in a child process, which shows everything that the libraries log and import."""
    (tmp_path / "bad.jsonl").write_text(f"{GOOD}\nnot json\n")
    (tmp_path / "good.jsonl").write_text(f"{GOOD}\n")
    code = """
import sys
from pathlib import Path
from bench.chats import gather

assert "datasets" not in sys.modules  # a second, which --help does not wait for
for data in sys.argv[1:]:
    try:
        print(gather(data, Path.cwd() / "cache").parent.name)
    except ValueError:
        print("refused")
assert "transformers" not in sys.modules
"""
    home = tmp_path / "home"
    where = {"PYTHONPATH": str(DATA.parent), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code, "bad.jsonl", "good.jsonl", "some-one/nothing"],
        cwd=tmp_path, env=os.environ | where, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("refused\ndata\nrefused\n", "")
    assert not home.exists()
