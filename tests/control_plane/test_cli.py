from pathlib import Path

import pytest

from control_plane import cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("baton ")


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("serve", "complete", "bench transfer"))


@pytest.mark.parametrize("argv", [[], ["frobnicate"], ["bench"], ["bench", "everything"]])
def test_what_it_does_not_know_ends_with_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err != ""


def test_ctrl_c_before_a_command_has_begun_its_work_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_file_of_keys_that_is_missing_is_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = tmp_path / "keys"
    assert cli.run(["serve", "--port", "0", "--api-key-file", str(missing)]) == 2
    assert f"--api-key-file: [Errno 2] No such file or directory: '{missing}'" in capsys.readouterr().err
