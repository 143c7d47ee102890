"""All of tools.gpu_check and tools.precompile through the emulator, at little sizes; the times mean nothing here."""
from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda import cupy_launcher
from cuda.devices import NoGpu, usable_gpu
from cuda.kernels import rms_norm, take_rows
from cuda.kernels.kernel_spec import KernelSpec
from cuda.launcher import DeviceLost
from tests.cuda.emulated_cupy import EmulatedCupy
from tests.cuda_emulator.build import unavailable
from tests.cuda_emulator.launcher import EmulatorLauncher
from tools import gpu_check, gpu_compile, precompile
from tools.gpu_check import Plan, finish
from tools.gpu_measure import Sizes, random_weight
from tools.gpu_models import ModelSizes, random_model
from tools.gpu_report import Report
from weights.quant import Dense
from weights.rope import rope_spec
from weights.spec import LayerSpec, ModelSpec

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

TINY = ModelSpec("llama", hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=64, vocab_size=128,
                 max_position=512, norm_eps=1e-5, attention_scale=32**-0.5,
                 layers=(LayerSpec(None, rope_spec(32, 512, {"rope_theta": 1e4})),) * 2)
LITTLE = Sizes(target_s=0.0, num_launches=3, graph_nodes=2, copy_bytes=1 << 12, bus_bytes=1 << 10, cache_bytes=1,
               matrix=32, heads=(4, 2, 32), batches=(1, 2), contexts=(20,), prefills=(20,), projections=((32, 64),),
               rows=(1, 9), cublas_rows=(2,), vocab=100, sampled_rows=(2,), lookups=(1, 3), lookup_tokens=70)
LITTLE_MODEL = ModelSizes(prompt=5, answer=3, batches=(1, 2), context=20, steps=2, prefill=12,
                          targets_ms=((1, 1e9), (2, 0.0)))


def broken(spec: KernelSpec) -> KernelSpec:
    """With a reference that its kernel does not follow."""
    def reference(**arguments: Any) -> dict[str, Any]:
        return {name: array + 1 for name, array in spec.reference(**arguments).items()}

    return KernelSpec(spec.name, spec.source, spec.instances, spec.run, reference, spec.outputs, spec.in_place,
                      spec.cases[:1], spec.tolerance)


def one_case(spec: KernelSpec) -> KernelSpec:
    return KernelSpec(spec.name, spec.source, spec.instances, spec.run, spec.reference, spec.outputs, spec.in_place,
                      spec.cases[:1], spec.tolerance)


def plan(*specs: KernelSpec) -> Plan:
    return Plan(specs=specs, large_cases=False, model=(TINY, random_model(TINY)), steps_of=TINY, sizes=LITTLE,
                model_sizes=LITTLE_MODEL)


@pytest.fixture
def report() -> Report:
    return Report(5, io.StringIO())


def test_every_part_runs_and_is_reported(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    little = plan(one_case(rms_norm.SPEC), one_case(take_rows.SPEC))
    code = finish(EmulatorLauncher(), little, report, ["--minutes", "5"], path)
    wrong = [row for row in report.rows if row.is_wrong]
    assert (code, wrong) == (0, [])
    document = json.loads(path.read_text())
    assert document["device"] == "emulator"
    assert document["command"] == "python -m tools.gpu_check --minutes 5"
    parts = list(dict.fromkeys(row["part"] for row in document["rows"]))
    assert parts == ["kernels", "greedy tokens", "launches", "ceilings", "decode attention", "prefill attention",
                     "skinny GEMM", "cuBLAS", "sampling", "prefix lookup", "model of 2 layers of 64"]
    assert {row.verdict for row in report.rows} <= {"", "ok", "below target"}
    assert [row.verdict for row in report.rows if row.what.startswith("decode step")] == ["ok", "below target"]
    assert f"{len(report.rows)} rows, 0 wrong" in capsys.readouterr().out


def test_all_of_it_is_what_cupy_and_cuda_allow(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", EmulatedCupy())
    launcher = cupy_launcher.CupyLauncher()
    assert finish(launcher, plan(one_case(rms_norm.SPEC)), report, [], None) == 0, report.document()
    precompile.run_every_step(launcher, TINY, random_model(TINY), kv_dtype="int8")
    launcher.close()


def test_a_kernel_that_differs_is_a_mismatch_and_the_rest_goes_on(report: Report) -> None:
    little = plan(broken(take_rows.SPEC), one_case(rms_norm.SPEC))
    assert finish(EmulatorLauncher(), little, report, [], None) == 1
    assert [row.verdict for row in report.rows if row.part == "kernels"] == ["MISMATCH", "ok"]
    assert report.rows[-1].part.startswith("model of")


def test_a_model_whose_tokens_differ_is_a_mismatch(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import gpu_models

    def another_answer(*arguments: Any) -> Any:
        tokens, logits = reference_answer(*arguments)
        worst = [int(row.argmin()) for row in logits]
        return [tokens[0], worst[1], tokens[2]], [row if i != 1 else -row for i, row in enumerate(logits)]

    reference_answer = gpu_models._reference_answer
    monkeypatch.setattr(gpu_models, "_reference_answer", another_answer)
    with pytest.raises(AssertionError, match="token 1 is .* rounding explains"):
        gpu_models.check_greedy_tokens(EmulatorLauncher(), TINY, random_model(TINY), LITTLE_MODEL, report)


def test_a_second_best_token_within_rounding_is_a_tie(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import gpu_models

    def another_answer(*arguments: Any) -> Any:
        tokens, logits = reference_answer(*arguments)
        other = (tokens[1] + 1) % TINY.vocab_size
        logits[1][other] = logits[1][tokens[1]]
        return [tokens[0], other], logits

    reference_answer = gpu_models._reference_answer
    monkeypatch.setattr(gpu_models, "_reference_answer", another_answer)
    sizes = ModelSizes(prompt=5, answer=2)
    gpu_models.check_greedy_tokens(EmulatorLauncher(), TINY, random_model(TINY), sizes, report)
    assert report.rows[-1].figures["ties"] == 1


def test_a_seeded_model_has_no_two_tokens_alike() -> None:
    """Else each best token would be tied with others, and none of them wrong."""
    weight = random_weight("bf16", 1 << 15, 64)
    assert isinstance(weight, Dense)
    assert len({row.tobytes() for row in weight.data}) == 1 << 15


def test_what_the_minutes_do_not_allow_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(0, io.StringIO())
    assert finish(EmulatorLauncher(), plan(one_case(rms_norm.SPEC)), report, [], None) == 1, "nothing is proven"
    assert {row.verdict for row in report.rows} == {"not measured"}
    assert f"{len(report.rows)} rows, 0 wrong, {len(report.rows)} not measured" in capsys.readouterr().out


def test_an_exception_is_a_row(report: Report) -> None:
    def fail() -> None:
        raise ValueError("no such\nshape")

    report.attempt("cuBLAS", "M 1", fail)
    assert (report.rows[0].verdict, report.rows[0].figures) == ("FAILED", {"message": "ValueError: no such shape"})
    assert report.num_wrong == 1


def test_what_does_not_fit_into_a_small_gpu_is_not_measured(report: Report) -> None:
    def fail() -> None:
        raise MemoryError("Out of memory allocating 1,024 bytes")

    report.attempt("steps", "of a large model", fail)
    assert (report.rows[0].verdict, report.num_wrong) == ("not measured", 0)


def test_a_lost_device_ends_the_run_and_the_document_is_written(report: Report, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*arguments: Any) -> None:
        raise DeviceLost("cudaErrorIllegalAddress")

    monkeypatch.setattr(gpu_check, "run_case", lose)
    code = finish(EmulatorLauncher(), plan(one_case(rms_norm.SPEC)), report, [], tmp_path / "rows.json")
    assert code == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["verdict"], row["message"]) for row in rows] == [("FAILED", "cudaErrorIllegalAddress")]


def test_rows_are_written_as_they_come() -> None:
    out = io.StringIO()
    report = Report(5, out)
    report.add("copies", "of 1 MiB", ms=1.5, gb_per_s=2000.0)
    assert out.getvalue() == "\ncopies\n  " + "of 1 MiB".ljust(64) + " " * 14 + "1.500 ms  2000 GB/s\n"
    report.add_share("copies", "of 2 MiB", 0.5, 0.8, us=3.0)
    assert out.getvalue().splitlines()[-1].split("   ")[-1].strip() == "below target 3.00 us  50 %  (wanted: 80 %)"


@pytest.mark.parametrize("tool", [gpu_check, precompile])
def test_without_a_gpu_one_line_says_what_is_missing(tool: Any, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    def unusable() -> None:
        raise NoGpu("no NVIDIA driver is installed")

    monkeypatch.setattr(tool, "usable_gpu", unusable)
    assert tool.run([]) == 1
    name = tool.__name__.rpartition(".")[2]
    assert capsys.readouterr().err == f"{name}: no NVIDIA driver is installed\n"


def test_gpu_check_needs_no_server_packages() -> None:
    code = ("import sys, tools.gpu_check; "
            "print([name for name in ('starlette', 'uvicorn', 'pydantic', 'tokenizers', 'huggingface_hub', 'jinja2', "
            "'cupy', 'actors', 'api') if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# ---- precompile

def test_a_models_kernels_are_compiled_by_running_each_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()

    class Recording(EmulatorLauncher):
        def launch(self, source: str, entry: str, *arguments: Any, **named: Any) -> None:
            launched.add(entry.partition("<")[0])
            super().launch(source, entry, *arguments, **named)

    precompile.run_every_step(Recording(), TINY, random_model(TINY))
    assert launched >= {"embed_dense", "rms_norm", "rope_store_kv", "decode_attention", "prefill_attention", "sample",
                        "skinny_gemm", "tile_gemm", "take_rows", "step_rows", "copy_blocks", "fill_blocks",
                        "clear_table", "insert_all", "apply_changes", "look_up"}


def test_layers_that_need_the_same_kernels_are_run_once() -> None:
    spec, weights = precompile._one_layer_of_each(TINY, random_model(TINY))
    assert (spec.num_layers, len(weights.layers)) == (1, 1)


def test_a_launcher_is_made_once_and_compiles_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, list[str]]] = []

    class Launcher:
        def __init__(self) -> None:
            self.compile = lambda source, entries: compiled.append((source, entries))

    monkeypatch.setattr(cupy_launcher, "CupyLauncher", Launcher)
    monkeypatch.setattr(gpu_compile, "_launcher", None)
    for source, entry in gpu_compile.all_instances()[:2]:
        assert gpu_compile._compile(source, entry) >= 0
    assert compiled == [(source, [entry]) for source, entry in gpu_compile.all_instances()[:2]]


def test_what_a_worker_raises_is_raised() -> None:
    try:
        usable_gpu()
    except NoGpu:
        with pytest.raises((RuntimeError, ModuleNotFoundError)):
            gpu_compile.compile_instances(gpu_compile.all_instances()[:1], 1)
    else:
        assert gpu_compile.compile_instances(gpu_compile.all_instances()[:1], 1) == 1


def test_all_instances_are_of_files_that_exist() -> None:
    folder = Path(precompile.__file__).parent.parent / "cuda" / "kernels"
    assert all((folder / source).exists() for source, _ in gpu_compile.all_instances())
