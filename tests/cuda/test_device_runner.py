"""Whole tiny models by the CUDA kernels, through the emulator: the reference's greedy tokens, and the same bits
whatever the batch, the chunks, the bucket and the order of threads.
"""
from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda import device_runner
from cuda.device_runner import INDEX_CHANGES, DeviceRunner
from cuda.kernels.ops import KernelOps
from cuda.kernels.types import BF16, FP16
from cuda.kv_cache import kv_groups
from cuda.ops import KVDtype
from cuda.reference import ReferenceOps
from cuda.runner import BaseRunner, Runner, StepOutput
from cuda.sampler import SlotSampling
from tests.cuda.test_golden_models import GREEDY, tiny_model
from tests.cuda_emulator.build import unavailable
from tests.cuda_emulator.launcher import EmulatorLauncher
from tools.gpu_models import DEFAULT_SHAPE, ModelSizes, check_greedy_tokens, random_model
from tools.gpu_report import Report

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

NUM_BLOCKS = 24
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, seed=11, logprobs=3)

Bits = tuple[int, float]


def runner(model: str, dtype: np.dtype[Any] = BF16, kv_dtype: KVDtype | None = None, graphs: bool = True,
           deterministic: bool = True, **launcher: Any) -> DeviceRunner:
    spec, weights = tiny_model(model)
    ops = KernelOps(EmulatorLauncher(**launcher), dtype, deterministic)
    return DeviceRunner(spec, weights, ops, [NUM_BLOCKS] * len(kv_groups(spec)), max_num_seqs=4,
                        max_num_batched_tokens=48, max_model_len=96, kv_dtype=kv_dtype or ops.kv_dtypes[0],
                        graphs=graphs)


def reference(model: str, kv_dtype: KVDtype = "float32") -> Runner:
    spec, weights = tiny_model(model)
    return Runner(spec, weights, ReferenceOps(), [NUM_BLOCKS] * len(kv_groups(spec)), max_num_seqs=4,
                  max_num_batched_tokens=48, max_model_len=96, kv_dtype=kv_dtype)


def prompt(seed: int, length: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, 320, length).tolist()
    return drawn


def start(running: BaseRunner, slot: int, tokens: Sequence[int], sampling: SlotSampling = GREEDY,
          num_prompt: int | None = None, prompt_logprobs: int | None = None) -> None:
    blocks = list(range(slot * 6, slot * 6 + 6))[::-1]
    running.start(slot, tokens, num_prompt or len(tokens), sampling, [blocks] * len(running.groups), True,
                  prompt_logprobs)


def step(running: BaseRunner, chunks: Sequence[tuple[int, int, int]], resting: Sequence[int] = ()) -> StepOutput:
    return running.launch(running.rows(chunks, resting))()


def tokens_of(outputs: Sequence[StepOutput], slot: int) -> list[Bits]:
    """Token and logprob, in order."""
    return [(int(token), float(logprob)) for output in outputs
            for token, logprob, at in zip(output.sampled.token_ids, output.sampled.logprobs, output.slots, strict=True)
            if at == slot]


MODELS = ("llama", "llama-tied-rope3", "llama-yarn", "mistral-window", "qwen2", "qwen3", "gemma3")
# Answers may part where the reference's two best logits are closer than these shares of the largest one: twice the
# errors that were measured, and no more than that.
GAPS: dict[Any, float] = {BF16: 0.03, FP16: 0.003}
KV_GAPS: dict[KVDtype, float] = {"int8": 0.03, "fp8": 0.08}


def assert_same_greedy_tokens(running: DeviceRunner, model: str, gap: float, kv_dtype: KVDtype = "float32",
                              first_chunk: int = 25) -> None:
    """Two sequences in chunks that mix with decode rows."""
    answers, logits = [], []
    expected = reference(model, kv_dtype)
    expected.on_logits = lambda rows, slots: logits.extend(zip(slots.tolist(), rows.copy(), strict=True))
    for x in (running, expected):
        start(x, 2, prompt(1, 40))
        start(x, 0, prompt(2, 21))
        outputs = [step(x, [(2, 0, first_chunk)]), step(x, [(2, first_chunk, 40), (0, 0, 9)]), step(x, [(0, 9, 21)])]
        outputs += [step(x, [], resting=[2] if i == 3 else []) for i in range(24)]
        answers.append({slot: [token for token, _ in tokens_of(outputs, slot)] for slot in (0, 2)})
    num_equal = 0
    for slot in (0, 2):
        rows = [row for at, row in logits if at == slot]
        for token, wanted, row in zip(answers[0][slot], answers[1][slot], rows, strict=True):
            second, best = np.sort(row)[-2:]
            if token != wanted:
                assert best - second <= gap * np.abs(row).max()
                break
            num_equal += 1
    assert num_equal >= 12, f"only {num_equal} tokens to compare"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_the_references(model: str, dtype: np.dtype[Any]) -> None:
    assert_same_greedy_tokens(runner(model, dtype), model, GAPS[dtype])


@pytest.mark.parametrize("model", ["llama-quantized", "qwen2-quantized", "gemma3-quantized"])
def test_greedy_tokens_of_quantized_weights_are_the_references(model: str) -> None:
    assert_same_greedy_tokens(runner(model), model, GAPS[BF16])


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("model", ["llama-tied-rope3", "gemma3"])
def test_greedy_tokens_of_8_bit_keys_and_values_are_the_references(model: str, kv_dtype: KVDtype) -> None:
    assert_same_greedy_tokens(runner(model, kv_dtype=kv_dtype), model, KV_GAPS[kv_dtype], kv_dtype)


def test_greedy_tokens_with_cublas_and_tiles_are_the_references() -> None:
    """The mode that is not deterministic: prefill_attention and `matmul` in place of the row-invariant kernels."""
    running = runner("llama", deterministic=False)
    launcher: Any = running.launcher
    matmul, num_products = launcher.matmul, 0

    def counted(*arrays: Any) -> None:
        nonlocal num_products
        num_products += 1
        matmul(*arrays)

    launcher.matmul = counted
    assert_same_greedy_tokens(running, "llama", GAPS[BF16], first_chunk=39)
    assert num_products == 4 * running.spec.num_layers, "the step of 39 rows"


class Script:
    """A constraint that allows one token after another, and notes what it is asked and told."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.told = list(tokens), list[int]()
        self.asked: list[tuple[int, int]] = []      # tokens told of so far, tokens that are out

    def fill(self, allowed: NDArray[np.uint32], num_output_tokens: int) -> None:
        self.asked.append((len(self.told), num_output_tokens))
        token = self.tokens[num_output_tokens]
        allowed[:] = 0
        allowed[token // 32] = 1 << token % 32

    def advance(self, token_id: int) -> None:
        self.told.append(token_id)


def test_masks_follow_the_tokens_of_the_step_before() -> None:
    """Launched one step ahead: beside a row without a constraint, eagerly and as graphs, with rests between, and in a
    slot that another one had."""
    running, free = runner("llama"), runner("llama")
    script, second = Script([7, 300, 7, 7, 31, 32, 64, 9, 5, 6, 8, 10]), Script([11, 12, 13])
    answers: list[list[StepOutput]] = []
    for x, constraint in ((running, script), (free, None)):
        start(x, 1, prompt(3, 20), dataclasses.replace(SAMPLED, constraint=constraint))
        start(x, 0, prompt(4, 9), SAMPLED)
        ahead, outputs = None, []
        for number in range(12):
            chunks = [(1, 0, 20), (0, 0, 9)] if not number else []
            launched = x.launch(x.rows(chunks, [1] if number in (4, 5) else []))
            if ahead is not None:
                outputs.append(ahead())
            ahead = launched
        assert ahead is not None
        outputs.append(ahead())
        answers.append(outputs)
    assert [token for token, _ in tokens_of(answers[0], 1)] == script.tokens[:10]
    assert script.asked == [(number, number) for number in range(10)]
    assert script.told == script.tokens[:9], "the last step's are read when the next one needs them"
    assert tokens_of(answers[0], 0) == tokens_of(answers[1], 0), "the other row's bits are as they were"
    assert any(kind.graphs is not None and key[1] for key, kind in running._kinds.items()), "no graph was replayed"

    running.end(1)
    start(running, 1, prompt(5, 5), dataclasses.replace(SAMPLED, constraint=second))
    outputs = [step(running, [(1, 0, 5)]), step(running, []), step(running, [])]
    assert [token for token, _ in tokens_of(outputs, 1)] == second.tokens
    assert (script.told, second.told) == (script.tokens[:10], second.tokens[:2])


EQUAL = pytest.mark.parametrize(("model", "kv_dtype"), [("llama-quantized", "bf16"), ("gemma3", "bf16"),
                                                        ("mistral-window", "int8"), ("llama", "fp8"),
                                                        ("mistral-window-sinks", "bf16")])


def alone(model: str, kv_dtype: KVDtype, seed: int, length: int, num_steps: int = 12) -> list[Bits]:
    """Of a runner that runs nothing else, without graphs, the prompt in one chunk."""
    running = runner(model, kv_dtype=kv_dtype, graphs=False)
    start(running, 1, prompt(seed, length), SAMPLED)
    return tokens_of([step(running, [(1, 0, length)]), *(step(running, []) for _ in range(num_steps - 1))], 1)


@EQUAL
def test_batched_chunked_and_replayed_is_alone(model: str, kv_dtype: KVDtype) -> None:
    """Four sequences that enter one after the other in odd chunks; buckets of 1, 2 and 4; random orders of threads."""
    lengths = {0: 23, 1: 5, 2: 30, 3: 16}
    running = runner(model, kv_dtype=kv_dtype, order=3, lazy=False, seed=5)
    outputs, done = [], dict.fromkeys(lengths, 0)
    for number in range(30):
        chunks = []
        for slot, length in lengths.items():
            if number == 4 * slot:
                start(running, slot, prompt(slot, length), SAMPLED)
            if number >= 4 * slot and done[slot] < length:
                end = min(length, done[slot] + 7 + slot)
                chunks.append((slot, done[slot], end))
                done[slot] = end
        outputs.append(step(running, chunks))
    assert any(kind.graphs is not None for kind in running._kinds.values()), "no graph was replayed"
    for slot, length in lengths.items():
        assert tokens_of(outputs, slot)[:12] == alone(model, kv_dtype, slot, length)


@EQUAL
def test_preempted_is_undisturbed(model: str, kv_dtype: KVDtype) -> None:
    """Leaves its slot in mid-answer, comes back in another one with other blocks, and is computed anew."""
    expected = alone(model, kv_dtype, 7, 20)
    running = runner(model, kv_dtype=kv_dtype)
    start(running, 1, prompt(7, 20), SAMPLED)
    outputs = [step(running, [(1, 0, 20)]), *(step(running, []) for _ in range(4))]
    known = tokens_of(outputs, 1)
    assert known == expected[:5]
    running.end(1)
    start(running, 1, prompt(8, 33))
    step(running, [(1, 0, 32)])
    start(running, 3, prompt(7, 20) + [token for token, _ in known], SAMPLED, num_prompt=20)
    outputs = [step(running, [(3, 0, 25), (1, 32, 33)]), *(step(running, []) for _ in range(6))]
    assert tokens_of(outputs, 3) == expected[5:]


def test_steps_launched_before_results_are_read() -> None:
    expected = alone("llama", "bf16", 4, 18)
    running = runner("llama")
    start(running, 1, prompt(4, 18), SAMPLED)
    waiting = [running.launch(running.rows(chunks, ())) for chunks in ([(1, 0, 18)], *[[]] * 11)]
    assert tokens_of([finish() for finish in waiting], 1) == expected


def test_moved_and_copied_blocks_serve_as_well() -> None:
    """The second sequence takes over the first one's full block and a copy of its other one, over the tier and back."""
    spec, weights = tiny_model("gemma3")
    ops = KernelOps(EmulatorLauncher(), BF16, deterministic=True)
    num_groups = len(kv_groups(spec))
    running = DeviceRunner(spec, weights, ops, [NUM_BLOCKS] * num_groups, 4, 32, 96, [8] * num_groups, "int8")
    expected = alone("gemma3", "int8", 9, 28)
    start(running, 1, prompt(9, 28), SAMPLED)
    outputs = [step(running, [(1, 0, 28)]), *(step(running, []) for _ in range(2))]
    assert tokens_of(outputs, 1) == expected[:3]
    groups = range(num_groups)
    held = list(range(6, 12))[::-1]
    # out to the tier, a chain of copies, poison over what was left, and back in elsewhere
    running.move_blocks([(group, held[0], 5) for group in groups],
                        [move for group in groups for move in ((group, held[1], 20), (group, 20, 21))],
                        [(group, block) for group in groups for block in held], [(group, 5, 23) for group in groups])
    running.end(1)
    known = prompt(9, 28) + [token for token, _ in tokens_of(outputs, 1)]
    running.start(2, known, 28, SAMPLED, [[23, 21, 0, 1]] * num_groups, True, None)
    outputs = [step(running, [(2, 28, 31)]), *(step(running, []) for _ in range(8))]
    assert tokens_of(outputs, 2) == expected[3:]


def test_prompt_logprobs_are_near_the_references() -> None:
    got = []
    for running in (runner("llama", FP16), reference("llama")):
        start(running, 0, prompt(3, 20), prompt_logprobs=2)
        start(running, 1, prompt(4, 9))
        outputs = [step(running, [(0, 0, 12), (1, 0, 9)]), step(running, [(0, 12, 20)])]
        got.append([output.prompt_logprobs for output in outputs])
        assert [output.prompt_positions.tolist() for output in outputs] == [[*range(1, 13)], [*range(13, 20)]]
        assert [len(top) for output in outputs for top in output.prompt_top_logprobs] == [2] * 19
    np.testing.assert_allclose(np.concatenate(got[0]), np.concatenate(got[1]), atol=0.02)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    expected = alone("llama", "bf16", 1, 10, 3)
    running = runner("llama")
    start(running, 1, prompt(1, 10), SAMPLED)
    start(running, 2, prompt(2, 10), SAMPLED)

    def poison(logits: Any, slots: Any) -> None:
        logits[slots == 2] = np.nan

    running.on_logits = poison
    outputs = [step(running, [(1, 0, 10), (2, 0, 10)]), *(step(running, []) for _ in range(2))]
    assert tokens_of(outputs, 1) == expected
    assert [[row for row, _ in output.sampled.failed] for output in outputs] == [[1]] * 3


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3", "llama-quantized"])
def test_a_decode_step_takes_eight_kernels_a_layer(model: str) -> None:
    """Norms after attention and FFN and projections of several formats included. Outside of layers: rows, embedding,
    the two arrays whose last rows are taken, norm, head and sampling."""
    running = runner(model)
    start(running, 0, prompt(1, 10))
    step(running, [(0, 0, 10)])
    for _ in range(3):
        before = running.launcher.num_launches  # type: ignore[attr-defined]
        step(running, [])
        launches = running.launcher.num_launches - before  # type: ignore[attr-defined]
        assert launches <= 8 * running.spec.num_layers + 7


def test_two_layers_of_the_default_model() -> None:
    """Its widths and vocabulary, seeded weights: tools.gpu_check's own check, which names any token that differs."""
    spec = dataclasses.replace(DEFAULT_SHAPE, layers=DEFAULT_SHAPE.layers[:2])
    report = Report(minutes=1.0)
    check_greedy_tokens(EmulatorLauncher(), spec, random_model(spec), ModelSizes(prompt=20, answer=4), report)


def test_many_changes_of_the_index_go_up_without_a_look_up() -> None:
    """So that the first one after a long time has few to wait for."""
    running = runner("llama")
    running.keep_index(400)
    assert running.prefix_table is not None
    root = bytes(16)
    keys = [number.to_bytes(16, "little") for number in range(1, 401)]
    running.change_index([(number, keys[number], root, prompt(number, 16)) for number in range(INDEX_CHANGES - 1)])
    running.launch(None)
    assert running.prefix_table.num_changes == INDEX_CHANGES - 1
    running.change_index([(0, b"", b"", ()), (399, keys[399], root, prompt(399, 16))])
    running.launch(None)
    assert running.prefix_table.num_changes == 0
    questions = [(root, [keys[number]], prompt(number, 16)) for number in (0, 1, 399)]
    assert running.look_up(questions)() == [0, 1, 1]


def test_buckets_are_no_wider_than_a_step() -> None:
    """Five rows in a runner whose steps have five at most, where the bucket would be of eight."""
    spec, weights = tiny_model("llama")
    answers = []
    for graphs in (True, False):
        ops = KernelOps(EmulatorLauncher(), BF16, deterministic=True)
        running = DeviceRunner(spec, weights, ops, [NUM_BLOCKS], 5, 5, 64, graphs=graphs)
        for slot in range(5):
            running.start(slot, prompt(slot, 5), 5, SAMPLED, [[2 * slot, 2 * slot + 1]], True, None)
        outputs = [step(running, [(slot, 0, 5)], resting=[*range(slot)]) for slot in range(5)]
        outputs += [step(running, []) for _ in range(5)]
        answers.append([tokens_of(outputs, slot) for slot in range(5)])
    assert answers[0] == answers[1]


def test_a_step_that_finds_no_memory_is_made_good_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a kind of step has run once it has no memory for its arrays, and none can be had in a capture."""
    expected = alone("llama", "bf16", 4, 18)
    running = runner("llama")
    start(running, 1, prompt(4, 18), SAMPLED)
    outputs = [step(running, [(1, 0, 18)])]
    launcher: Any = running.launcher

    def fail(*_: Any) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "launch", fail)
        with pytest.raises(MemoryError):
            step(running, [])
    # The failed step's token is unknown; the engine ends its sequence. Another one takes its place.
    running.end(1)
    known = prompt(4, 18) + [token for token, _ in tokens_of(outputs, 1)]
    start(running, 1, known, SAMPLED, num_prompt=18)
    outputs = [step(running, [(1, 0, 19)]), *(step(running, []) for _ in range(6))]
    assert tokens_of(outputs, 1) == expected[1:8]


@pytest.mark.parametrize("num_good", [0, 1])
def test_what_could_not_be_sent_for_want_of_memory_is_sent_with_the_next_step(
        num_good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of block tables and the parameters of a sequence that has entered: no later plan says them again."""
    expected = alone("llama", "bf16", 4, 18)
    running = runner("llama")
    start(running, 0, prompt(5, 20))
    step(running, [(0, 0, 20)])
    start(running, 1, prompt(4, 18), SAMPLED)
    launcher: Any = running.launcher
    upload, calls = launcher.upload, 0

    def fail(array: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > num_good:
            raise MemoryError("no memory")
        return upload(array)

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "upload", fail)
        with pytest.raises(MemoryError):
            step(running, [])               # a step of the other sequence alone
    outputs = [step(running, [(1, 0, 18)], resting=[0]), *(step(running, [], resting=[0]) for _ in range(11))]
    assert tokens_of(outputs, 1) == expected


def test_memory_is_given_back() -> None:
    launcher = EmulatorLauncher(memory_bytes=1 << 28)
    spec, weights = tiny_model("gemma3")
    running = DeviceRunner(spec, weights, KernelOps(launcher), [NUM_BLOCKS] * 2, 4, 32, 96)
    start(running, 0, prompt(1, 10))
    finish = [running.launch(running.rows(chunks, ())) for chunks in ([(0, 0, 10)], [], [])][-1]
    assert launcher.free_bytes() < 1 << 28
    running.close()
    assert len(finish().sampled.token_ids) == 1
    gc.collect()
    assert launcher.free_bytes() == 1 << 28


def test_long_work_lists_are_launched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone("llama", "bf16", 4, 40)
    monkeypatch.setattr(device_runner, "MAX_ITEMS", 3)
    running = runner("llama")
    start(running, 1, prompt(4, 40), SAMPLED)
    outputs = [step(running, [(1, 0, 40)]), *(step(running, []) for _ in range(11))]
    assert tokens_of(outputs, 1) == expected


@pytest.mark.parametrize(("change", "message"), [
    ({"head_dim": 12}, "heads of 12: on CUDA they must be a multiple of 8 and at most 256"),
    ({"head_dim": 320}, "heads of 320"), ({"hidden_size": 16392}, "hidden states of 16392"),
])
def test_models_that_the_kernels_cannot_compute_are_refused_at_the_start(change: dict[str, Any], message: str) -> None:
    spec, weights = tiny_model("llama")
    with pytest.raises(ValueError, match=message):
        KernelOps(EmulatorLauncher()).prepare(dataclasses.replace(spec, **change), weights, 32, 64)
