"""What is found in the KV cache, by whom, and what is never found."""
from __future__ import annotations

import pytest

from actors.messages import NewSequence
from actors.policy.kv_group import Group
from tests.actors.scripted import SyncEngine, check_answer, request, solo

OTHER_ROOT = b"another tenant's"


def computed(engine: SyncEngine, *sequences: NewSequence) -> int:
    """Adds, runs to the end, checks the answers. Returns the prompt tokens that were computed for it."""
    before = engine.policy.stats.prompt_tokens
    engine.add(*sequences)
    engine.drain()
    for sequence in sequences:
        check_answer(sequence, engine.answers[sequence.request_id])
        assert engine.answers[sequence.request_id].finish == "length"
    return engine.policy.stats.prompt_tokens - before


def cached(engine: SyncEngine, request_id: str) -> tuple[int, str]:
    usage = engine.answers[request_id].usage
    assert usage is not None
    return usage.num_cached_tokens, usage.cache_miss


def like(sequence: NewSequence, request_id: str, num_shared: int | None = None, num_prompt: int | None = None,
         root: bytes = b"", max_tokens: int = 4) -> NewSequence:
    """A prompt that begins as that of `sequence`."""
    prompt = sequence.token_ids[:num_shared]
    return request(request_id, len(prompt) if num_prompt is None else num_prompt, max_tokens, prompt=prompt,
                   root=root or sequence.root)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 31, 32, 33, 48, 100])
def test_the_same_prompt_again_computes_its_last_token_alone(num_prompt: int, overlap: int) -> None:
    """FAULTS K07."""
    engine = SyncEngine(overlap=overlap, poison=True)
    a = request("a", num_prompt)
    assert computed(engine, a) == num_prompt
    for name in ("b", "c"):
        assert computed(engine, like(a, name)) == 1
        assert cached(engine, name) == (num_prompt - 1, "")


@pytest.mark.parametrize("num_shared", [1, 5, 15, 16, 17, 24, 32, 40])
def test_what_two_prompts_share_is_computed_once(num_shared: int) -> None:
    engine = SyncEngine(poison=True)
    a = request("a", 45)
    b = like(a, "b", num_shared, 60)
    assert a.token_ids[:num_shared + 1] != b.token_ids[:num_shared + 1], "they part behind it"
    computed(engine, a)
    assert computed(engine, b) == 60 - num_shared
    assert cached(engine, "b")[0] == num_shared
    assert engine.device.num_copies == (num_shared % 16 > 0)


def test_the_next_turn_finds_the_answer() -> None:
    engine = SyncEngine(poison=True)
    a = request("a", 20, max_tokens=30)
    computed(engine, a)
    next_turn = request("b", 60, prompt=a.token_ids + solo(a)[0])
    assert computed(engine, next_turn) == 60 - 49       # all but the answer's last token, which nobody has fed


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    engine = SyncEngine((Group(512),), max_num_seqs=32, max_num_batched_tokens=512, poison=True)
    first = request("r0", 544, max_tokens=8)
    burst = [first] + [like(first, f"r{i}", 512, 544, max_tokens=8) for i in range(1, 32)]
    # Some of the prompts begin behind the prefix with the same tokens by chance: these are copied.
    assert 512 + 31 * 32 < computed(engine, *burst) <= 512 + 32 * 32


@pytest.mark.parametrize("budget", [8, 64, 200])
@pytest.mark.parametrize("num_prompt", [15, 16, 17, 32, 40])
def test_choices_of_one_prompt_share_its_blocks(num_prompt: int, budget: int) -> None:
    """Those that come in one step compute the last block each; later ones copy it. All write to their own."""
    engine = SyncEngine((Group(64),), max_num_batched_tokens=budget, poison=True)
    first = request("c0", num_prompt, max_tokens=20)
    choices = [first] + [like(first, f"c{i}", max_tokens=20) for i in range(1, 4)]
    engine.add(*choices)
    num_shared = (num_prompt - 1) // 16
    at_most = num_shared + 4 * 3                        # answers of 20 tokens end in the second or third own block
    while not engine.policy.is_idle:
        engine.step()
        assert 64 - engine.pool.num_free[0] <= at_most
    for choice in choices:
        check_answer(choice, engine.answers[choice.request_id])
    assert num_prompt + 3 <= engine.policy.stats.prompt_tokens <= num_prompt + 3 * (num_prompt - 16 * num_shared)


def test_nothing_is_found_under_another_root_or_without_one() -> None:
    """FAULTS K09."""
    engine = SyncEngine()
    a = request("a", 40)
    computed(engine, a)
    assert computed(engine, like(a, "b", root=OTHER_ROOT)) == 40
    assert cached(engine, "b") == (0, "root")
    assert computed(engine, request("c", 40, prompt=a.token_ids, root=b"")) == 40
    assert cached(engine, "c") == (0, "off")
    assert computed(engine, request("d", 40, prompt=a.token_ids, root=b"")) == 40
    assert computed(engine, like(a, "e")) == 1


def test_why_no_more_was_found() -> None:
    engine = SyncEngine((Group(8),))
    a = request("a", 60)
    computed(engine, a)
    assert cached(engine, "a") == (0, "diverged:0")
    computed(engine, like(a, "b", 40, 50))
    assert cached(engine, "b") == (40, "diverged:2")
    computed(engine, like(a, "c", 40, 44))
    assert cached(engine, "c") == (40, ""), "its full blocks are all there"
    computed(engine, request("d", 10))
    assert cached(engine, "d") == (0, "short")
    computed(engine, request("flood", 120))
    computed(engine, like(a, "e"))
    assert cached(engine, "e") == (0, "evicted")


def test_prompt_logprobs_are_computed_but_others_find_the_blocks() -> None:
    engine = SyncEngine()
    for name in ("a", "b"):
        assert computed(engine, request(name, 40, seed=1, prompt_logprobs=1)) == 40
        assert cached(engine, name) == (0, "off")
    assert computed(engine, request("c", 40, seed=1)) == 1


def test_what_is_free_and_empty_is_used_first_then_ends_before_beginnings() -> None:
    engine = SyncEngine((Group(8),))
    a = request("a", 48, max_tokens=1)
    computed(engine, a)                                 # 3 of 8 blocks are cached
    computed(engine, request("b", 80, max_tokens=1))
    assert computed(engine, like(a, "a2", max_tokens=1)) == 1
    computed(engine, request("c", 96, max_tokens=1))
    assert computed(engine, like(a, "a3", max_tokens=1)) == 16, "the beginning of a, used since, outlives b"


def test_blocks_that_are_held_are_never_evicted() -> None:
    """FAULTS K13."""
    engine = SyncEngine((Group(10),), max_num_seqs=2, poison=True)
    a = request("a", 33, max_tokens=1)
    computed(engine, a)
    live = like(a, "live", max_tokens=60)
    engine.add(live)
    engine.step()
    assert engine.policy.running["live"].num_cached_tokens == 32
    for i in range(8):
        engine.add(request(f"flood{i}", 50, max_tokens=1))
        engine.step()
        engine.step()
    engine.drain()
    assert engine.policy.stats.num_preemptions == 0
    check_answer(live, engine.answers["live"])
    assert engine.answers["live"].finish == "length"


# Windows

def test_a_hit_needs_only_the_window() -> None:
    engine = SyncEngine((Group(20, window=20),), poison=True)
    a = request("a", 100, max_tokens=40)
    computed(engine, a)
    # The answer's blocks are the last ones in the cache; the prompt's beginning was evicted long ago.
    engine.pool.blocks[0].forget_keys(a.keys[:4])
    b = request("b", 140, prompt=a.token_ids + solo(a)[0][:39])
    assert computed(engine, b) == 1
    assert cached(engine, "b")[0] == 139


def test_a_hit_needs_every_group() -> None:
    engine = SyncEngine((Group(20), Group(20, window=20)), poison=True)
    a = request("a", 100, max_tokens=1)
    computed(engine, a)
    engine.pool.blocks[1].forget_keys(a.keys[4:5])      # of the last 20 positions before 96, and before 80
    assert computed(engine, like(a, "b", max_tokens=1)) == 100 - 64
    engine.pool.blocks[0].forget_keys(a.keys[2:3])
    assert computed(engine, like(a, "c", max_tokens=1)) == 100 - 32


@pytest.mark.parametrize("window", [1, 5, 16, 17, 33])
def test_hits_beside_a_window_of_any_size(window: int) -> None:
    engine = SyncEngine((Group(30), Group(30, window)), poison=True)
    a = request("a", 70, max_tokens=20)
    computed(engine, a)
    for num_shared in (69, 64, 50, 33):
        name = f"b{num_shared}"
        computed(engine, like(a, name, num_shared, 80, max_tokens=20))
        assert cached(engine, name)[0] == num_shared


# What fails is forgotten

@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_what_a_failed_step_was_to_fill_is_never_found(overlap: int) -> None:
    """Not even by those who found it before the step's end was known; and nobody else fails."""
    engine = SyncEngine(overlap=overlap, poison=True)
    a, bystander = request("a", 40, max_tokens=9), request("bystander", 20, max_tokens=30)
    engine.add(a)
    engine.plan(error="MemoryError")
    engine.add(like(a, "b"), bystander)
    if overlap:
        engine.plan()                       # b shares a's blocks before the step has reported
        assert engine.policy.running["b"].num_cached_tokens == 32
    engine.drain()
    assert engine.answers["a"].finish == "failed"
    assert engine.answers["b"].finish == ("failed" if overlap else "length")
    check_answer(bystander, engine.answers["bystander"])
    assert engine.answers["bystander"].finish == "length"
    assert computed(engine, like(a, "c")) == (40 if overlap else 1)


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_what_an_aborted_sequence_left_to_a_failed_step_is_never_found(overlap: int) -> None:
    engine = SyncEngine(overlap=overlap, poison=True)
    a = request("a", 40, max_tokens=9)
    engine.add(a)
    engine.plan(error="MemoryError")
    engine.abort("a")
    engine.drain()
    assert computed(engine, like(a, "b")) == 40


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("aborted", [False, True])
def test_what_a_row_that_is_not_finite_has_read_is_never_found(overlap: int, aborted: bool) -> None:
    """FAULTS N07. Also blocks of earlier steps: a chunk without logits does not show it."""
    engine = SyncEngine(overlap=overlap, max_num_batched_tokens=32, poison=True)
    a = request("a", 70, max_tokens=9)
    engine.add(a)
    engine.plan(failed=("a",))              # the first chunk: its keys and values are not finite, nobody sees it yet
    engine.deliver()
    if aborted:
        engine.plan_all()
        engine.abort("a")
    engine.drain()
    assert engine.answers["a"].finish == ("aborted" if aborted else "failed")
    if aborted and not overlap:             # nobody knows: the next one who finds it fails, and then it is forgotten
        engine.add(like(a, "b"))
        engine.drain()
        assert engine.answers["b"].finish == "failed"
    assert computed(engine, like(a, "c")) == 70


# The host tier, and swapping

def test_evicted_blocks_come_back_from_the_tier() -> None:
    engine = SyncEngine((Group(8, num_tier_blocks=8),), poison=True)
    a = request("a", 70, max_tokens=1)
    computed(engine, a)
    computed(engine, request("flood", 120, max_tokens=1))
    assert computed(engine, like(a, "b", max_tokens=1)) == 70 - 64
    assert engine.device.num_tier_in == 4
    num_out = engine.device.num_tier_out
    computed(engine, request("flood2", 120, max_tokens=1))
    assert engine.device.num_tier_out - num_out <= 9, "what is in the tier already is not copied again"


def test_a_tier_of_one_block_is_never_overwritten_while_it_is_read() -> None:
    engine = SyncEngine((Group(3, num_tier_blocks=1),), poison=True)
    for name in "ababcacabcbcaab":
        seed = ord(name)
        computed(engine, request(f"{name}{engine.policy.stats.num_steps}", 40, max_tokens=2, seed=seed))
    assert engine.device.num_tier_in > 0


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("num_tier_blocks", [0, 20])
def test_a_preempted_sequence_is_swapped_where_there_is_a_tier(num_tier_blocks: int, overlap: int) -> None:
    engine = SyncEngine((Group(12, num_tier_blocks=num_tier_blocks),), overlap=overlap, poison=True)
    a, b = request("a", 60, max_tokens=60), request("b", 64, max_tokens=60)
    engine.add(a, b)
    plans = engine.drain()
    for sequence in (a, b):
        check_answer(sequence, engine.answers[sequence.request_id])
        assert cached(engine, sequence.request_id)[0] == 0, "what a sequence finds of its own is no hit"
    assert engine.policy.stats.num_preemptions > 0
    num_again = engine.policy.stats.prompt_tokens - 60 - 64
    assert any(plan.tier_in for plan in plans) == (num_tier_blocks > 0)
    assert num_again <= 32 if num_tier_blocks else num_again > 32
