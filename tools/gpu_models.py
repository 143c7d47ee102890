"""Whole models on a GPU: the reference's greedy tokens, and steps of a Llama-3-8B beside the floors of the device."""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuda.device_runner import DeviceRunner
from cuda.kernels.ops import KernelOps
from cuda.kernels.types import BF16
from cuda.kv_cache import kv_groups
from cuda.launcher import Launcher
from cuda.ops import BLOCK_SIZE
from cuda.reference import ReferenceOps
from cuda.runner import Runner
from tools.gpu_measure import GREEDY, Ceilings, random_weight
from tools.gpu_report import Report
from weights.load import LayerWeights, ModelWeights
from weights.quant import Linear
from weights.rope import RopeSpec, rope_spec
from weights.spec import LayerSpec, ModelSpec

# How far a logit may be off by rounding to bfloat16 on its way, in standard deviations of its row: the device may take
# the second best token where it is no further from the best.
BF16_BOUND = 0.08


def _rope(head_dim: int, theta: float) -> RopeSpec:
    return rope_spec(head_dim, 8192, {"rope_theta": theta})


# The default model's shape, SmolLM2-135M.
DEFAULT_SHAPE = ModelSpec(
    "llama", hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, ffn_size=1536, vocab_size=49152,
    max_position=8192, norm_eps=1e-5, layers=(LayerSpec(None, _rope(64, 100_000.0)),) * 30, attention_scale=64**-0.5,
    tied_head=True)
LLAMA_3_8B = ModelSpec(
    "llama", hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256,
    max_position=8192, norm_eps=1e-5, layers=(LayerSpec(None, _rope(128, 500_000.0)),) * 32, attention_scale=128**-0.5)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What is run. The defaults are for a GPU; tests take little ones."""
    prompt: int = 40
    answer: int = 16
    batches: tuple[int, ...] = (1, 32, 128)
    context: int = 1024
    steps: int = 30
    prefill: int = 4096
    # H200's targets, milliseconds a decode step by batch.
    targets_ms: tuple[tuple[int, float], ...] = ((1, 4.5), (32, 5.8), (128, 10.0))


def random_model(spec: ModelSpec, same_layers: bool = False) -> ModelWeights:
    """bfloat16 weights that keep activations near 1. same_layers: all share one layer's host memory."""
    seeds = iter(range(1 << 20))

    def linear(num_rows: int, inputs: int) -> Linear:
        return Linear((random_weight("bf16", num_rows, inputs, next(seeds)),))

    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    ones = np.ones(spec.hidden_size, np.float32)

    def layer() -> LayerWeights:
        return LayerWeights(ones, linear(heads + 2 * kv_heads, spec.hidden_size), linear(spec.hidden_size, heads), ones,
                            linear(2 * spec.ffn_size, spec.hidden_size), linear(spec.hidden_size, spec.ffn_size))

    layers = (layer(),) * spec.num_layers if same_layers else tuple(layer() for _ in range(spec.num_layers))
    embed = random_weight("bf16", spec.vocab_size, spec.hidden_size, next(seeds))
    head = Linear((embed,)) if spec.tied_head else linear(spec.vocab_size, spec.hidden_size)
    return ModelWeights(embed, layers, ones, head)


# ---- Greedy tokens

def check_greedy_tokens(launcher: Launcher, spec: ModelSpec, weights: ModelWeights, sizes: ModelSizes,
                        report: Report) -> None:
    """The device's tokens of one sequence, one decode step each, against the reference's.

    Raises: AssertionError where they differ by more than rounding explains.
    """
    prompt = np.random.default_rng(0).integers(0, spec.vocab_size, sizes.prompt).tolist()
    length = sizes.prompt + sizes.answer
    begin_s = time.perf_counter()
    tokens, logits = _reference_answer(spec, weights, prompt, sizes.answer)
    reference_s = time.perf_counter() - begin_s
    ops = KernelOps(launcher)
    num_blocks = [-(-length // BLOCK_SIZE)] * len(kv_groups(spec))
    runner = DeviceRunner(spec, weights, ops, num_blocks, 1, max(sizes.prompt, sizes.answer), length,
                          kv_dtype=ops.kv_dtypes[0])
    ties, start = 0, 0
    while start < sizes.answer:
        # From here on with the reference's tokens: after a tie that went the other way, the texts differ.
        known = prompt + tokens[:start]
        answer = _answer(runner, known, sizes.answer - start, sizes.prompt)
        equal = next((i for i, (got, want) in enumerate(zip(answer, tokens[start:], strict=True)) if got != want), None)
        if equal is None:
            break
        place = start + equal
        gap = float(logits[place][tokens[place]] - logits[place][answer[equal]])
        bound = BF16_BOUND * float(logits[place].std())
        assert gap <= bound, (f"token {place} is {answer[equal]}, not {tokens[place]}, whose logit is larger by "
                              f"{gap:.3g}: rounding explains {bound:.3g}")
        ties, start = ties + 1, place + 1
    what = f"{spec.num_layers} layers of {spec.hidden_size}, {sizes.prompt} + {sizes.answer} tokens as the reference's"
    report.add("greedy tokens", what, "ok", tokens=sizes.answer, ties=ties, s=reference_s)


def _reference_answer(spec: ModelSpec, weights: ModelWeights, prompt: Sequence[int],
                      num_tokens: int) -> tuple[list[int], list[NDArray[np.float32]]]:
    length = len(prompt) + num_tokens
    groups = kv_groups(spec)
    runner = Runner(spec, weights, ReferenceOps(), [-(-length // BLOCK_SIZE)] * len(groups), 1, length, length)
    rows: list[NDArray[np.float32]] = []
    runner.on_logits = lambda logits, slots: rows.append(logits[0].copy())
    return _answer(runner, prompt, num_tokens, len(prompt)), rows


def _answer(runner: Runner | DeviceRunner, known: Sequence[int], num_tokens: int, num_prompt: int) -> list[int]:
    blocks = list(range(-(-(len(known) + num_tokens) // BLOCK_SIZE)))
    runner.start(0, known, num_prompt, GREEDY, [blocks] * len(runner.groups), True, None)
    answer = []
    chunks = [(0, begin, min(begin + runner.max_num_tokens, len(known)))
              for begin in range(0, len(known), runner.max_num_tokens)]
    for chunk in [*chunks, *[None] * (num_tokens - 1)]:
        output = runner.launch(runner.rows([] if chunk is None else [chunk], []))()
        answer += output.sampled.token_ids.tolist()
    runner.end(0)
    assert len(answer) == num_tokens, f"{len(answer)} tokens sampled, not {num_tokens}"
    return answer


# ---- Steps

def measure_steps(launcher: Launcher, spec: ModelSpec, sizes: ModelSizes, report: Report, ceilings: Ceilings) -> None:
    """Decode steps at each batch, and a prefill, of a model with random weights."""
    begin_s = time.perf_counter()
    weights = random_model(spec, same_layers=True)
    context_blocks = -(-(sizes.context + 3 + sizes.steps + 1) // BLOCK_SIZE)
    prefill_blocks = -(-(sizes.prefill + 1) // BLOCK_SIZE)
    most = max(sizes.batches)
    num_blocks = max(most * context_blocks, prefill_blocks)
    runner = DeviceRunner(spec, weights, KernelOps(launcher), [num_blocks] * len(kv_groups(spec)), most,
                          max(sizes.prefill, most), max(context_blocks, prefill_blocks) * BLOCK_SIZE, kv_dtype="bf16")
    launcher.synchronize()
    part = f"model of {spec.num_layers} layers of {spec.hidden_size}"
    report.add(part, "weights made and packed", s=time.perf_counter() - begin_s)
    layers_bytes, head_bytes = _matrix_bytes(spec)
    read_bytes = layers_bytes + head_bytes
    for batch in sizes.batches:
        if report.is_over:
            report.add(part, f"decode step, batch {batch}", "not measured", message="the minutes are over")
            continue
        step_s = _decode_step_s(runner, batch, sizes, context_blocks)
        kv_bytes = batch * sizes.context * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * BF16.itemsize
        floor_s = max((read_bytes + kv_bytes) / ceilings.bytes_per_s,
                      batch * read_bytes / ceilings.flops_per_s)            # 2 flops a weight of 2 bytes
        _add_step(report, part, f"decode step, batch {batch}, context {sizes.context}", step_s, floor_s,
                  dict(sizes.targets_ms).get(batch), batch / step_s)
    if report.is_over:
        report.add(part, f"prefill of {sizes.prefill}", "not measured", message="the minutes are over")
        return
    prefill_s = _prefill_s(runner, sizes.prefill, prefill_blocks)
    projections = sizes.prefill * layers_bytes                              # 2 flops a weight of 2 bytes
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * sizes.prefill**2
    floor_s = max(read_bytes / ceilings.bytes_per_s, (projections + attention) / ceilings.flops_per_s)
    _add_step(report, part, f"prefill of {sizes.prefill}", prefill_s, floor_s, None, sizes.prefill / prefill_s)


def _matrix_bytes(spec: ModelSpec) -> tuple[int, int]:
    """Of 16-bit weights: of all layers, and of the head."""
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = spec.hidden_size * (2 * heads + 2 * kv_heads + 3 * spec.ffn_size)
    return 2 * spec.num_layers * layer, 2 * spec.vocab_size * spec.hidden_size


def _add_step(report: Report, part: str, what: str, step_s: float, floor_s: float, target_ms: float | None,
              tokens_per_s: float) -> None:
    figures = {"ms": 1e3 * step_s, "floor_ms": 1e3 * floor_s, "share_percent": 100 * floor_s / step_s,
               "per_s": tokens_per_s}
    if target_ms is None:
        report.add(part, what, "", **figures)
    else:
        report.add(part, what, "ok" if 1e3 * step_s <= target_ms else "below target", **figures, target_ms=target_ms)


def _decode_step_s(runner: DeviceRunner, batch: int, sizes: ModelSizes, blocks_each: int) -> float:
    """Of steps launched one ahead of the results, as the engine does."""
    context = sizes.context
    for slot in range(batch):
        blocks = list(range(slot * blocks_each, (slot + 1) * blocks_each))
        runner.start(slot, [1 + slot] * context, context, GREEDY, [blocks] * len(runner.groups), True, None)
    # The last token of each prompt alone: of the others' keys and values it is enough that they are there.
    runner.launch(runner.rows([(slot, context - 1, context) for slot in range(batch)], []))()

    def run(count: int) -> float:
        begin_s = time.perf_counter()
        pending = runner.launch(runner.rows([], []))
        for _ in range(count - 1):
            following = runner.launch(runner.rows([], []))
            pending()
            pending = following
        pending()
        return (time.perf_counter() - begin_s) / count

    run(min(3, sizes.steps))                # captures
    step_s = run(sizes.steps)
    for slot in range(batch):
        runner.end(slot)
    return step_s


def _prefill_s(runner: DeviceRunner, num_tokens: int, num_blocks: int) -> float:
    times = []
    for _ in range(3):
        runner.start(0, [1] * num_tokens, num_tokens, GREEDY, [list(range(num_blocks))] * len(runner.groups), True,
                     None)
        begin_s = time.perf_counter()
        runner.launch(runner.rows([(0, 0, num_tokens)], []))()
        times.append(time.perf_counter() - begin_s)
        runner.end(0)
    return min(times)
