"""The folders that a run writes to: they can be written, and its own is its own alone."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"


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
