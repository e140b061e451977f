import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from common.hashing import HASH_BYTES, block_hashes, extend_hashes, root_hash

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
block_sizes = st.integers(1, 9)


def test_names_stay_the_same_from_release_to_release() -> None:
    (first, second) = block_hashes("model", "salt", range(8), 4)
    assert first.hex() == "2c62ebd2ac35b7460aa15f7c2bec36aa"
    assert second.hex() == "b977710d80b474633f6f57e2e817b8a9"


@given(token_lists, block_sizes)
def test_there_is_one_hash_per_full_block(token_ids: list[int], block_size: int) -> None:
    hashes = block_hashes("m", "", token_ids, block_size)
    assert len(hashes) == len(set(hashes)) == len(token_ids) // block_size
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes)


@given(token_lists, token_lists, block_sizes)
def test_hashes_are_equal_exactly_as_far_as_the_tokens_are(
    a: list[int], b: list[int], block_size: int
) -> None:
    pairs = zip(block_hashes("m", "", a, block_size), block_hashes("m", "", b, block_size), strict=False)
    for index, (ours, theirs) in enumerate(pairs, 1):
        assert (ours == theirs) == (a[: index * block_size] == b[: index * block_size])


@given(token_lists, token_lists, block_sizes)
def test_extending_gives_what_hashing_all_at_once_gives(a: list[int], b: list[int], block_size: int) -> None:
    hashes = block_hashes("m", "s", a, block_size)
    extend_hashes(hashes, root_hash("m", "s"), a + b, block_size)
    assert hashes == block_hashes("m", "s", a + b, block_size)


def test_models_and_salts_do_not_share_blocks() -> None:
    roots = [("m", ""), ("m", "s"), ("ms", ""), ("n", ""), ("", "ms")]
    assert len({root_hash(*root) for root in roots}) == len(roots)


def test_needs_no_torch() -> None:
    code = "import sys, common.hashing, common.pool, common.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
