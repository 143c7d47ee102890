"""CupyLauncher against a recording fake of CuPy: what it asks for, in which order, and who keeps which memory alive."""
from __future__ import annotations

import gc
import logging
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from cuda import cupy_launcher
from cuda.cupy_launcher import CupyLauncher
from cuda.kernels import signature
from cuda.launcher import DeviceLost, Launcher
from tests.cuda.fake_cupy import FakeCupy

SOURCE = """
template <typename T, int D>
__global__ void __launch_bounds__(128) scale(T* __restrict__ out, const T* __restrict__ x, const float* bias,
                                             float factor, int rows) {}
__global__ void touch(int* out) {}
"""
SCALE, TOUCH = "scale<float, 64>", "touch"


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(cupy_launcher, "source_text", lambda name: SOURCE)
    monkeypatch.setattr(signature, "source_text", lambda name: SOURCE)
    signature.signature.cache_clear()

    def scale(out: np.ndarray, x: np.ndarray, bias: object, factor: np.float32, rows: np.int32) -> None:
        out[...] = x * factor

    def touch(out: np.ndarray) -> None:
        out[...] += 1

    fake.kernels |= {SCALE: scale, TOUCH: touch}
    yield fake
    signature.signature.cache_clear()


@pytest.fixture
def launcher(cupy: FakeCupy) -> CupyLauncher:
    return CupyLauncher()


def scale(launcher: Launcher, out: object, x: object, factor: float, shared_bytes: int = 0) -> None:
    launcher.launch("scale.cu", SCALE, (1,), (64,), (out, x, None, np.float32(factor), np.int32(1)), shared_bytes)


def test_it_is_a_launcher(launcher: CupyLauncher) -> None:
    one: Launcher = launcher
    assert (one.name, one.num_multiprocessors, one.free_bytes()) == ("cuda:0 Fake GPU", 16, 1100)


# ---- Copies

@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, ml_dtypes.bfloat16])
def test_what_goes_up_comes_down(launcher: CupyLauncher, dtype: type) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    result = launcher.download(launcher.upload(array))
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(result, array)


def test_a_host_array_may_change_as_soon_as_it_is_written(launcher: CupyLauncher) -> None:
    array = np.arange(5, dtype=np.int32)
    device = launcher.empty(5, np.int32)
    launcher.write(device, array)
    array[:] = -1
    np.testing.assert_array_equal(launcher.download(device), np.arange(5))


def test_staging_memory_is_not_reused_before_its_copy_is_done(launcher: CupyLauncher, cupy: FakeCupy,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_launcher, "STAGING_BYTES", 64)
    arrays = [np.arange(i, i + 9, dtype=np.int32) for i in range(100)]     # 36 bytes: pieces straddle the buffers
    devices = [launcher.upload(array) for array in arrays]
    assert cupy.num_pinned_bytes == 64 * cupy_launcher.NUM_STAGING
    for array, device in zip(arrays, devices, strict=True):
        np.testing.assert_array_equal(launcher.download(device), array)


def test_what_is_larger_than_the_staging_memory_goes_up_in_pieces(launcher: CupyLauncher, cupy: FakeCupy,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_launcher, "STAGING_BYTES", 64)
    array = np.arange(1000, dtype=np.float32)
    np.testing.assert_array_equal(launcher.download(launcher.upload(array)), array)
    assert cupy.num_pinned_bytes == 64 * cupy_launcher.NUM_STAGING


def test_empty_arrays_are_copied_by_doing_nothing(launcher: CupyLauncher) -> None:
    device = launcher.upload(np.zeros((0, 3), np.float32))
    launcher.copy(device, launcher.zeros((0, 3), np.float32))
    assert launcher.download(device).shape == (0, 3)
    assert launcher.download_async(device).get().shape == (0, 3)


def test_a_view_of_a_larger_array_is_uploaded_as_it_reads(launcher: CupyLauncher) -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    np.testing.assert_array_equal(launcher.download(launcher.upload(array.T)), array.T)


def test_copies_want_one_type_one_size_and_no_gaps(launcher: CupyLauncher) -> None:
    four = launcher.zeros(4, np.float32)
    with pytest.raises(TypeError, match=r"copy of int32\[4\] into float32\[4\]"):
        launcher.copy(four, launcher.zeros(4, np.int32))
    with pytest.raises(TypeError, match=r"copy of float32\[3\] into float32\[4\]"):
        launcher.write(four, np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="contiguous"):
        launcher.copy(launcher.zeros(2, np.float32), four[::2])
    with pytest.raises(TypeError, match="contiguous"):
        launcher.download(four[::2])


def test_a_download_is_of_the_place_in_the_queue_where_it_was_asked_for(launcher: CupyLauncher,
                                                                        cupy: FakeCupy) -> None:
    device = launcher.upload(np.zeros(3, np.int32))
    before = launcher.download_async(device)
    launcher.launch("touch.cu", TOUCH, (1,), (1,), (device,))
    after = launcher.download_async(device)
    del device
    assert not before.done
    np.testing.assert_array_equal(before.get(), 0)
    assert before.done
    assert not after.done
    np.testing.assert_array_equal(after.get(), 1)


def test_a_download_can_be_waited_for_on_another_thread(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    download = launcher.download_async(launcher.upload(np.arange(3)))
    results = []

    def wait() -> None:
        cupy.current_device = None              # which is a thread's own
        results.append(download.get())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(results[0], np.arange(3))


def test_a_download_gives_its_pinned_memory_back(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    device = launcher.upload(np.arange(3))
    held = cupy.num_pinned_bytes
    download = launcher.download_async(device)
    assert cupy.num_pinned_bytes == held + 32
    result = download.get()
    assert cupy.num_pinned_bytes == held
    assert download.get() is result
    np.testing.assert_array_equal(result, np.arange(3))


def test_a_download_that_nobody_reads_gives_its_memory_back_after_its_copy(launcher: CupyLauncher,
                                                                           cupy: FakeCupy) -> None:
    device = launcher.upload(np.arange(3))
    held = cupy.num_pinned_bytes
    launcher.download_async(device)
    assert cupy.num_pinned_bytes == held
    launcher.synchronize()                      # a copy into memory that is given back would raise here


def test_an_event_is_passed_when_all_before_it_is_done(launcher: CupyLauncher) -> None:
    device = launcher.upload(np.zeros(3, np.int32))
    event = launcher.record()
    launcher.launch("touch.cu", TOUCH, (1,), (1,), (device,))
    later = launcher.record()
    assert not event.done
    event.wait()
    assert event.done
    assert not later.done


def test_pinned_memory_is_reached_by_copies_and_kernels(launcher: CupyLauncher) -> None:
    tier = launcher.empty_pinned((4, 3), np.int32)
    tier[...] = np.arange(12).reshape(4, 3)
    device = launcher.zeros(3, np.int32)
    launcher.copy(device, tier[2])
    launcher.launch("touch.cu", TOUCH, (1,), (1,), (device,))
    launcher.copy(tier[0], device)
    launcher.synchronize()
    np.testing.assert_array_equal(tier[0], [7, 8, 9])


def test_kernels_are_given_pinned_memory_by_its_address(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    given = []
    cupy.kernels[TOUCH] = given.append
    tier = launcher.empty_pinned((4, 3), np.int32)
    launcher.launch("touch.cu", TOUCH, (1,), (1,), (tier[1],))
    launcher.synchronize()
    assert given == [tier[1].ctypes.data]


def test_a_tier_takes_what_it_was_asked_for_and_no_more(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    tier = launcher.empty_pinned((5, 1000), np.uint8)
    assert (tier.shape, cupy.num_pinned_bytes) == ((5, 1000), 5000)


# ---- Launches

def test_kernels_run_in_order(launcher: CupyLauncher) -> None:
    x, out = launcher.upload(np.ones(4, np.float32)), launcher.empty(4, np.float32)
    scale(launcher, out, x, 3.0)
    scale(launcher, x, out, 2.0)
    np.testing.assert_array_equal(launcher.download(x), 6.0)


def test_an_instance_is_compiled_once(launcher: CupyLauncher, cupy: FakeCupy,
                                      caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "troupe.cuda")
    launcher.compile("scale.cu", [SCALE, TOUCH, SCALE])
    x = launcher.zeros(4, np.float32)
    scale(launcher, x, x, 1.0)
    assert cupy.modules == [[SCALE], [TOUCH]]
    assert f"kernel {SCALE}: ready after" in caplog.text
    launcher.launch("touch.cu", TOUCH, (1,), (1,), (launcher.zeros(1, np.int32),))
    assert cupy.modules == [[SCALE], [TOUCH], [TOUCH]]


def test_shared_memory_beyond_48_kib_is_asked_for_once(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    x = launcher.zeros(4, np.float32)
    for shared_bytes in (48 << 10, 64 << 10, 64 << 10, 50 << 10, 96 << 10, 96 << 10):
        scale(launcher, x, x, 1.0, shared_bytes)
    assert cupy.shared_requests == [(SCALE, 64 << 10), (SCALE, 96 << 10)]


@pytest.mark.parametrize(("arguments", "message"), [
    (lambda x: (x, x, None, np.float32(1)), "takes 5 arguments, 4 given"),
    (lambda x: (x, x, None, 1.0, np.int32(1)), r"factor \(float32\) is given float 1.0"),
    (lambda x: (x, x, None, np.float32(1), 1), r"rows \(int32\) is given int 1"),
    (lambda x: (x, x, None, np.float64(1), np.int32(1)), r"factor \(float32\) is given float64"),
    (lambda x: (x, x, None, np.float32(1), np.int64(1)), r"rows \(int32\) is given int64"),
    (lambda x: (x, x, None, None, np.int32(1)), r"factor \(float32\) is given NoneType None"),
    (lambda x: (x, x, None, x, np.int32(1)), r"factor \(float32\) is given FakeArray"),
    (lambda x: (x, x, np.float32(1), np.float32(1), np.int32(1)), r"bias \(float32\*\) is given float32"),
    (lambda x: (x, x, 4711, np.float32(1), np.int32(1)), r"bias \(float32\*\) is given int"),
    (lambda x: (x[::2], x, None, np.float32(1), np.int32(1)), r"out \(float32\*\) is given .* with strides \[8\]"),
    (lambda x: (np.zeros(4, np.float32), x, None, np.float32(1), np.int32(1)), r"float32\[4\] is in host memory"),
])
def test_arguments_are_held_against_the_kernels_parameters(launcher: CupyLauncher, arguments: object,
                                                           message: str) -> None:
    with pytest.raises(TypeError, match=message):
        launcher.launch("scale.cu", SCALE, (1,), (64,), arguments(launcher.zeros(4, np.float32)))


def test_an_array_of_another_type_is_refused(launcher: CupyLauncher) -> None:
    x = launcher.zeros(4, np.float16)
    with pytest.raises(TypeError, match=r"out \(float32\*\) is given float16\[4\]"):
        scale(launcher, x, x, 1.0)


def test_memory_that_does_not_fit_is_refused_with_its_size(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    cupy.room_bytes = 1000
    with pytest.raises(MemoryError, match="4,000 bytes"):
        launcher.empty(1000, np.float32)


# ---- cuBLAS

def test_a_product_is_x_times_the_weights_transpose(launcher: CupyLauncher) -> None:
    x = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    weight = np.arange(12).reshape(4, 3).astype(ml_dtypes.bfloat16)
    out = launcher.empty((2, 4), ml_dtypes.bfloat16)
    launcher.matmul(launcher.upload(x), launcher.upload(weight), out)
    np.testing.assert_array_equal(launcher.download(out), x @ weight.T)


@pytest.mark.parametrize(("x", "weight", "out", "error"), [
    (((2, 3), np.float16), ((4, 5), np.float16), ((2, 4), np.float16), ValueError),
    (((2, 3), np.float16), ((4, 3), np.float16), ((4, 2), np.float16), ValueError),
    (((2, 3), np.float16), ((4, 3), np.float16), ((2, 4), np.float32), TypeError),
    (((2, 3), np.float32), ((4, 3), np.float32), ((2, 4), np.float32), TypeError),
    (((2, 2, 3), np.float16), ((4, 3), np.float16), ((2, 4), np.float16), ValueError),
])
def test_products_that_cupy_would_convert_or_copy_are_refused(launcher: CupyLauncher, x: tuple, weight: tuple,
                                                              out: tuple, error: type[Exception]) -> None:
    with pytest.raises(error):
        launcher.matmul(launcher.zeros(*x), launcher.zeros(*weight), launcher.zeros(*out))


def test_a_weight_with_gaps_is_refused(launcher: CupyLauncher) -> None:
    weight = launcher.zeros((4, 6), np.float16)[:, ::2]
    with pytest.raises(TypeError, match="contiguous"):
        launcher.matmul(launcher.zeros((2, 3), np.float16), weight, launcher.zeros((2, 4), np.float16))


# ---- Graphs

def test_a_graph_runs_what_was_captured_each_time_it_is_launched(launcher: CupyLauncher) -> None:
    device = launcher.zeros(3, np.int32)
    total = launcher.zeros(3, np.int32)
    launcher.begin_capture()
    launcher.launch("touch.cu", TOUCH, (1,), (1,), (device,))
    launcher.copy(total, device)
    graph = launcher.end_capture()
    np.testing.assert_array_equal(launcher.download(total), 0)
    graph.launch()
    graph.launch()
    np.testing.assert_array_equal(launcher.download(total), 2)


def test_a_graph_keeps_its_arrays_alive(launcher: CupyLauncher) -> None:
    device, copy = launcher.zeros(3, np.int32), launcher.zeros(3, np.int32)
    pinned = launcher.empty_pinned(3, np.int32)
    launcher.begin_capture()
    launcher.launch("touch.cu", TOUCH, (1,), (1,), (device,))
    launcher.copy(copy, device)
    launcher.copy(pinned, copy)
    graph = launcher.end_capture()
    del device, copy
    gc.collect()
    graph.launch()
    launcher.synchronize()
    np.testing.assert_array_equal(pinned, 1)


def test_what_cannot_be_captured_says_so(launcher: CupyLauncher) -> None:
    device, host = launcher.zeros((2, 2), np.float16), np.zeros((2, 2), np.float16)
    launcher.begin_capture()
    graph = launcher.end_capture()
    launcher.begin_capture()
    for refused in (lambda: launcher.empty(1, np.int32), lambda: launcher.zeros(1, np.int32),
                    lambda: launcher.empty_pinned(1, np.int32), lambda: launcher.upload(host),
                    lambda: launcher.write(device, host), lambda: launcher.download(device),
                    lambda: launcher.download_async(device), lambda: launcher.matmul(device, device, device),
                    launcher.record, launcher.synchronize, launcher.begin_capture, graph.launch, launcher.close):
        with pytest.raises(RuntimeError, match="during a capture"):
            refused()
    launcher.end_capture()


def test_after_a_capture_all_is_allowed_again(launcher: CupyLauncher) -> None:
    launcher.begin_capture()
    launcher.end_capture()
    assert launcher.download(launcher.zeros(2, np.int32)).tolist() == [0, 0]


# ---- Ends

def test_a_broken_context_is_a_lost_device(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    device = launcher.zeros(3, np.int32)
    cupy.status = 700, "cudaErrorIllegalAddress"
    for broken in (lambda: launcher.launch("touch.cu", TOUCH, (1,), (1,), (device,)), launcher.synchronize,
                   lambda: launcher.download(device), lambda: launcher.empty(3, np.int32), launcher.record,
                   lambda: launcher.download_async(device), lambda: launcher.empty_pinned(3, np.int32)):
        with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"):
            broken()


def test_host_memory_that_cannot_be_pinned_is_told_as_memory(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    cupy.status = 2, "cudaErrorMemoryAllocation"
    with pytest.raises(MemoryError, match="cudaErrorMemoryAllocation"):
        launcher.empty_pinned(3, np.int32)


def test_another_error_of_the_driver_is_no_lost_device(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    cupy.status = 1, "cudaErrorInvalidValue"
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue") as raised:
        launcher.synchronize()
    assert not isinstance(raised.value, DeviceLost)


def test_close_gives_the_pinned_memory_back(launcher: CupyLauncher, cupy: FakeCupy) -> None:
    launcher.upload(np.arange(3))
    launcher.empty_pinned(3, np.int32)
    launcher.close()
    gc.collect()
    assert cupy.num_pinned_bytes == 0
