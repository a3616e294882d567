"""Chats on disk: what `--data` names, as one file that every process reads.

    FILE                    JSON lines, one chat a line
    ORGANISATION/NAME       a data set of the Hugging Face hub, its split "train"
    ORGANISATION/NAME:SPLIT another split, or a part of one: HuggingFaceH4/no_robots:train[:2000]

A row is a chat with "messages" (each a "role" and a "content"), a "prompt" with its "completion",
or an "instruction" (and its "input") with its "output".
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from batches import ROLES

HUB_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?::(.+))?")
WANTED = '{"messages": [{"role": "user", "content": "..."}, ...]}'

Messages = list[dict[str, str]]


def gather(data: str, cache: Path) -> Path:
    """Return the file with the chats of `data`: {"messages": [...]} a line, in `cache`.

    The file is named by its SHA-256, so that a run goes on with the chats that it began with.

    Raises:
        ValueError: there is no such file or data set, one of its rows is no chat, or `cache`
            cannot be written.
    """
    is_file = Path(data).exists() or data.endswith((".jsonl", ".json"))
    hub = None if is_file else HUB_NAME.fullmatch(data)
    rows = _download(hub[1], hub[2], cache / "hub") if hub else _read(Path(data))
    try:
        chats = [_chat(row, f"chat {number}") for number, row in enumerate(rows, start=1)]
    except ValueError as error:
        # datasets may have read into columns what a line does not say
        reason = (None if hub else _first_wrong_line(Path(data))) or f", {error}"
        raise ValueError(f"--data {data}{reason}") from None
    if not chats:
        raise ValueError(f"--data {data}: empty; wanted chats, {WANTED} a line")
    written = [json.dumps({"messages": chat}, ensure_ascii=False) for chat in chats]
    text = "".join(f"{line}\n" for line in written).encode()
    path = (cache / "data" / f"{hashlib.sha256(text).hexdigest()[:12]}.jsonl").resolve()
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as unfinished:
            unfinished.write(text)
        Path(unfinished.name).replace(path)  # whole, as another run may read it
    except OSError as error:
        raise ValueError(f"--cache {cache}: cannot be written ({error.strerror})") from None
    return path


def _read(path: Path) -> Iterable[dict[str, Any]]:
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ValueError(
            f"--data {path}: no file to read; give chats as JSON lines, or a data set of the hub"
        )
    datasets = _quiet_datasets()
    try:
        with tempfile.TemporaryDirectory() as scratch:  # its own cache goes by a file's time alone
            return datasets.Dataset.from_json(str(path), cache_dir=scratch, keep_in_memory=True)
    except Exception as error:  # pyarrow and pandas raise many kinds, with rows counted by block
        if not path.read_bytes().strip():
            return []
        reason = _first_wrong_line(path) or f": {_one_line(error.__cause__ or error)}"
        raise ValueError(f"--data {path}{reason}") from None


def _download(name: str, split: str | None, cache: Path) -> Iterable[dict[str, Any]]:
    datasets = _quiet_datasets()
    try:
        return datasets.load_dataset(name, split=split or "train", cache_dir=str(cache))
    except Exception as error:  # offline, unknown, gated, another split: its own words say which
        raise ValueError(
            f"--data {name}: not a file, and not to be had from the hub ({_one_line(error)}); "
            "give chats as JSON lines, or ORGANISATION/NAME:SPLIT"
        ) from None


def _quiet_datasets() -> Any:
    """The library, imported (a second) where data is read, without its bars and warnings."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()
    return datasets


def _first_wrong_line(path: Path) -> str | None:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        where = f"line {number}"
        try:
            if line.strip():
                _chat(json.loads(line.decode()), where)
        except UnicodeDecodeError as error:
            return f", {where}: not UTF-8 text (byte {error.start}); wanted {WANTED}"
        except json.JSONDecodeError as error:
            return f", {where}: not JSON ({error.msg}); wanted {WANTED}"
        except RecursionError as error:  # brackets too deep
            return f", {where}: {error}; wanted {WANTED}"
        except ValueError as error:
            words = str(error)  # ours say where; a number too long for Python does not
            return f", {words if words.startswith(where) else f'{where}: {words}'}"
    return None


def _chat(row: object, where: str) -> Messages:
    """The role and content of each message. ValueError says where and what is wrong."""
    try:
        return _messages(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _messages(row: object) -> Messages:
    columns = row if isinstance(row, dict) else {}
    entries = columns.get("messages")
    if entries is None:
        entries = _question_and_answer(columns)
    if not isinstance(entries, list):
        raise ValueError(f'no "messages" list; wanted {WANTED}; put the chat under "messages"')
    messages = [_message(entry, place) for place, entry in enumerate(entries, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            "no assistant message; wanted one at least, as the loss is on what the assistant says; "
            "add one or drop the chat"
        )
    return messages


def _question_and_answer(columns: dict[str, Any]) -> list[Any] | None:
    for question, context, answer in (
        ("prompt", None, "completion"),
        ("instruction", "input", "output"),
    ):
        asked, said = columns.get(question), columns.get(answer)
        if isinstance(asked, list) and isinstance(said, list):  # messages, as TRL writes them
            return asked + said
        if asked is not None and said is not None:
            if context and columns.get(context):
                asked = f"{asked}\n\n{columns[context]}"
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return None


def _message(entry: object, place: int) -> dict[str, str]:
    fields = entry if isinstance(entry, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(
            f'message {place} lacks a "role" or a "content" string; wanted both; '
            "write the text of the message as one string"
        )
    if role not in ROLES:
        raise ValueError(
            f"message {place} has the role {json.dumps(role)}; wanted one of {', '.join(ROLES)}; "
            "rename the role or drop the message"
        )
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"message {place} has half a surrogate pair at character {error.start + 1}; wanted "
            "Unicode text; write the character whole"
        ) from None
    return {"role": role, "content": content}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
