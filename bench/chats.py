"""Chats on disk: `--data` as one file that every process reads.

    FILE                    JSON lines, a row a line
    ORGANISATION/NAME       a data set of the Hugging Face hub, its split "train"
    ORGANISATION/NAME:SPLIT another split, or a part of one: HuggingFaceH4/no_robots:train[:2000]

A row has "messages", each with "role" and "content", or "prompt" and "completion", which are such
lists or two texts; or ShareGPT's "conversations", each with "from" and "value". Other columns are
ignored. A row that is no such chat, or calls tools, is refused.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from batches import ROLES
from bench.folders import unfinished_beside

HUB_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?::(.+))?")
SHAREGPT = {"human": "user", "gpt": "assistant"}
WANTED = '{"messages": [{"role": "user", "content": "..."}, ...]}'


def gather(data: str, cache: Path) -> Path:
    """Write the chats of `data` to a file in `cache`, {"messages": [...]} a line, and return it.

    Its name is its SHA-256: a run continues with the chats it began with.

    Raises ValueError if there is no such data or a row is no chat.
    """
    path = Path(data)
    is_file = path.exists() or path.suffix == ".jsonl"
    hub = None if is_file else HUB_NAME.fullmatch(data)
    rows = (
        _numbered("chat", _data_set(data, hub[1], hub[2] or "train", str(cache / "hub")))
        if hub
        else _read(path)
    )
    written = []
    for where, row in rows:
        try:
            chat = chat_of(row)
        except ValueError as error:
            raise ValueError(f"--data {data}, {where}: {error}; wanted {WANTED}") from None
        written.append(json.dumps({"messages": chat}, ensure_ascii=False) + "\n")
    if not written:
        raise ValueError(f"--data {data}: empty; wanted chats, {WANTED} a line")
    text = "".join(written).encode()
    gathered = (cache / "data" / f"{hashlib.sha256(text).hexdigest()[:12]}.jsonl").resolve()
    if not gathered.exists():
        with unfinished_beside(gathered) as unfinished:  # another run may be reading
            unfinished.write_bytes(text)
    return gathered


def chat_of(row: Any) -> list[dict[str, str]]:
    """Return the role and content of each message of a row, or raise ValueError: it is no chat."""
    columns = row if isinstance(row, dict) else {}
    entries = columns.get("messages") or columns.get("conversations")
    asked, said = columns.get("prompt"), columns.get("completion")
    if not entries and isinstance(asked, str):
        entries = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    elif not entries and isinstance(asked, list) and isinstance(said, list):
        entries = asked + said
    if not isinstance(entries, list):
        raise ValueError('no "messages" list')
    messages = [_message(entry, place) for place, entry in enumerate(entries, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no assistant message, and the loss is on what the assistant says")
    return messages


def _message(entry: Any, place: int) -> dict[str, str]:
    fields = entry if isinstance(entry, dict) else {}
    if fields.get("tool_calls") or fields.get("role") == "tool":
        raise ValueError(f"message {place} calls a tool or answers one; drop such chats")
    role = fields.get("role") or SHAREGPT.get(str(fields.get("from")), fields.get("from"))
    content = fields.get("value") if fields.get("content") is None else fields["content"]
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(
            f'message {place} lacks a "content" string or a "role" out of {", ".join(ROLES)}'
        )
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"message {place} has half a surrogate pair at character {error.start + 1}"
        ) from None
    return {"role": role, "content": content}


def _numbered(word: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{word} {number}", row) for number, row in enumerate(rows, start=1))


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file with their places, such as "line 3".

    The standard library reads JSON: `datasets` turns a "4" in a mixed column into a number, and
    half a surrogate pair into an empty text.
    """
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ValueError(
            f"--data {path}: no file to read; give chats as JSON lines, or a data set of the hub"
        )
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for where, text in _numbered("line", data.split(b"\n")):
        if text.strip():
            try:
                yield where, json.loads(text.decode())
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number too long
                said = f"{where}: not JSON ({error})"
                raise ValueError(f"--data {path}, {said}; wanted {WANTED} a line") from None


def _data_set(data: str, name: str, split: str, cache: str) -> Iterable[dict[str, Any]]:
    """Load a data set of the hub, without the library's progress bars and warnings."""
    import datasets  # takes a second
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()
    try:
        return list(datasets.load_dataset(name, split=split, cache_dir=cache))
    except Exception as error:  # offline, unknown, gated: its words say which
        said = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
        raise ValueError(
            f"--data {data}: no such data set ({said}); give a file of JSON lines, or "
            "ORGANISATION/NAME:SPLIT of the hub"
        ) from None
