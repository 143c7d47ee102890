from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import Grant, Release, Reserve, Reserved, Want
from actors.policy.block_pool import BlockPool
from actors.policy.kv_group import BLOCK_SIZE, Group


def reserve(pool: BlockPool, *wants: tuple[str, int, int], releases: tuple[str, ...] = (),
            budget: int = 1000) -> Reserved:
    reserved = pool.reserve(Reserve(0, tuple(map(Release, releases)), budget, tuple(Want(*want) for want in wants)))
    pool.check_integrity()
    return reserved


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)])
def test_a_new_sequence_gets_the_blocks_its_tokens_need(num_tokens: int, num_blocks: int) -> None:
    pool = BlockPool((Group(8), Group(8)))
    reserved = reserve(pool, ("a", 0, num_tokens))
    blocks = tuple(range(num_blocks))
    assert reserved == Reserved(0, (Grant("a", 0, num_tokens, (blocks, blocks), cache_miss="off"),), ())
    assert pool.num_free == (8 - num_blocks, 8 - num_blocks)


def test_grants_stop_where_the_budget_ends_and_nobody_starves() -> None:
    pool = BlockPool((Group(8),))
    reserved = reserve(pool, ("a", 0, 20), ("b", 0, 20), ("c", 0, 20), budget=30)
    assert [(grant.request_id, grant.num_new_tokens) for grant in reserved.grants] == [("a", 20), ("b", 10)]
    assert reserved.starved == ()


def test_a_holder_gets_what_the_free_blocks_carry() -> None:
    pool = BlockPool((Group(3), Group(4)))
    reserve(pool, ("a", 0, 20))
    reserved = reserve(pool, ("a", 20, 100))
    assert reserved.grants == (Grant("a", 0, 28, ((2,), (2,))),)
    assert reserve(pool, ("a", 48, 100)).starved == ("a",)


def test_slack_in_the_last_block_needs_no_free_one() -> None:
    pool = BlockPool((Group(1),))
    reserve(pool, ("a", 0, 5))
    assert reserve(pool, ("a", 5, 20)).grants == (Grant("a", 0, 11, ((),)),)


def test_a_newcomer_waits_until_all_its_tokens_fit() -> None:
    pool = BlockPool((Group(4),))
    reserve(pool, ("a", 0, 16))
    assert reserve(pool, ("b", 0, 49)).starved == ("b",)
    assert reserve(pool, ("b", 0, 48), budget=10).grants == (Grant("b", 0, 10, ((1,),), cache_miss="off"),)


@pytest.mark.parametrize(("num_tokens", "num_slots", "num_yielding"), [
    (32, 1, 0),                             # it enters
    (33, 1, 1), (64, 1, 1), (65, 1, 2), (96, 1, 2), (97, 1, 0),
    (16, 0, 1), (64, 0, 1), (65, 0, 2), (97, 0, 0)])
def test_how_many_must_yield_to_a_newcomer(num_tokens: int, num_slots: int, num_yielding: int) -> None:
    """Ten blocks, of which the stayer holds four, and the two that would yield two each."""
    pool = BlockPool((Group(10), Group(11)))
    reserve(pool, ("stayer", 0, 64), ("a", 0, 32), ("b", 0, 20))
    reserved = pool.reserve(Reserve(1, (), 1000, (Want("new", 0, num_tokens),), num_slots=num_slots,
                                    yielding=("b", "a")))
    assert reserved.num_yielding == num_yielding
    assert bool(reserved.grants) == (num_tokens == 32)


def test_nobody_is_counted_who_is_not_asked_for() -> None:
    pool = BlockPool((Group(2),))
    reserve(pool, ("a", 0, 32))
    assert pool.reserve(Reserve(1, (), 1000, (Want("new", 0, 5),))).num_yielding == 0
    assert pool.reserve(Reserve(1, (), 1000, (Want("a", 32, 33),), yielding=("a",))).num_yielding == 0


def test_no_newcomer_overtakes_one_that_starves() -> None:
    pool = BlockPool((Group(4),))
    reserved = reserve(pool, ("big", 0, 65), ("small", 0, 1))
    assert (reserved.grants, reserved.starved) == ((), ("big",))


def test_released_blocks_are_granted_in_the_same_exchange_and_the_longest_free_first() -> None:
    pool = BlockPool((Group(4),))
    reserve(pool, ("a", 0, 32), ("b", 0, 16))
    reserved = reserve(pool, ("c", 0, 64), releases=("a", "b"))
    assert reserved.grants[0].new_block_ids == ((3, 1, 0, 2),)      # a sequence's end goes before its beginning


def test_a_release_of_someone_unknown_is_a_fault() -> None:
    with pytest.raises(KeyError):
        BlockPool((Group(4),)).reserve(Reserve(0, (Release("nobody"),), 1, ()))


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(window=st.integers(1, 50), start=st.integers(1, 120))
def test_a_window_keeps_exactly_what_a_later_row_can_see(window: int, start: int) -> None:
    pool = BlockPool((Group(20, window), Group(20)))
    reserve(pool, ("a", 0, start))
    reserve(pool, ("a", start, start + 1))
    windowed, full = pool.owners()
    visible = {position // BLOCK_SIZE for position in range(max(0, start - window + 1), start + 1)}
    assert len(windowed) == len(visible)
    assert len(full) == start // BLOCK_SIZE + 1


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 31, 32, 33, 34, 48, 49])
def test_with_num_blocks_for_a_windowed_sequence_reaches_any_length(window: int) -> None:
    group = Group(1000, window)
    pool = BlockPool((Group(group.num_blocks_for(1000), window),))
    position = 0
    while position < 1000:
        reserved = reserve(pool, ("a", position, 1000), budget=7)
        assert reserved.grants, f"starved at {position}"
        position += reserved.grants[0].num_new_tokens


def test_blocks_that_left_the_window_serve_the_next_in_line() -> None:
    pool = BlockPool((Group(4, window=16),))
    reserve(pool, ("a", 0, 48), ("b", 0, 16))
    reserved = reserve(pool, ("b", 16, 17), ("a", 48, 49))
    assert reserved.starved == ()
    assert [grant.new_block_ids for grant in reserved.grants] == [((1,),), ((0,),)]


def test_usage_is_that_of_the_fullest_group() -> None:
    pool = BlockPool((Group(8), Group(4)))
    assert pool.usage == 0.0
    reserve(pool, ("a", 0, 32))
    assert pool.usage == 0.5


def test_integrity_finds_lost_doubled_and_unowned_blocks() -> None:
    def fresh() -> BlockPool:
        pool = BlockPool((Group(4),))
        reserve(pool, ("a", 0, 32))
        return pool

    pool = fresh()
    pool.blocks[0].plain.pop()
    with pytest.raises(AssertionError, match="1 blocks free \\+ 2 held, not 4"):
        pool.check_integrity()
    pool = fresh()
    pool.blocks[0].plain.append(pool.blocks[0].plain[0])
    with pytest.raises(AssertionError, match="free list twice"):
        pool.check_integrity()
    pool = fresh()
    pool.blocks[0].plain.append(0)
    with pytest.raises(AssertionError, match="free and held"):
        pool.check_integrity()
    pool = fresh()
    pool._tables["a"].block_ids[0][1] = 0
    with pytest.raises(AssertionError, match="3|held"):
        pool.check_integrity()
    pool = fresh()
    pool.blocks[0].references[3] = 1
    with pytest.raises(AssertionError, match="without an owner"):
        pool.check_integrity()
    pool = fresh()
    pool.blocks[0].references[:2] = [2, 0]
    with pytest.raises(AssertionError, match="block 0 has 1 owners, 2 references"):
        pool.check_integrity()


@pytest.mark.parametrize(("num_blocks", "window"), [(0, None), (-1, None), (4, 0)])
def test_groups_are_checked(num_blocks: int, window: int | None) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Group(num_blocks, window)


def test_a_pool_has_a_group() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        BlockPool(())
