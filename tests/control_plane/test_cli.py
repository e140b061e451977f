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
