"""Blocks are free, held or idle, and idle ones are used again in the order in which they were let go."""

from __future__ import annotations

import pytest

from executors.generation.block_pool import BlockPool


def test_a_block_is_shared_until_its_last_reference_is_given_up() -> None:
    pool = BlockPool(4)
    taken = pool.take(2)
    for block, name in zip(taken, (10, 11), strict=True):
        pool.name(block, name)
    pool.hold(taken)
    pool.release(taken)
    assert pool.available == 2
    assert pool.held_once(taken) == 2
    pool.release(taken)
    assert pool.available == 4
    assert pool.find([10, 11, 12]) == taken
    pool.check()


def test_the_end_of_a_chain_is_used_again_before_its_begin() -> None:
    pool = BlockPool(3)
    chain = pool.take(3)
    for block, name in zip(chain, (1, 2, 3), strict=True):
        pool.name(block, name)
    pool.release(chain)
    pool.take(1)
    assert pool.find([1, 2, 3]) == chain[:2]
    pool.check()


def test_one_that_is_used_again_is_not_the_next_to_go() -> None:
    pool = BlockPool(2)
    first, second = pool.take(1), pool.take(1)
    pool.name(first[0], 1)
    pool.name(second[0], 2)
    pool.release(first)
    pool.release(second)
    pool.hold(first)
    pool.release(first)
    assert pool.take(1) == second
    assert pool.find([2]) == []
    assert pool.find([1]) == first


def test_the_second_block_with_a_name_is_not_found() -> None:
    pool = BlockPool(2)
    one, other = pool.take(2)
    pool.name(one, 1)
    pool.name(other, 1)
    pool.release([other])
    assert pool.find([1]) == [one]
    pool.check()


def test_more_than_there_are_cannot_be_taken() -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(ValueError, match="2 blocks of 1"):
        pool.take(2)
