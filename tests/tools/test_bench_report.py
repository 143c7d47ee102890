from __future__ import annotations

import math

import pytest

from tools.bench_report import (
    RequestRecord,
    compute_metrics,
    console_block,
    is_good,
    parse_goodput,
    peak_concurrency,
    peak_outputs_per_s,
)

# Two requests that answer and one that fails. By hand:
#   A: sent 10.0, outputs at 10.5 10.6 10.8, end 10.8, 4 tokens (one output brought two)
#      TTFT 500, ITL 100 200, E2EL 800, TPOT (800 - 500) / 3 = 100
#   B: sent 10.2, output at 11.2, end 11.3, 1 token: TTFT 1000, no ITL, E2EL 1100, no TPOT
A = RequestRecord(10.0, [10.5, 10.6, 10.8], 10.8, num_input_tokens=100, num_output_tokens=4)
B = RequestRecord(10.2, [11.2], 11.3, num_input_tokens=50, num_output_tokens=1)
FAILED = RequestRecord(10.0, [10.1], 10.1, num_input_tokens=1000, num_output_tokens=1, error="HTTP 500: no")


def test_one_request() -> None:
    assert A.ttft_s == pytest.approx(0.5)
    assert A.itls_s == pytest.approx([0.1, 0.2])
    assert A.e2el_s == pytest.approx(0.8)
    assert A.tpot_s == pytest.approx(0.1)
    assert B.tpot_s is None
    assert B.itls_s == []


def test_an_answer_without_outputs_has_its_end_as_its_first_output() -> None:
    assert RequestRecord(1.0, [], 3.0).ttft_s == 2.0


def test_metrics_by_hand() -> None:
    metrics = compute_metrics([A, FAILED, B], 2.0, {})
    expected = {
        "duration": 2.0, "completed": 2, "failed": 1, "total_input_tokens": 150, "total_output_tokens": 5,
        "request_throughput": 1.0, "request_goodput": None, "output_throughput": 2.5, "total_token_throughput": 77.5,
        "max_output_tokens_per_s": 3.0, "max_concurrent_requests": 2, "rtfx": 0.0,
        "mean_ttft_ms": 750, "median_ttft_ms": 750, "std_ttft_ms": 250, "p99_ttft_ms": 995,     # 500 + 0.99 * 500
        "mean_tpot_ms": 100, "median_tpot_ms": 100, "std_tpot_ms": 0, "p99_tpot_ms": 100,
        "mean_itl_ms": 150, "median_itl_ms": 150, "std_itl_ms": 50, "p99_itl_ms": 199,          # 100 + 0.99 * 100
        "mean_e2el_ms": 950, "median_e2el_ms": 950, "std_e2el_ms": 150, "p99_e2el_ms": 1097,    # 800 + 0.99 * 300
    }
    assert metrics == {key: pytest.approx(value) if value is not None else None for key, value in expected.items()}


def test_percentiles_interpolate_linearly() -> None:
    records = [RequestRecord(0.0, [ttft], ttft, 1, 1) for ttft in (0.004, 0.001, 0.002, 0.003)]
    metrics = compute_metrics(records, 1.0, {})
    # Position 0.99 * 3 = 2.97 in 1 2 3 4: 3 + 0.97. The median lies between 2 and 3.
    assert metrics["p99_ttft_ms"] == pytest.approx(3.97)
    assert metrics["median_ttft_ms"] == pytest.approx(2.5)


def test_nothing_succeeded() -> None:
    metrics = compute_metrics([FAILED], 2.0, {"ttft": 1.0})
    assert (metrics["completed"], metrics["failed"], metrics["mean_ttft_ms"], metrics["p99_itl_ms"]) == (0, 1, 0.0, 0.0)
    assert (metrics["request_goodput"], metrics["max_concurrent_requests"]) == (0.0, 0)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("limits", "num_good"), [
    ({"ttft": 500.0}, 1),
    ({"ttft": 499.0}, 0),
    ({"ttft": 1000.0}, 2),
    ({"tpot": 80.0}, 1),                    # B has no TPOT: it counts as 0
    ({"tpot": 0.0}, 1),
    ({"ttft": 1000.0, "tpot": 101.0, "e2el": 900.0}, 1),
    ({"e2el": 1101.0}, 2),
])
def test_goodput(limits: dict[str, float], num_good: int) -> None:
    # The clock's own rounding must not decide: the limits that are met exactly use exact times.
    a = RequestRecord(10.0, [10.5, 10.625, 10.75], 10.75, num_output_tokens=4)
    b = RequestRecord(10.25, [11.25], 11.3125, num_output_tokens=1)
    assert sum(is_good(record, limits) for record in (a, b)) == num_good
    assert compute_metrics([a, b, FAILED], 4.0, limits)["request_goodput"] == num_good / 4


def test_goodput_arguments() -> None:
    assert parse_goodput(["ttft:500", "e2el:1.5"]) == {"ttft": 500.0, "e2el": 1.5}
    assert parse_goodput([]) == {}
    for bad in ("ttft", "itl:5", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", ":5", "TTFT:5"):
        with pytest.raises(ValueError, match="--goodput"):
            parse_goodput([bad])


def test_peaks() -> None:
    # Ends at 2 as another starts at 2: never two at once. The third overlaps both.
    records = [RequestRecord(1.0, [], 2.0), RequestRecord(2.0, [], 3.0), RequestRecord(1.5, [], 2.5)]
    assert peak_concurrency(records[:2]) == 1
    assert peak_concurrency(records) == 2
    # Seconds are counted from the first start, 0.5: outputs at 0.6 1.4 | 1.6 1.7 2.4 | 2.5
    records = [RequestRecord(0.5, [0.6, 1.4, 1.6], 1.6), RequestRecord(1.0, [1.7, 2.4, 2.5], 2.5)]
    assert peak_outputs_per_s(records) == 3.0
    assert peak_outputs_per_s([RequestRecord(0.5, [], 1.0)]) == 0.0


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     2         
Failed requests:                         1         
Maximum request concurrency:             8         
Request rate configured (RPS):           4.00      
Benchmark duration (s):                  2.00      
Total input tokens:                      150       
Total generated tokens:                  5         
Request throughput (req/s):              1.00      
Request goodput (req/s):                 0.50      
Output token throughput (tok/s):         2.50      
Peak output token throughput (tok/s):    3.00      
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          77.50     
---------------Time to First Token----------------
Mean TTFT (ms):                          750.00    
Median TTFT (ms):                        750.00    
P99 TTFT (ms):                           995.00    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          100.00    
Median TPOT (ms):                        100.00    
P99 TPOT (ms):                           100.00    
---------------Inter-token Latency----------------
Mean ITL (ms):                           150.00    
Median ITL (ms):                         150.00    
P99 ITL (ms):                            199.00    
----------------End-to-end Latency----------------
Mean E2EL (ms):                          950.00    
Median E2EL (ms):                        950.00    
P99 E2EL (ms):                           1097.00   
=================================================="""


def test_the_block_is_vllms() -> None:
    metrics = compute_metrics([A, FAILED, B], 2.0, {"e2el": 900.0})
    assert console_block(metrics, concurrency=8, request_rate=4.0).splitlines() == BLOCK.splitlines()


def test_lines_that_do_not_apply_are_left_out() -> None:
    block = console_block(compute_metrics([A], 2.0, {}), concurrency=None, request_rate=math.inf)
    for absent in ("Maximum request concurrency", "Request rate configured", "goodput"):
        assert absent not in block
