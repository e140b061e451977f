"""The kernels' hash against the library's, however its input is cut."""

import os
import random

import pytest
from xxhash import xxh3_64_digest

from kernels import native
from kernels.native.hashing import LEAST_BYTES, Hash

pytestmark = pytest.mark.skipif(native.available() is not None, reason="no compiled kernels here")
CUTS = (1, 7, 63, 64, 65, 128, 1000, 1024, 5000)


@pytest.fixture(params=["portable", "avx2", "avx512", "avx512_bf16", "amx"])
def instruction_set(request: pytest.FixtureRequest) -> object:
    try:
        native.instruction_set(request.param)
    except native.BuildError as error:
        pytest.skip(str(error))
    yield
    native.instruction_set("")


def lengths(chooser: random.Random) -> list[int]:
    whole = [stripes * 64 for stripes in range(4, 70)]
    return [
        *range(LEAST_BYTES, LEAST_BYTES + 70),
        *whole,
        *(chooser.randrange(LEAST_BYTES, 9000) for _ in range(60)),
    ]


@pytest.mark.usefixtures("instruction_set")
def test_the_hash_is_the_librarys_and_copies_are_whole() -> None:
    chooser = random.Random(3)
    for length in lengths(chooser):
        source, target = memoryview(os.urandom(length)), memoryview(bytearray(length))
        digest, start = Hash(), 0
        while start < length:
            piece = slice(start, start + chooser.choice(CUTS))
            if chooser.random() < 0.5:
                digest.copy(source[piece], target[piece])
            else:
                digest.update(source[piece])
                target[piece] = source[piece]
            start = piece.stop
        assert digest.digest() == xxh3_64_digest(source), length
        assert target == source


@pytest.mark.usefixtures("instruction_set")
def test_a_copy_writes_nothing_beside_its_place() -> None:
    source, target = memoryview(os.urandom(1000)), memoryview(bytearray(b"\xaa" * 1200))
    Hash().copy(source, target[100:1100])
    assert bytes(target) == b"\xaa" * 100 + bytes(source) + b"\xaa" * 100


def test_nothing_changes_nothing() -> None:
    digest = Hash()
    digest.update(memoryview(bytes(300)))
    digest.update(memoryview(b""))
    digest.copy(memoryview(b""), memoryview(bytearray()))
    assert digest.digest() == xxh3_64_digest(bytes(300))


def test_a_copy_needs_a_place_of_its_size_that_may_be_written() -> None:
    with pytest.raises(ValueError, match="10 bytes cannot be copied to 11"):
        Hash().copy(memoryview(bytes(10)), memoryview(bytearray(11)))
    with pytest.raises(ValueError, match="cannot be copied"):
        Hash().copy(memoryview(bytes(10)), memoryview(bytes(10)))
