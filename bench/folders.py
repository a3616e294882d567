"""The folders a run writes to: locks, files that appear whole, and cleaning up after kills."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

LOCK = ".lock"
UNFINISHED = ".*.tmp"
UNTOUCHED_S = 24 * 3600


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and keep other runs out until the context ends or the process dies.

    The lock belongs to the open file, which no child inherits: whatever kills the process frees the
    folder. The context removes the lock file, and the folder if it made it and nothing is in it.

    Raises:
        ValueError: another run has the folder, or it cannot be written.
    """
    made = not folder.exists()
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            file = open(path, "a")  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                break
            file.close()  # its last owner removed the file meanwhile: this lock locks nothing
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"--out {folder}: another run is writing there; wait for it, or give another --out"
        ) from None
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be written ({error.strerror})") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def unfinished_beside(path: Path, is_folder: bool = False) -> Iterator[Path]:
    """Give a free name next to `path`, or an empty folder, and move it there when the context ends.

    If another process has put a folder at `path`, that one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
    if is_folder:
        unfinished.mkdir()
    try:
        yield unfinished
        try:
            os.replace(unfinished, path)
        except OSError:
            if not (is_folder and path.is_dir()):
                raise
    finally:
        _remove(unfinished)


def remove_unfinished(folder: Path, cache: Path) -> None:
    """Remove half-written files of killed runs from a run's folder and a cache: nobody has written
    to them for a day."""
    for path in (*folder.glob(UNFINISHED), *cache.glob(f"*/{UNFINISHED}")):
        with suppress(OSError):  # somebody else's, or gone
            if time.time() - path.stat().st_mtime > UNTOUCHED_S:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file or a whole folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_writable(flag: str, folder: Path) -> None:
    """Raise ValueError, naming the option, if its folder cannot be written."""
    probe = folder / f".writable.{os.getpid()}.tmp"
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        if made:
            folder.rmdir()
    except OSError as error:
        raise ValueError(f"{flag} {folder}: cannot be written ({error.strerror})") from None
