"""The patterns: no two addresses that a wiring fault can confuse hold the same word."""

from __future__ import annotations

import itertools

from service_vm.program.memory import _STRIDE, CHUNK, Chunk, Keyed, Tally, Zeros, chunks
from service_vm.program.ports import PAGE


def test_chunks_cover_all_but_page_0() -> None:
    for size in (PAGE, 2 * PAGE, CHUNK, CHUNK + PAGE, 5 * CHUNK // 2):
        covered = PAGE
        for chunk in chunks(size):
            assert chunk.offset == covered
            assert chunk.length <= CHUNK
            assert chunk.index == chunk.offset // CHUNK
            covered += chunk.length
        assert covered == max(size, PAGE)


def test_the_key_decides_the_pattern_and_the_inverse_is_one() -> None:
    chunk = Chunk(0, PAGE, CHUNK - PAGE)
    plain = Keyed(b"a", CHUNK).of(chunk)
    assert plain == Keyed(b"a", CHUNK).of(chunk)
    assert plain != Keyed(b"b", CHUNK).of(chunk)
    inverse = Keyed(b"a", CHUNK, inverted=True).of(chunk)
    assert all(a ^ b == 0xFF for a, b in zip(plain[:5000], inverse[:5000], strict=True))


def test_a_part_of_a_chunk_is_the_same_part_of_its_content() -> None:
    pattern = Keyed(b"k", 4 * CHUNK)
    whole = pattern.of(Chunk(2, 2 * CHUNK, CHUNK))
    assert len(whole) == CHUNK
    assert pattern.of(Chunk(2, 2 * CHUNK + PAGE, 100)) == whole[PAGE : PAGE + 100]


def test_addresses_one_or_two_lines_apart_never_share_a_place_in_the_table() -> None:
    """Up to 64 GiB: the claim that the class makes, as arithmetic on its indices."""
    word_lines = [1 << line for line in range((CHUNK // 8).bit_length() - 1)]
    chunk_lines = [_STRIDE // 8 << line for line in range(16)]
    steps = word_lines + chunk_lines
    assert len(set(steps)) == len(steps)
    for one, other in itertools.combinations(steps, 2):
        assert one != other  # exchanged lines
        # Shorted lines move an address by one step alone, which is never zero.
        assert one != 0


def test_words_of_the_table_differ() -> None:
    data = Keyed(b"k", CHUNK).of(Chunk(0, 0, CHUNK))
    assert len(set(memoryview(data).cast("Q"))) == CHUNK // 8


def test_tally_counts_words_and_keeps_the_first() -> None:
    wanted = bytes(3 * PAGE)
    found = bytearray(wanted)
    found[5000] = 0x01
    found[5001] = 0xFF  # same word
    found[9000] = 0x80
    tally = Tally()
    assert tally.compare(100, wanted, bytes(found)) == 2
    assert (tally.words, tally.first, tally.xor) == (2, 5100, 0x01)
    assert tally.compare(100, wanted, wanted) == 0
    assert tally.compare(50, wanted, bytes(found)) == 2
    assert (tally.words, tally.first) == (4, 5100)


def test_zeros() -> None:
    assert Zeros().of(Chunk(0, PAGE, 10)) == bytes(10)
    assert Zeros().of(Chunk(1, CHUNK, CHUNK)) == bytes(CHUNK)
