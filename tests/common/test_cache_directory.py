"""Entries of the cache directory are made once and are never seen half made."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.cache_directory import cache_directory, once
from common.model_config import ModelError

MAKER = """
import sys
from pathlib import Path
from common.cache_directory import once

def make(directory):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    (directory / "content").write_text("x" * 1_000_000)

print(len((once(Path(sys.argv[1]), make) / "content").read_text()))
"""


def test_processes_that_start_at_once_make_an_entry_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKER, str(tmp_path / "cache/entry"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["1000000\n"] * 3
    assert (tmp_path / "log").read_text() == "made\n"


def test_nobody_sees_an_entry_that_is_being_made(tmp_path: Path) -> None:
    entry, begun, go_on = tmp_path / "entry", threading.Event(), threading.Event()

    def make(directory: Path) -> None:
        (directory / "half").touch()
        begun.set()
        assert go_on.wait(30)

    maker = threading.Thread(target=once, args=(entry, make))
    maker.start()
    assert begun.wait(30)
    assert not entry.exists()
    go_on.set()
    maker.join(30)
    assert (entry / "half").exists()


def test_a_failure_leaves_nothing_and_the_next_one_may_try(tmp_path: Path) -> None:
    entry = tmp_path / "entry"

    def fail(directory: Path) -> None:
        (directory / "rest").touch()
        raise ModelError("broken off")

    with pytest.raises(ModelError, match="broken off"):
        once(entry, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]
    once(entry, lambda directory: (directory / "whole").touch())
    assert (entry / "whole").exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".entry-abc123").mkdir()
    (tmp_path / ".entry-abc123/large").touch()
    once(tmp_path / "entry", lambda directory: (directory / "whole").touch())
    assert {path.name for path in tmp_path.iterdir()} == {"entry", "entry.lock"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="file/entry: cannot be prepared"):
        once(tmp_path / "file/entry", lambda directory: None)


def test_the_directory_is_the_users_choice_or_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", "/somewhere/else")
    assert cache_directory() == Path("/somewhere/else")
    monkeypatch.delenv("BATON_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/user")
    assert cache_directory() == Path("/var/cache/user/baton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path(os.path.expanduser("~/.cache/baton"))
