"""The device's table of blocks against a dictionary, also where keys collide."""
from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policy.block_keys import block_keys, root_key
from cuda.kernels import prefix_lookup
from cuda.kernels.prefix_lookup import PrefixTable, Query
from cuda.ops import BLOCK_SIZE
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

ROOT = bytes(16)


@pytest.fixture(params=["forward", "reverse", "random", "races checked"])
def launcher(request: pytest.FixtureRequest) -> EmulatorLauncher:
    order = {"reverse": 1, "random": 2}.get(request.param, 0)
    sanitize = "race" if request.param == "races checked" else ""
    return EmulatorLauncher(order=order, sanitize=sanitize, specs=[prefix_lookup.SPEC])


def ids_of(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + BLOCK_SIZE))


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_a_prompt_is_found_up_to_the_first_block_that_is_not_there(launcher: EmulatorLauncher) -> None:
    root = root_key(model="m", adapter="", salt="", scope="all")
    token_ids = list(range(100, 100 + 5 * BLOCK_SIZE))
    keys = block_keys(root, token_ids)
    table = PrefixTable(launcher, 8)
    blocks = [token_ids[i:i + BLOCK_SIZE] for i in range(0, len(token_ids), BLOCK_SIZE)]
    table.insert(keys, (root, *keys[:-1]), (7, 2, 5, 0, 1), blocks)
    whole, other = Query(root, keys, token_ids), block_keys(root, token_ids[1:])
    assert table.look_up([whole, Query(root, other, token_ids[1:]), Query(root, keys[:3], token_ids),
                          Query(root, (), [])])() == [(7, 2, 5, 0, 1), (), (7, 2, 5), ()]
    table.remove([5])
    assert table.look_up([whole])() == [(7, 2)]
    table.insert(keys[2:3], keys[1:2], (6,), blocks[2:3])
    assert table.look_up([whole])() == [(7, 2, 6, 0, 1)]
    assert table.look_up([])() == []


def test_blocks_with_equal_keys_are_found_by_their_own_tokens(launcher: EmulatorLauncher) -> None:
    key, table = key_of(1), PrefixTable(launcher, 4)
    table.insert([key, key], [ROOT, ROOT], [3, 1], [ids_of(0), ids_of(50)])

    def found(first_id: int, root: bytes = ROOT) -> tuple[int, ...]:
        return table.look_up([Query(root, (key,), ids_of(first_id))])()[0]

    assert found(0) == (3,)
    assert found(50) == (1,)
    assert found(1) == ()                                   # the key alone is not enough
    assert found(0, root=key_of(2)) == ()                   # nor are the tokens without what is before them
    table.remove([3])
    assert found(0) == ()
    assert found(50) == (1,)


def test_one_other_token_anywhere_in_a_block_is_a_miss(launcher: EmulatorLauncher) -> None:
    table = PrefixTable(launcher, 1)
    table.insert([key_of(1)], [ROOT], [0], [ids_of(0)])
    for place in range(BLOCK_SIZE):
        ids = list(ids_of(0))
        ids[place] += 1 << 17
        assert table.look_up([Query(ROOT, (key_of(1),), ids)])() == [()]


def test_an_answer_is_of_the_time_of_its_question(launcher: EmulatorLauncher) -> None:
    table = PrefixTable(launcher, 2)
    query = Query(ROOT, (key_of(1),), ids_of(0))
    before = table.look_up([query])
    table.insert([key_of(1)], [ROOT], [1], [ids_of(0)])
    after = table.look_up([query])
    table.remove([1])
    assert (before(), after(), table.look_up([query])()) == ([()], [(1,)], [()])


def test_the_table_is_built_anew_before_removed_entries_fill_it() -> None:
    launcher = EmulatorLauncher(specs=[prefix_lookup.SPEC])
    table = PrefixTable(launcher, 8)
    for number in range(200):
        table.insert([key_of(number)], [ROOT], [number % 8], [ids_of(number)])
        present = range(max(0, number - 7), number + 1)
        queries = [Query(ROOT, (key_of(i),), ids_of(i)) for i in range(number + 1)]
        assert table.look_up(queries)() == [(i % 8,) if i in present else () for i in range(number + 1)]
        entries = launcher.download(table._table)
        assert (entries == -1).sum() >= table.capacity // 2
        assert sorted(entries[entries >= 0]) == sorted(i % 8 for i in present)
    assert table.num_rebuilds > 10


@pytest.mark.parametrize("fails", ["upload", "clear_table", "insert_all", "apply_changes"])
def test_what_could_not_be_sent_is_sent_the_next_time(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stops, also in the middle of building the table anew."""
    launcher = EmulatorLauncher(specs=[prefix_lookup.SPEC])
    table, block_of = PrefixTable(launcher, 4), dict[int, int]()

    def fail(*_: object) -> None:
        raise MemoryError

    for number in range(40):
        removed = (number + 1) % 4 if number % 3 else number % 4
        table.remove([removed])
        table.insert([key_of(number)], [ROOT], [number % 4], [ids_of(number)])
        block_of = {i: block_id for i, block_id in block_of.items() if block_id not in (removed, number % 4)}
        block_of[number] = number % 4
        with monkeypatch.context() as patch, suppress(MemoryError):
            patch.setattr(launcher if fails == "upload" else prefix_lookup, fails, fail)
            table.flush()
        found = table.look_up([Query(ROOT, (key_of(i),), ids_of(i)) for i in range(number + 1)])()
        assert found == [(block_of[i],) if i in block_of else () for i in range(number + 1)]
    assert table.num_rebuilds > 2


def test_wrong_arrays_are_refused() -> None:
    launcher = EmulatorLauncher(specs=[prefix_lookup.SPEC])
    table, places = launcher.zeros(16, "int32"), launcher.zeros(8, "int32")
    with pytest.raises(ValueError, match="too small for 8 blocks"):
        prefix_lookup.insert_all(launcher, table, places, launcher.zeros((8, 24), "int32"), 0)
    with pytest.raises(ValueError, match="power of two"):
        prefix_lookup.clear_table(launcher, launcher.zeros(12, "int32"))


# A pool that does anything, in small spaces of keys and tokens so that they meet: an operation is a step's changes.
NUM_BLOCKS = 6
number = st.integers(0, 3)
block = st.tuples(number, number, st.integers(0, 1))        # numbers of key, key before, tokens
steps = st.lists(st.dictionaries(st.integers(0, NUM_BLOCKS - 1), st.none() | block, max_size=NUM_BLOCKS), max_size=12)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 3))
def test_equals_a_dictionary(changes: list[dict[int, tuple[int, int, int] | None]], order: int) -> None:
    launcher = EmulatorLauncher(order=order, specs=[prefix_lookup.SPEC])
    table, known = PrefixTable(launcher, NUM_BLOCKS), dict[int, tuple[int, int, int]]()
    numbers = range(4)
    queries = [((key,), before, (ids,)) for key in numbers for before in numbers for ids in (0, 1)]
    chains = [((a, b), before, (0, ids)) for a in numbers for b in numbers for before in (0, 3) for ids in (0, 1)]
    for step in changes:
        for block_id, content in step.items():
            if content is None:
                table.remove([block_id])
                known.pop(block_id, None)
            else:
                key, before, ids = content
                table.insert([key_of(key)], [key_of(before)], [block_id], [ids_of(ids)])
                known[block_id] = content
        expected = []
        for keys, root, tokens in (*queries, *chains):
            hits: list[int] = []
            for key, before, ids in zip(keys, (root, *keys), tokens, strict=False):
                equal = [block_id for block_id, content in known.items() if content == (key, before, ids)]
                if not equal:
                    break
                hits.append(min(equal))
            expected.append(tuple(hits))
        answers = table.look_up([Query(key_of(root), tuple(map(key_of, keys)), [i for n in tokens for i in ids_of(n)])
                                 for keys, root, tokens in (*queries, *chains)])()
        assert answers == expected
