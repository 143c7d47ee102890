"""Is the CUDA back end right on this GPU, and how fast? One table.

All kernel cases against their references, a whole model's greedy tokens, then copies, launches, kernels and steps
beside what the device could do. Rows are written as they are measured; what the minutes do not allow is told. Needs no
network. The exit code is 1 if anything is wrong; a missed target is told, and is not wrong.
"""
from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cuda.devices import NoGpu, usable_gpu
from cuda.kernels.kernel_spec import Case, KernelSpec
from cuda.kernels.registry import KERNELS
from cuda.kernels.run_case import run_case
from cuda.kernels.types import BF16
from cuda.launcher import DeviceLost, Launcher
from tools import gpu_measure
from tools.gpu_compile import all_instances, compile_instances
from tools.gpu_measure import SKINNY_TARGETS, Ceilings, Sizes
from tools.gpu_models import (
    DEFAULT_SHAPE,
    LLAMA_3_8B,
    ModelSizes,
    check_greedy_tokens,
    measure_steps,
    random_model,
)
from tools.gpu_report import Report
from tools.json_report import check_report_path, write_report
from weights.load import ModelWeights, open_model
from weights.spec import ModelSpec

STORED: dict[str, Any] = {"bf16": BF16, "int8": np.int8, "fp8": np.uint8}       # of keys and values


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is checked and measured. The defaults are for a GPU; tests take little ones."""
    specs: Sequence[KernelSpec] = KERNELS
    large_cases: bool = True
    model: tuple[ModelSpec, ModelWeights] | None = None     # None: the default's shape, seeded
    steps_of: ModelSpec = LLAMA_3_8B
    sizes: Sizes = field(default_factory=Sizes)
    model_sizes: ModelSizes = field(default_factory=ModelSizes)


def check(launcher: Launcher, plan: Plan, report: Report) -> None:
    """All parts, in this order, as far as the time allows. Raises: DeviceLost"""
    for spec in plan.specs:
        for case in spec.cases:
            if plan.large_cases or not case.large:
                report.attempt("kernels", f"{spec.name}: {case.name}",
                               partial(_check_case, launcher, spec, case, report))

    def greedy() -> None:
        spec, weights = plan.model or (DEFAULT_SHAPE, random_model(DEFAULT_SHAPE))
        check_greedy_tokens(launcher, spec, weights, plan.model_sizes, report)

    report.attempt("greedy tokens", "as the reference's", greedy)
    gc.collect()
    sizes, ceilings = plan.sizes, Ceilings()
    report.attempt("launches", "of kernels and graphs", partial(gpu_measure.measure_launches, launcher, sizes, report))
    report.attempt("ceilings", "copies and products",
                   partial(gpu_measure.measure_ceilings, launcher, sizes, report, ceilings))
    if not ceilings.flops_per_s:
        report.add("speed", "all shares", "not measured", message="the ceilings are not known")
        return
    _measure_attention(launcher, sizes, report, ceilings)
    for kind in SKINNY_TARGETS:
        for shape in sizes.projections:
            report.attempt("skinny GEMM", f"N {shape[0]}, K {shape[1]}, {kind}", partial(
                gpu_measure.measure_skinny_gemm, launcher, sizes, report, ceilings, kind, shape))
    for shape in sizes.projections:
        report.attempt("cuBLAS", f"N {shape[0]}, K {shape[1]}", partial(
            gpu_measure.measure_cublas, launcher, sizes, report, ceilings, shape))
    for num_rows in sizes.sampled_rows:
        report.attempt("sampling", f"{num_rows} rows", partial(
            gpu_measure.measure_sampling, launcher, sizes, report, ceilings, num_rows))
    for num_requests in sizes.lookups:
        report.attempt("prefix lookup", f"of {num_requests}", partial(
            gpu_measure.measure_prefix_lookup, launcher, sizes, report, num_requests))
    report.attempt(f"model of {plan.steps_of.num_layers} layers of {plan.steps_of.hidden_size}", "steps", partial(
        measure_steps, launcher, plan.steps_of, plan.model_sizes, report, ceilings))


def _check_case(launcher: Launcher, spec: KernelSpec, case: Case, report: Report) -> None:
    result = run_case(spec, case, launcher)
    report.add("kernels", f"{spec.name}: {case.name}", "ok", error=result.error, tolerance=spec.tolerance)


def _measure_attention(launcher: Launcher, sizes: Sizes, report: Report, ceilings: Ceilings) -> None:
    _, kv_heads, head_dim = sizes.heads
    for kv, stored in STORED.items():
        token_bytes = 2 * kv_heads * head_dim * np.dtype(stored).itemsize
        for context in sizes.contexts:
            for batch in sizes.batches:
                if batch * context * token_bytes <= sizes.most_kv_bytes:
                    report.attempt("decode attention", f"batch {batch}, context {context}, {kv}", partial(
                        gpu_measure.measure_decode_attention, launcher, sizes, report, ceilings, batch, context, kv,
                        stored))
    for num_tokens in sizes.prefills:
        report.attempt("prefill attention", f"{num_tokens} tokens", partial(
            gpu_measure.measure_prefill_attention, launcher, sizes, report, ceilings, num_tokens))


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def run(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=_minutes, default=5.0, help="after which nothing more is begun (default: 5)")
    parser.add_argument("--model", type=Path, metavar="PATH",
                        help="a .gguf file or a folder, for the greedy tokens (default: a seeded model of the default "
                             "model's shape)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        check_report_path(args.json)
        gpu = usable_gpu()
        model = None
        if args.model is not None:
            file = open_model(args.model)
            model = file.spec, file.weights()
    except (NoGpu, OSError, ValueError) as error:
        print(f"gpu_check: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    from cuda.cupy_launcher import CupyLauncher

    report = Report(args.minutes)
    launcher = CupyLauncher()
    print(f"{launcher.name}: {gpu}", flush=True)
    report.attempt("compiler", "all instances", partial(_compile, report))
    return finish(launcher, Plan(model=model), report, argv, args.json)


def _compile(report: Report) -> None:
    begin_s = time.perf_counter()
    count = compile_instances(all_instances(), min(8, os.cpu_count() or 1))
    report.add("compiler", f"{count} instances, made or found in CuPy's cache", "ok", s=time.perf_counter() - begin_s)


def finish(launcher: Launcher, plan: Plan, report: Report, argv: Sequence[str], json_path: Path | None) -> int:
    """Runs the plan; the summary, the JSON document, the exit code."""
    try:
        check(launcher, plan, report)
    except DeviceLost as error:
        print(f"\nthe device is lost: {error}")
    missing = sum(row.verdict == "not measured" for row in report.rows)
    print(f"\n{len(report.rows)} rows, {report.num_wrong} wrong"
          + (f", {missing} not measured" if missing else ""), flush=True)
    if json_path is not None:
        write_report(json_path, "gpu_check", argv, {"device": launcher.name, "rows": report.document()})
    # Speed may be left out for want of time, proof may not.
    unproven = sum(row.verdict == "not measured" and row.part in ("kernels", "greedy tokens") for row in report.rows)
    if unproven:
        print(f"{unproven} checks had no time: more --minutes")
    return 1 if report.num_wrong or unproven else 0


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
