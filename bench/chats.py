"""Chats on disk: `--data` as one file that every process reads.

    FILE                    JSON lines, JSON arrays, {"train": [...]} or parquet
    ORGANISATION/NAME       a data set of the Hugging Face hub, its split "train"
    ORGANISATION/NAME:SPLIT another split, or a part of one: HuggingFaceH4/no_robots:train[:2000]

`rows.py` turns rows into chats.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.folders import unfinished_beside
from bench.rows import CHAT, WANTED, chat_of
from bench.tool_calls import BrokenTokenizer, written_by

HUB_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?::(.+))?")
SPLIT = "train"
IN_A_CHAT = {*CHAT, "prompt", "instruction"}


def gather(data: str, cache: Path, model: Path | None = None) -> Path:
    """Write the chats of `data` to a file in `cache`, {"messages": [...]} a line, and return it.

    Its name is its SHA-256: a run continues with the chats it began with. The chat template of the
    tokenizer in the folder `model` writes tool calls.

    Raises ValueError if there is no such data, a row is no chat, the tokenizer does not load, or
    `cache` cannot be written.
    """
    path = Path(data)
    is_file = path.exists() or path.suffix in (".jsonl", ".json", ".parquet")
    hub = None if is_file else HUB_NAME.fullmatch(data)
    rows = _numbered(_download(hub[1], hub[2], cache / "hub")) if hub else _read(path)
    with_tools = written_by(model)
    written = []
    for where, row in rows:
        try:
            chat = chat_of(row, with_tools)
        except BrokenTokenizer:
            raise
        except ValueError as error:
            raise ValueError(f"--data {data}, {where}: {error}") from None
        written.append(json.dumps({"messages": chat}, ensure_ascii=False))
    if not written:
        raise ValueError(f"--data {data}: empty; wanted chats, {WANTED} a line")
    text = "".join(f"{line}\n" for line in written).encode()
    gathered = (cache / "data" / f"{hashlib.sha256(text).hexdigest()[:12]}.jsonl").resolve()
    if not gathered.exists():
        try:
            with unfinished_beside(gathered) as unfinished:  # another run may be reading
                unfinished.write_bytes(text)
        except OSError as error:
            raise ValueError(f"--cache {cache}: cannot be written ({error.strerror})") from None
    return gathered


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"chat {number}", row) for number, row in enumerate(rows, start=1))


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    """Return the rows of a file with their places: "line 3" in JSON lines, else "chat 3"."""
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ValueError(
            f"--data {path}: no file to read; give chats as JSON lines, or a data set of the hub"
        )
    if path.suffix == ".parquet":
        return _numbered(_parquet(path))
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, byte = before.count(b"\n") + 1, error.start - before.rfind(b"\n") - 1
        said = f"line {line}: not UTF-8 text (byte {byte})"
        raise ValueError(f"--data {path}, {said}; wanted {WANTED}") from None
    return _json_rows(text, path)


def _json_rows(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        value, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
    except json.JSONDecodeError as error:
        first_line = text.lstrip().partition("\n")[0].strip()
        if first_line == "{" or first_line.startswith("["):  # not JSON lines
            said = f"line {error.lineno}: not JSON ({error.msg})"
            raise ValueError(f"--data {path}, {said}; wanted {WANTED}") from None
        return _lines(text, path)
    except (ValueError, RecursionError):  # _lines says where
        return _lines(text, path)
    if text[end:].strip():  # more than one value
        return _lines(text, path)
    if isinstance(value, dict):
        lists = [rows for rows in value.values() if isinstance(rows, list)]
        if isinstance(value.get(SPLIT), list):
            value = value[SPLIT]
        elif len(lists) == 1 and not value.keys() & IN_A_CHAT:
            (value,) = lists
    return _numbered(value if isinstance(value, list) else [value])


def _lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"--data {path}, line {number}"
        try:
            if line.strip():
                yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg}); wanted {WANTED}") from None
        except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
            raise ValueError(f"{where}: {error}; wanted {WANTED}") from None


def _parquet(path: Path) -> Iterable[dict[str, Any]]:
    datasets = _quiet_datasets()
    try:
        # streamed: the library's own cache goes by a file's time alone
        return list(datasets.Dataset.from_parquet(str(path), streaming=True))
    except Exception as error:  # pyarrow raises many kinds
        raise ValueError(
            f"--data {path}: not parquet ({_one_line(error.__cause__ or error)}); give parquet, "
            "or chats as JSON lines"
        ) from None


def _download(name: str, split: str | None, cache: Path) -> Iterable[dict[str, Any]]:
    datasets = _quiet_datasets()
    try:
        return datasets.load_dataset(name, split=split or SPLIT, cache_dir=str(cache))
    except Exception as error:  # offline, unknown, gated, no such split: its words say which
        raise ValueError(
            f"--data {name}: not a file, and not to be had from the hub ({_one_line(error)}); "
            "give chats as JSON lines, or ORGANISATION/NAME:SPLIT"
        ) from None


def _quiet_datasets() -> Any:
    """Import the library, which takes a second, without its progress bars and warnings."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()
    return datasets


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
