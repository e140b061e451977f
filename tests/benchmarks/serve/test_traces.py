from pathlib import Path

import pytest

from benchmarks.serve.traces import Recorded, TraceError, read

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:04.2249600,110,27\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
)
MOONCAKE = (
    '{"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
    '{"timestamp": 30000, "input_length": 512, "output_length": 9, "hash_ids": [0]}\n'
)


def test_an_azure_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE, newline="")
    first, second = read(file)
    assert first == Recorded(0.0, 4808, 10)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (110, 27)
    assert second.at_s == pytest.approx(0.245, abs=1e-5)


def test_an_azure_trace_of_the_second_year_has_time_zones(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,1,1\n"
    )
    assert [recorded.at_s for recorded in read(file)] == [0.0, pytest.approx(0.99007)]


def test_a_mooncake_trace_says_which_blocks_prompts_share(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    assert read(file) == [Recorded(0.0, 600, 5, (0, 7), 512), Recorded(3.0, 512, 9, (0,), 512)]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("t.csv", "a,b\n1,2\n", "line 2: not a line of an Azure trace"),
        ("t.csv", AZURE + "2023-11-16 18:17:05,many,2\r\n", "line 4: not a line of an Azure trace"),
        ("t.jsonl", MOONCAKE + "[1]\n", "line 3: not a line of a Mooncake trace"),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 0, "output_length": 1}',
            "line 1: not a line of a Moon",
        ),
        ("t.jsonl", "", "no requests in it"),
    ],
)
def test_what_is_no_trace_is_refused_with_file_and_line(
    tmp_path: Path, name: str, content: str, complaint: str
) -> None:
    file = tmp_path / name
    file.write_text(content, newline="")
    with pytest.raises(TraceError) as refused:
        read(file)
    assert str(file) in str(refused.value)
    assert complaint in str(refused.value)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.csv"):
        read(tmp_path / "nowhere.csv")
