"""The folders that a run writes to: they can be written, its own is its own alone, and what a
killed run left half-written is removed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from pathlib import Path

LOCK = ".lock"
UNFINISHED = ".*.tmp"
LEFT_ON_A_FULL_DISK = 2**16  # bytes, less than a write that fails
LOG = ".lora-bench-"  # of what a process prints


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other runs out of it until the context ends or the process dies.

    The lock is the open file's, and no child inherits that, so whatever kills the process frees the
    folder. The file is gone after the context, and so is a folder that was made for it in vain.

    Raises:
        ValueError: another run has it, or nothing can be written there.
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
            file.close()  # whoever had it has removed it since: that lock keeps nobody out
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
    """Give an empty file or folder beside `path`, and move it there, whole, when the context ends.

    It is locked as long as it is written, which tells it from what a killed process left. A folder
    that another process has put there meanwhile stays.

    Raises:
        OSError: it cannot be written; one of a full disk names `path`, whoever wrote.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        number += 1
        unfinished = path.with_name(f".{path.name}.{os.getpid()}-{number}.tmp")
        with suppress(FileExistsError):
            unfinished.mkdir() if is_folder else unfinished.touch(exist_ok=False)
            try:
                lock = _lock_of(unfinished)
            except OSError:  # a file system without locks, where nothing is removed
                lock = os.open(unfinished, os.O_RDONLY)
            if lock is not None:
                break  # else a run that starts has removed it, just before it was locked
    try:
        yield unfinished
        try:
            os.replace(unfinished, path)
        except OSError:
            if not (is_folder and path.is_dir()):
                raise
    except Exception as error:
        if _is_full(error, path.parent):
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(path)) from None
        raise
    finally:
        _remove(unfinished)
        os.close(lock)


def locked_log() -> "tempfile._TemporaryFileWrapper[bytes]":
    """Open a file for what a process prints, which is gone when it is closed, and locked till then:
    one that nobody has locked is a killed run's."""
    while True:
        log = tempfile.NamedTemporaryFile(prefix=LOG, suffix=".log")  # noqa: SIM115
        fcntl.flock(log, fcntl.LOCK_EX)
        if os.fstat(log.fileno()).st_nlink:
            return log
        with suppress(FileNotFoundError):  # a run that starts has removed it
            log.close()


def _is_full(error: Exception, folder: Path) -> bool:
    """Return True if a disk is full: libraries that write raise errors of their own."""
    says_so = getattr(error, "errno", None) == ENOSPC or os.strerror(ENOSPC) in str(error)
    return says_so or shutil.disk_usage(folder).free < LEFT_ON_A_FULL_DISK


def remove_unfinished(folder: Path, cache: Path) -> None:
    """Remove what killed runs left half-written in a run's folder and a cache, and their logs."""
    left = [*folder.glob(UNFINISHED), *cache.glob(f"*/{UNFINISHED}")]
    for path in (*left, *Path(tempfile.gettempdir()).glob(f"{LOG}*")):
        with suppress(OSError):  # somebody else's
            if (lock := _lock_of(path)) is not None:
                _remove(path)
                os.close(lock)


def _lock_of(path: Path) -> int | None:
    """Lock a file or folder; returns what to close, None if somebody has it or it is gone."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _remove(path: Path) -> None:
    """Remove a file or a folder with all in it, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_writable(flag: str, folder: Path) -> None:
    """Raises ValueError in the words of the option that names the folder."""
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
