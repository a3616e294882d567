"""What `--data` may name, and the one line that says what is wrong with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

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
    """So that data_sha256 and every batch are those of the file in the repository."""
    path = gather(str(DATA / "sft_train.jsonl"), tmp_path)
    assert path.read_bytes() == (DATA / "sft_train.jsonl").read_bytes()
    assert path.stem == sha256_of(path)[:12] and path.is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        (json.loads(GOOD) | {"id": 7}, CHAT),
        ({"prompt": "2 + 2?", "completion": "4"}, CHAT),
        ({"prompt": [vars(CHAT[0])], "completion": [vars(CHAT[1])]}, CHAT),
        ({"instruction": "2 + 2?", "input": "", "output": "4"}, CHAT),
        (
            {"instruction": "2", "input": "+ 2?", "output": "4"},
            [Message("user", "2\n\n+ 2?"), CHAT[1]],
        ),
    ],
)
def test_the_usual_forms_are_chats(tmp_path, row, chat):
    assert gathered(tmp_path, f"{json.dumps(row)}\n\n{json.dumps(row)}\r\n") == [chat, chat]


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
        (b"\xff", ", line 3: not UTF-8 text (byte 0)"),
        (b"[" * 100_000, ", line 3: maximum recursion depth exceeded"),
        ('{"text": "hello"}', ', line 3: no "messages" list'),
        ('{"messages": "hello"}', ', line 3: no "messages" list'),
        ('{"messages": [{"role": "user"}]}', ', line 3: message 1 lacks a "role" or a "content"'),
        ('{"prompt": "a", "completion": 4}', ', line 3: message 2 lacks a "role" or a "content"'),
        (line(("assistant", "4"), ("tool\n", "5")), ', line 3: message 2 has the role "tool\\n"'),
        (line(("user", "2 + 2?")), ", line 3: no assistant message"),
        (
            r'{"messages": [{"role": "assistant", "content": "\ud800"}]}',
            ", line 3: message 1 has half a surrogate pair",
        ),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_named_in_one_line(tmp_path, bad, given):
    bad = bad if isinstance(bad, bytes) else bad.encode()
    with pytest.raises(ValueError) as error:
        gathered(tmp_path, b"%b\n\n%b\n%b\n" % (GOOD.encode(), bad, GOOD.encode()))
    said = str(error.value)
    assert said.startswith(f"--data {tmp_path / 'chats.jsonl'}{given}") and "\n" not in said
    assert "; wanted " in said


def test_a_number_too_long_for_python_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^--data .*chats\.jsonl, line 1: Exceeds the limit"):
        gathered(tmp_path, "9" * 5000)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path, text):
    with pytest.raises(ValueError, match=r"^--data .*chats\.jsonl: empty; wanted chats, "):
        gathered(tmp_path, text)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("nowhere.jsonl", "no file to read; give chats as JSON lines, or a data set of the hub"),
        (str(DATA), "no file to read"),
        ("some-one/nothing", "not a file, and not to be had from the hub (Couldn't reach"),
    ],
)
def test_data_that_is_not_there_is_an_error(tmp_path, monkeypatch, data, said):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        gather(data, tmp_path)
    assert str(error.value).startswith(f"--data {data}: {said}") and "\n" not in str(error.value)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match=r"^--cache .*cache: cannot be written \(.*\)$"):
        gather(str(DATA / "sft_train.jsonl"), tmp_path / "cache")


def test_reading_says_nothing_and_leaves_nothing_in_the_users_home(tmp_path):
    """In a process of its own, where what the libraries log is seen, and what they import."""
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
    where = {
        "PYTHONPATH": str(DATA.parent),
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", code, "bad.jsonl", "good.jsonl", "some-one/nothing"],
        cwd=tmp_path, env=os.environ | where, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("refused\ndata\nrefused\n", "")
    assert not (tmp_path / "home").exists()
