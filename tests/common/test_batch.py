import torch

from common.batch import build
from common.scheduler import Work
from tests.common.toy import make_sequence

CPU = torch.device("cpu")


def test_lays_out_prompts_chunks_and_single_tokens_side_by_side() -> None:
    whole = make_sequence("whole", [10, 11, 12])
    whole.block_ids = [7]
    chunk = make_sequence("chunk", list(range(20, 32)))
    chunk.block_ids = [2, 5, 3]
    single = make_sequence("single", list(range(40, 46)))
    single.block_ids = [1, 6]
    works = [Work(whole, 0, 3, True), Work(chunk, 2, 5, False), Work(single, 5, 1, True)]
    batch = build(works, 4, CPU)
    attention = batch.attention
    assert batch.token_ids.tolist() == [10, 11, 12, 22, 23, 24, 25, 26, 45]
    assert attention.output_rows is not None and attention.output_rows.tolist() == [2, 8]
    assert batch.sample_rows is None
    assert attention.query_starts.tolist() == [0, 3, 8, 9]
    assert attention.context_lens.tolist() == [3, 7, 6]
    assert attention.block_tables.tolist() == [[7, 0], [2, 5], [1, 6]]
    assert attention.positions.tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 5]
    assert attention.slots.tolist() == [28, 29, 30, 10, 11, 20, 21, 22, 25]
    assert (attention.max_query_len, attention.max_context_len) == (5, 7)


def test_tensors_have_the_types_that_kernels_expect() -> None:
    sequence = make_sequence("r", [1, 2])
    sequence.block_ids = [0]
    batch = build([Work(sequence, 0, 2, True)], 4, CPU)
    attention = batch.attention
    for tensor in (batch.token_ids, attention.output_rows, attention.slots, attention.positions):
        assert tensor is not None and tensor.dtype == torch.int64
    for tensor in (attention.query_starts, attention.context_lens, attention.block_tables):
        assert tensor.dtype == torch.int32


def test_a_step_that_samples_nothing_has_no_outputs() -> None:
    sequence = make_sequence("r", [1, 2, 3])
    sequence.block_ids = [0]
    rows = build([Work(sequence, 0, 2, False)], 4, CPU).attention.output_rows
    assert rows is not None and (rows.dtype, rows.tolist()) == (torch.int64, [])


def test_single_tokens_that_all_sample_are_all_outputs() -> None:
    sequences = [make_sequence(name, [1, 2, 3]) for name in "ab"]
    for sequence in sequences:
        sequence.block_ids = [0]
    batch = build([Work(sequence, 2, 1, True) for sequence in sequences], 4, CPU)
    assert batch.attention.output_rows is None and batch.sample_rows is None


def test_all_rows_of_a_prompt_whose_logprobs_are_wanted_are_outputs() -> None:
    plain, told = (
        make_sequence("plain", [1, 2, 3]),
        make_sequence("told", [4, 5, 6, 7], num_prompt_logprobs=0),
    )
    plain.block_ids, told.block_ids = [0], [1]
    batch = build([Work(plain, 0, 3, True), Work(told, 0, 3, False), Work(plain, 2, 1, True)], 4, CPU)
    assert batch.attention.output_rows is not None and batch.sample_rows is not None
    assert batch.attention.output_rows.tolist() == [2, 3, 4, 5, 6]
    assert batch.sample_rows.tolist() == [0, 4]
