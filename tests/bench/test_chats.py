"""The data that `--data` accepts, and the one line that says what is wrong with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from cases.one_line import refused
from transformers import PreTrainedTokenizerFast

from batches import Message, load_tokenizer, read_chats, sha256_of, tokenize
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
    ([vars(message) for message in CHAT], CHAT),
    ({"prompt": "2 + 2?", "completion": "4"}, CHAT),
    ({"prompt": [vars(CHAT[0])], "completion": [vars(CHAT[1])]}, CHAT),
    ({"instruction": "2 + 2?", "input": "", "output": "4", "system": "", "history": None}, CHAT),
    ({"instruction": "2", "input": "+ 2?", "output": "4"},
     [Message("user", "2\n\n+ 2?"), CHAT[1]]),
    ({"instruction": "2 + 2?", "output": "4", "system": "Be brief.", "history": [["a", "b"]]},
     [SYSTEM, Message("user", "a"), Message("assistant", "b"), *CHAT]),
    (  # ShareGPT's
        {"system": "Be brief.", "tools": "", "conversations": [
            {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        [SYSTEM, *CHAT],
    ),
    (
        {"messages": [{"role": "developer", "content": ["Be brief."], "tool_calls": None},
                      {"role": "user", "content": ["2 + ", "2?"]},
                      {"role": "assistant", "content": ["4"], "tool_calls": []}]},
        [SYSTEM, *CHAT],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "chat"), USUAL)
@pytest.mark.parametrize("form", ["lines", "array", "indented", "train", "parquet"])
def test_the_usual_forms_are_chats(tmp_path, form, row, chat):
    if form == "parquet":
        row = {"messages": row} if isinstance(row, list) else row
        datasets.Dataset.from_list([row, row]).to_parquet(path := tmp_path / "chats.parquet")
        assert read_chats(gather(str(path), tmp_path)) == [chat, chat]
        return
    text = {
        "lines": f"\ufeff{json.dumps(row)}\n\n{json.dumps(row)}\r\n",
        "array": json.dumps([row, row]),
        "indented": json.dumps([row, row], indent=1),
        "train": json.dumps({"version": 1, "train": [row, row]}, indent=1),
    }
    assert gathered(tmp_path, text[form]) == [chat, chat]


def test_an_array_and_parquet_name_the_chat_that_is_wrong(tmp_path):
    rows = [json.loads(GOOD)] * 30
    rows[19] = {"messages": [vars(CHAT[0])]}
    no_answer = "chats.jsonl, chat 20: no assistant mess"
    for text in (json.dumps(rows), json.dumps(rows, indent=1), json.dumps({"data": rows})):
        assert no_answer in refused(gathered, tmp_path, text)
    parquet = tmp_path / "chats.parquet"
    datasets.Dataset.from_list(rows).to_parquet(parquet)
    said = refused(gather, str(parquet), tmp_path)
    assert said.startswith(f"--data {parquet}, chat 20: no assistant message")
    parquet.write_text("no parquet")
    said = refused(gather, str(parquet), tmp_path)
    assert said.startswith(f"--data {parquet}: not parquet (") and "; give parquet" in said
    torn = json.dumps(rows[:2], indent=1)[:-20]
    assert f", line {torn.count(chr(10)) + 1}: not JSON (" in refused(gathered, tmp_path, torn)


# --- chats that call tools ------------------------------------------------------------------------

CHATML = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for one in messages %}<|im_start|>{{ "user" if one.role == "tool" else one.role }}
{{ one.content }}{% for call in one.tool_calls %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
CALL = {"name": "add", "arguments": {"a": 2}}
CALLED = [
    CHAT[0],
    Message("assistant", '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'),
    Message("user", "4"),
    CHAT[1],
]
PARTS = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
ASKED, SAID = {"role": "user", "content": PARTS}, vars(CHAT[1])
ANSWERED = {"role": "tool", "content": "4"}


def with_template(tmp_path, template):
    folder = tmp_path / "model"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DATA / "tokenizer.json"))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def tool_rows(calls, tools=None, **others):
    said = {"role": "assistant", "content": None, **calls}
    return {"messages": [ASKED, said, ANSWERED, SAID], "tools": tools, **others}


@pytest.mark.parametrize(
    "row",
    [
        tool_rows({"tool_calls": [{"id": "1", "type": "function", "function": CALL}]}),
        tool_rows({"tool_calls": [CALL | {"arguments": '{"a": 2}'}]}, []),  # flat, as a string
        tool_rows({"tool_calls": json.dumps([CALL])}, "[]"),
        tool_rows({"tool_calls": [CALL | {"arguments": {"a": 2, "b": None}}]}),  # columns' None
        tool_rows({"function_call": CALL}),
        {"conversations": [
            {"from": "human", "value": "2 + 2?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"}]},
    ],
)  # fmt: skip
def test_tool_calls_are_written_by_the_chat_template(tmp_path, row):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(row, indent=1))
    model = with_template(tmp_path, CHATML)
    assert read_chats(gather(str(path), tmp_path, model)) == [CALLED]
    path.write_text(json.dumps([{**row, "tools": json.dumps([{"name": "add"}])}]))
    (chat,) = read_chats(gather(str(path), tmp_path, model))
    assert chat[0].role == "system" and '"name": "add"' in chat[0].content and chat[1:] == CALLED
    assert tokenize([chat], load_tokenizer(DATA / "tokenizer.json"))[0].input_ids


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("random weights", "it calls tools, and random weights have no chat template; give --mode"),
        (None, "it calls tools, and model has no chat template; give --model"),
        ("{{ raise_exception('no\ntools') }}", "the chat template does not take its tools (no too"),
        ("{{ messages[0].content }}", "the chat template leaves its tool add out; give --model a"),
        ("[{{ messages }}]", "the chat template does not write its tools as ChatML; give --model"),
    ],
)
def test_tool_calls_that_no_template_writes_are_named_in_one_line(tmp_path, template, said):
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{GOOD}\n{json.dumps(tool_rows({'tool_calls': [CALL]}))}\n")
    model = None if template == "random weights" else with_template(tmp_path, template)
    found = refused(gather, str(path), tmp_path, model)
    assert found.startswith(f"--data {path}, line 2: {said}")


@pytest.mark.parametrize(
    ("config", "said"),
    [("{", "/tokenizer_config.json: not JSON; save"), ("[]", ": its tokenizer does not load (")],
)
def test_a_broken_tokenizer_is_the_models_fault(tmp_path, config, said):
    path, model = tmp_path / "chats.jsonl", with_template(tmp_path, CHATML)
    path.write_text(json.dumps(tool_rows({"tool_calls": [CALL]})))
    (model / "tokenizer_config.json").write_text(config)
    assert refused(gather, str(path), tmp_path, model).startswith(f"--model {model}{said}")


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
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
         ', line 3: message 1 has a part of type "image"; wanted text parts'),
        ('{"conversations": [{"from": "gpt", "value": null}]}', ", line 3: message 1 lacks"),
        ('{"instruction": "a", "output": "b", "history": [1]}', ', line 3: "history" is no list'),
        ('{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
         ", line 3: message 1 has a tool call without a name"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"function": "add"}]}]}',
         ", line 3: message 1 has a tool call without a name"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"function": true}]}]}',
         ", line 3: message 1 has a tool call without a name"),
        ('{"messages": [{"role": "assistant", "content": ""}], "tools": "x"}',
         ', line 3: "tools" is no list'),
        ('{"messages": [{"role": "assistant", "content": ""}], "tools": [{"function": "add"}]}',
         ', line 3: "tools" is no list of functions with names; wanted their schemas'),
        (line(("user", "2 + 2?")), ", line 3: no assistant message"),
        (r'{"messages": [{"role": "assistant", "content": "\ud800"}]}',
         ", line 3: message 1 has half a surrogate pair"),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_named_in_one_line(tmp_path, bad, given):
    bad = bad if isinstance(bad, bytes) else bad.encode()
    said = refused(gathered, tmp_path, b"%b\n\n%b\n%b\n" % (GOOD.encode(), bad, GOOD.encode()))
    assert said.startswith(f"--data {tmp_path / 'chats.jsonl'}{given}") and "; wanted " in said


@pytest.mark.parametrize(
    ("text", "given"),
    [("9" * 5000, ", line 1: Exceeds the limit"), ("", ": empty; wanted chats, "),
     ("\n \n", ": empty; wanted chats, ")],
)  # fmt: skip
def test_a_number_too_long_for_python_and_an_empty_file_are_errors(tmp_path, text, given):
    said = refused(gathered, tmp_path, text)
    assert said.startswith(f"--data {tmp_path / 'chats.jsonl'}{given}")


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
    assert refused(gather, data, tmp_path).startswith(f"--data {data}: {said}")


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
    (cache := tmp_path / "cache").write_text("a file")
    said = refused(gather, str(DATA / "sft_train.jsonl"), cache)
    assert said.startswith(f"--cache {cache}: cannot be written (")


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
