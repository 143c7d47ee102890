"""The emulator finds each planted fault of faults.cu, lets its faultless twin pass and refuses what devices refuse."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Instance, KernelSpec
from tests.cuda_emulator import build, under_asan
from tests.cuda_emulator.build import MEMORY, PLAIN, RACE
from tests.cuda_emulator.fault_kernels import BF16, FAULTS, SPEC, emulator, floats, integers, no_reference, run
from tests.cuda_emulator.launcher import EmulatorError, EmulatorLauncher

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


# ---- faults ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("entry", "message"), [
    ("missing_barrier<true>", r"uninitialised shared memory: byte 252 of a shared array at faults.cu:\d+ .missing_"),
    ("buffer_used_again<true>", "race: write of byte .* is not ordered with the read by thread .* of this block"),
    ("weak_wait<true>", r"race: read .* is not ordered with the cp.async in flight by thread 0 of this block"),
    ("lock_step<0>", "race: |uninitialised"),
    ("lock_step<1>", r"race: read .* is not ordered with the write by thread 31 of this block at faults.cu"),
    ("groups_of_lanes<true>", "race: read .* is not ordered with the write by thread 7 of this block|uninitialised"),
    ("uninitialised_shared", r"thread \(40,0,0\): read of uninitialised shared memory: byte 160 of a shared array"),
    ("blocks_add<true>", "race: read of byte 0 of argument 0 .* with the write by thread 0 of another block"),
    ("last_block<1>", "race: read of byte .* of argument 1 .* not ordered with the write by .* of another block"),
    ("last_block<2>", "race: read of byte .* of argument 1 .* not ordered with the write by .* of another block"),
    ("last_block<3>", "race: read of byte .* of argument 1 .* not ordered with the write by .* of another block"),
    ("read_out_of_bounds", r"thread \(31,0,0\): read of 4 bytes outside the arrays of the launch, 0 bytes past the end "
                           r"of argument 1 at faults.cu:\d+ \(read_out_of_bounds\)"),
    ("write_out_of_bounds", r"thread \(0,0,0\): write of 4 bytes outside .*, 4 bytes before argument 0 at faults.cu"),
    ("shared_out_of_bounds", "write of 4 bytes outside the arrays .*, 0 bytes past the end of a shared array"),
    ("copy_out_of_bounds", r"read of 16 bytes outside the arrays of the launch, 0 bytes past the end of argument 1 at "
                           r"common.cuh:\d+ \(cp_async16\) in faults.cu:\d+"),
    ("written_constant", "write to byte 0 of argument 1, which the kernel gets as constant at faults.cu"),
])
def test_the_race_checker_finds(entry: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(emulator(sanitize=RACE), entry)


@pytest.mark.parametrize(("entry", "message"), [
    ("half_block_barrier", r"block \(0,0,0\): deadlock: 32 of 64 threads have ended, threads 0-31 at __syncthreads of "
                           r"line \d+"),
    ("two_barriers", r"divergent __syncthreads: other threads wait at the one of line \d+"),
    ("lanes_that_left", "deadlock: 16 of 32 threads have ended, threads 0-15 at a shuffle of line .* mask ffffffff"),
    ("shuffle_from_outside_the_mask", "lane 0 shuffles from lane 20, which is not in the mask 0000ffff"),
    ("lane_outside_its_mask", "a shuffle by lane 16, which is not in its mask 0000ffff"),
    ("overlapping_masks", "__syncwarp with mask ffff8000, while lanes of it wait in __syncwarp .* mask 0001ffff"),
    ("two_shuffles", r"divergent warp: a shuffle, while lanes of the same mask wait in a shuffle of line \d+"),
    ("two_collectives", "divergent warp: __syncwarp, while lanes of the same mask wait in a vote"),
    ("two_sums", "divergent warp: a shuffle, while lanes of the same mask wait in a shuffle"),
    ("copies_left_behind", "ends with cp.async copies that it never waited for"),
    ("misaligned_copy", r"cp.async of 16 bytes that is not aligned to them at common.cuh:.* in faults.cu:\d+"),
])
def test_every_build_finds(entry: str, message: str) -> None:
    for sanitize in (PLAIN, RACE):
        with pytest.raises(EmulatorError, match=message):
            run(emulator(sanitize=sanitize), entry)


MEMORY_FAULTS = {
    "read_out_of_bounds": r"heap-buffer-overflow[\s\S]*READ of size 4[\s\S]*faults.cu",
    "write_out_of_bounds": r"heap-buffer-overflow[\s\S]*WRITE of size 4[\s\S]*faults.cu",
    "shared_out_of_bounds": r"heap-buffer-overflow[\s\S]*faults.cu",
    "shared_index_out_of_bounds": r"undefined behaviour: array index out of bounds at .*faults.cu:\d+",
    "copy_out_of_bounds": r"cp.async outside its arrays at common.cuh:.* in faults.cu:\d+",
    "misaligned": r"undefined behaviour: misaligned access at .*faults.cu:\d+",
    "wide_shift": r"undefined behaviour: shift by more than the type has bits at .*faults.cu:\d+",
    "half_block_barrier": "deadlock: 32 of 64 threads have ended",
}


def memory_faults() -> dict[str, str]:
    """What each fault says, in a process with libasan; "" for nothing. The twin runs between them must pass."""
    said = {}
    for entry in MEMORY_FAULTS:
        try:
            run(emulator(sanitize=MEMORY), entry)
            said[entry] = ""
        except EmulatorError as error:
            said[entry] = str(error)
        run(emulator(order=3, sanitize=MEMORY), "missing_barrier<false>")
        run(emulator(order=1, sanitize=MEMORY), "weak_wait<false>")
    return said


@pytest.mark.skipif(under_asan.unavailable() is not None, reason=str(under_asan.unavailable()))
def test_asan_and_ubsan_find_what_touches_foreign_memory() -> None:
    build.build_all((Path(FAULTS), entry, MEMORY) for entry in
                    (*MEMORY_FAULTS, "missing_barrier<false>", "weak_wait<false>"))
    said: dict[str, str] = under_asan.call(__name__, "memory_faults", timeout_s=120)
    for entry, message in MEMORY_FAULTS.items():
        with pytest.raises(EmulatorError, match=message):
            raise EmulatorError(said[entry])


def test_an_order_of_threads_shows_a_missing_barrier() -> None:
    expected = floats(64)[::-1]
    results = [run(emulator(order), "missing_barrier<true>") for order in range(3)]
    assert not any(np.array_equal(result, expected) for result in results)
    assert len({result.tobytes() for result in results}) == 3


def test_lazy_copies_show_a_wait_that_is_too_weak() -> None:
    assert np.array_equal(run(emulator(lazy=False), "weak_wait<true>"), floats(128)), "at once is just in time"
    assert np.isnan(run(emulator(lazy=True), "weak_wait<true>")).any()


@pytest.mark.parametrize("sanitize", [PLAIN, RACE])
@pytest.mark.parametrize(("entry", "expected"), [
    ("missing_barrier<false>", floats(64)[::-1]),
    ("buffer_used_again<false>", np.concatenate([np.roll(floats(128)[:64], -1), np.roll(floats(128)[64:], -1)])),
    ("weak_wait<false>", floats(128)),
    ("lock_step<2>", integers(32)[::-1]),
    ("groups_of_lanes<false>", integers(32).reshape(4, 8)[:, ::-1].reshape(-1)),
    ("blocks_add<false>", np.array([3], np.int32)),
    ("last_block<0>", 3 * floats(64)),
])
def test_the_faultless_twin_passes_in_every_order(entry: str, expected: NDArray[Any], sanitize: str) -> None:
    for order in range(5):
        for lazy in (False, True):
            result = run(emulator(order, lazy, sanitize, seed=order), entry)
            np.testing.assert_array_equal(result, expected, err_msg=f"order {order}, lazy {lazy}")


def test_a_fault_leaves_the_next_launch_alone() -> None:
    launcher = emulator()
    for _ in range(3):
        with pytest.raises(EmulatorError, match="deadlock"):
            run(launcher, "half_block_barrier")
        np.testing.assert_array_equal(run(launcher, "missing_barrier<false>"), floats(64)[::-1])


# ---- arguments and budgets -------------------------------------------------------------------------------------------

def good_parameters() -> list[Any]:
    return [np.zeros(4, np.float16), np.zeros(4, np.float16), np.zeros(4, np.uint32), np.float32(1), np.int32(1),
            np.int64(1), np.bool_(True), None]


@pytest.mark.parametrize(("index", "argument", "message"), [
    (0, np.zeros(4, np.float32), r"argument 0 is \*float16, float32\[4\] given"),
    (0, np.zeros(4, BF16), r"argument 0 is \*float16, bfloat16\[4\] given"),
    (0, np.zeros((4, 4), np.float16)[:, 0], r"argument 0: float16\[4\] with strides \(8,\) given"),
    (0, np.broadcast_to(np.float16(0), (1,)), r"argument 0 is \*float16, a read-only float16\[1\] given"),
    (1, 0, r"argument 1 is const\*float16, int 0 given"),
    (2, np.zeros(8, np.uint32)[1:], r"argument 2 is const\*align16, the uint32\[7\] given is not aligned to 16 bytes"),
    (3, 1.0, r"argument 3 is float32, float 1.0 given"),
    (3, np.float64(1), r"argument 3 is float32, float64 .* given"),
    (4, 1, "argument 4 is int32, int 1 given"),
    (4, np.zeros(1, np.int32), r"argument 4 is int32, int32\[1\] given"),
    (4, None, "argument 4 is int32, NoneType None given"),
    (5, np.int32(1), "argument 5 is int64, int32 .* given"),
    (6, np.int32(1), "argument 6 is bool, int32 .* given"),
])
def test_an_argument_of_another_type_is_refused(index: int, argument: Any, message: str) -> None:
    arguments = good_parameters()
    emulator().launch(FAULTS, "parameters<__half>", (1,), (32,), tuple(arguments))
    arguments[index] = argument
    with pytest.raises(TypeError, match=message):
        emulator().launch(FAULTS, "parameters<__half>", (1,), (32,), tuple(arguments))


def test_an_argument_too_few_is_refused() -> None:
    with pytest.raises(TypeError, match="parameters<__half> takes 8 arguments, 7 given"):
        emulator().launch(FAULTS, "parameters<__half>", (1,), (32,), tuple(good_parameters()[:-1]))


def test_what_no_spec_lists_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="decode<int> is not among the instances of the KernelSpec faults"):
        emulator().launch(FAULTS, "decode<int>", (1,), (32,), ())
    with pytest.raises(KeyError, match="unknown.cu belongs to no KernelSpec of this launcher"):
        emulator().launch("unknown.cu", "decode", (1,), (32,), ())


def test_more_threads_or_shared_memory_than_the_instance_says_are_refused() -> None:
    out = np.zeros(256, np.float32)
    with pytest.raises(ValueError, match="too_much_shared: 256 threads a block, its instance says 128"):
        emulator().launch(FAULTS, "too_much_shared", (1,), (256,), (out,), 2048)
    with pytest.raises(ValueError, match="too_much_shared: 5120 bytes of shared memory, its instance says 4096"):
        emulator().launch(FAULTS, "too_much_shared", (1,), (128,), (out,), 5120)
    with pytest.raises(EmulatorError, match="240000 bytes of shared memory, more than any device has"):
        emulator().launch(FAULTS, "too_much_shared", (1,), (128,), (out,), 240000)
    with pytest.raises(EmulatorError, match="a grid of 1 x 70000 x 1 blocks"):
        emulator().launch(FAULTS, "too_much_shared", (1, 70000), (32,), (out,), 512)


# ---- memory and graphs -----------------------------------------------------------------------------------------------

def test_new_memory_is_aligned_and_poisoned() -> None:
    launcher = emulator()
    for shape, dtype in (((3, 5), np.float32), ((7,), BF16), ((2, 0), np.int32), (1, np.uint8)):
        array = launcher.empty(shape, dtype)
        assert array.ctypes.data % 256 == 0 or array.size == 0
        assert array.tobytes() == b"\xff" * array.nbytes
        assert array.dtype == np.dtype(dtype)
        assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert not launcher.zeros((3, 5), BF16).any()
    assert launcher.empty_pinned(3, np.int32).tolist() == [-1, -1, -1]
    source = np.arange(6, dtype=np.int32)
    uploaded = launcher.upload(source)
    source[:] = 0
    np.testing.assert_array_equal(launcher.download(uploaded), np.arange(6))
    download, event = launcher.download_async(uploaded), launcher.record()
    uploaded[:] = 9
    event.wait()
    assert event.done
    assert download.done
    np.testing.assert_array_equal(download.get(), np.arange(6))


def test_memory_ends_and_comes_back() -> None:
    launcher = EmulatorLauncher(specs=[SPEC], memory_bytes=1000)
    array = launcher.empty(100, np.float32)
    assert launcher.free_bytes() == 600
    with pytest.raises(MemoryError, match="601 bytes, 600 are free"):
        launcher.empty(601, np.uint8)
    part = array[50:]
    del array
    assert launcher.free_bytes() == 600, "a view keeps its array"
    del part
    assert launcher.free_bytes() == 1000


def test_a_copy_or_product_of_other_types_or_layouts_is_refused() -> None:
    launcher = emulator()
    a, b = launcher.zeros((4, 4), np.float16), launcher.zeros((4, 4), BF16)
    for one, other in ((a, b), (a, b[:2]), (a, a.T)):
        with pytest.raises(TypeError, match="copy of"):
            launcher.copy(one, other)
        with pytest.raises(TypeError, match="must be one 16-bit type|a product is of"):
            launcher.matmul(one, other, one)
    with pytest.raises(ValueError, match=r"shapes \(4, 4\) x \(4, 4\)\^T -> \(2, 8\) do not fit"):
        launcher.matmul(a, a, a.reshape(2, 8))


def test_matmul_rounds_float32_sums_once_and_row_by_row() -> None:
    random = np.random.default_rng(0)
    launcher = emulator()
    for dtype in (BF16, np.dtype(np.float16)):
        x, weight = (random.standard_normal(shape).astype(dtype) for shape in ((5, 33), (7, 33)))
        out, row = launcher.empty((5, 7), dtype), launcher.empty((1, 7), dtype)
        launcher.matmul(x, weight, out)
        exact = x.astype(np.float64) @ weight.astype(np.float64).T
        np.testing.assert_allclose(out.astype(np.float64), exact, rtol=2**-7, atol=2**-8)
        launcher.matmul(x[3:4], weight, row)
        assert row.tobytes() == out[3:4].tobytes()


def test_a_graph_replays_launches_and_copies_on_what_the_arrays_hold_then() -> None:
    launcher = emulator()
    first, second, third = (launcher.zeros(64, np.float32) for _ in range(3))
    launcher.begin_capture()
    launcher.launch(FAULTS, "missing_barrier<false>", (1,), (64,), (second, first))
    launcher.copy(third, second)
    graph = launcher.end_capture()
    assert launcher.num_launches == 0
    assert not third.any()
    for add in (0, 5):
        launcher.write(first, floats(64) + np.float32(add))
        graph.launch()
        np.testing.assert_array_equal(third, floats(64)[::-1] + add)
    assert launcher.num_launches == 2


def test_a_capture_refuses_what_a_device_refuses() -> None:
    launcher = emulator()
    array = launcher.zeros(64, np.float32)
    half = launcher.zeros((1, 1), np.float16)
    launcher.begin_capture()
    for refused in (lambda: launcher.empty(1, np.float32), lambda: launcher.zeros(1, np.float32),
                    lambda: launcher.upload(array), lambda: launcher.write(array, array),
                    lambda: launcher.download(array), lambda: launcher.synchronize(),
                    lambda: launcher.matmul(half, half, half)):
        with pytest.raises(RuntimeError, match="during a capture"):
            refused()
    with pytest.raises(TypeError, match="takes 2 arguments"):
        launcher.launch(FAULTS, "missing_barrier<false>", (1,), (64,), (array,))
    launcher.end_capture().launch()
    launcher.synchronize()


def test_launches_of_several_threads_take_turns() -> None:
    launcher = emulator(2)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run(launcher, "last_block<0>"), range(100)))
    for result in results:
        np.testing.assert_array_equal(result, 3 * floats(64))


# ---- builds ----------------------------------------------------------------------------------------------------------

def test_a_build_is_kept_and_a_changed_source_is_another(tmp_path: Path) -> None:
    source = tmp_path / "scale.cu"
    text = '#include "common.cuh"\n__global__ void scale(float* x) { x[threadIdx.x] *= 2.0f; }\n'
    source.write_text(text)
    spec = KernelSpec("scale", str(source), (Instance("scale", 32, 32),), lambda **_: None, no_reference, ())
    first = build.library(source, "scale")
    written = first.stat().st_ctime_ns, first.stat().st_ino
    build.build_all([(source, "scale", PLAIN)] * 3)
    assert first.stat().st_ino == written[1]
    x = np.ones(32, np.float32)
    EmulatorLauncher(specs=[spec]).launch(str(source), "scale", (1,), (32,), (x,))
    assert (x == 2).all()
    source.write_text(text.replace("2.0f", "3.0f"))
    assert build.library(source, "scale") != first
    assert build.library(source, "scale", RACE) != build.library(source, "scale")


def test_what_does_not_compile_raises_the_compilers_words(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text('#include "common.cuh"\n__global__ void wrong(float* x) { x[0] = undeclared; }\n')
    with pytest.raises(RuntimeError, match=r"wrong.cu:2:\d+: error: .undeclared. was not declared"):
        build.library(source, "wrong")


def test_the_reason_is_told_where_kernels_cannot_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, reason in (("sys.platform", "darwin", "needs Linux on x86-64, this is darwin"),
                                ("platform.machine", lambda: "aarch64", "this is linux on aarch64"),
                                ("shutil.which", lambda name: None, r"needs g\+\+, which is not on the PATH")):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            build.unavailable.cache_clear()
            with pytest.raises(RuntimeError, match=reason):
                build.library(Path(FAULTS), "votes")
    build.unavailable.cache_clear()
    assert build.unavailable() is None
