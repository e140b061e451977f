"""The directory that keeps what is fetched or worked out once: ``BATON_CACHE_DIR``, or ``baton`` in the
user's cache.

Several processes start at once on one machine: an entry is made under a lock, in a temporary place, and
renamed into place when it is whole, so that nobody ever reads half of one and nobody does the work twice.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from common.model_config import ModelError

LOCK_TIMEOUT_S = 1800.0  # the longest that another process may take to fetch or export a model


def cache_directory() -> Path:
    chosen = os.environ.get("BATON_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton"


def once(entry: Path, make: Callable[[Path], None]) -> Path:
    """``entry``, made by ``make(temporary directory)`` when it is not there; it is a directory with what
    ``make`` wrote. ``ModelError`` when the cache cannot be written or another process holds the lock for too
    long."""
    if entry.is_dir():
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock", timeout=LOCK_TIMEOUT_S):
            if not entry.is_dir():
                make_whole(entry, make)
    except Timeout:
        raise ModelError(
            f"{entry}: another process has been preparing it for {LOCK_TIMEOUT_S:.0f} s"
        ) from None
    except OSError as error:
        raise ModelError(f"{entry}: cannot be prepared: {error}") from error
    return entry


def make_whole(entry: Path, make: Callable[[Path], None]) -> None:
    """The caller holds the lock: what other attempts left is from processes that were killed."""
    for left in entry.parent.glob(f".{entry.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}-"))
    try:
        make(temporary)
        temporary.chmod(0o755)
        temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
