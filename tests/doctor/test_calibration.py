"""The hardware file of this machine: measured, written, and read by the next plan."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright import PlanError
from meshwright.cli import main
from meshwright.comm import connect
from meshwright.planner import Hardware, load_hardware
from meshwright.testing import Ranks
from support.internals.doctor import calibration, rates
from support.internals.planner import Constants, calibrated_file, this_machine

MODEL = "layers = 4\nhidden = 256\nheads = 4\nffn = 1024\nvocab = 256\nseq = 128\n"
MEASURED = {
    "bfloat16": 2e10,
    "float32": 5e10,
    "memory": 8e9,
    "links": 1e9,
    "half_size": 25.0,
    "launch": 4e-6,
    "latency": 3e-4,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.toml").write_text(MODEL)
    return str(tmp_path / "model.toml")


def measured() -> dict[str, float]:
    return rates(connect(), 0.3)


def test_all_ranks_measure_the_same_rates(ranks: Ranks) -> None:
    first, second = ranks(2, measured)
    assert first.keys() == second.keys() == MEASURED.keys()
    # Rates of products and times are those of the slowest rank; what is subtracted is, too.
    assert first == second
    assert all(value >= 0 for value in first.values())
    assert 1e7 < first["float32"] < 1e14
    assert 1e7 < first["memory"] < 1e13


def test_the_next_plan_reads_what_was_measured(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    asked: list[tuple[object, ...]] = []

    def answer(*of: object) -> Mapping[str, float]:
        asked.append(of)
        return MEASURED

    monkeypatch.setattr(calibration, "answer_of", answer)
    monkeypatch.setattr(calibration.torch.cuda, "device_count", lambda: 0)
    words = ["plan", model, "--gpus", "2", "--batch", "8"]
    assert main(words) == 0
    assert " h100, " in capsys.readouterr().out
    assert main(["plan", "--calibrate", "--seconds", "1.5"]) == 0
    assert asked[0][1:] == ("cpu", "1.5")
    written = capsys.readouterr().out
    file = cache / "meshwright" / "hardware.toml"
    assert calibrated_file() == file and str(file) in written
    found = load_hardware(str(file))
    assert found.matmul_fp32_tflops == pytest.approx(0.05)
    assert found.constants.latency == 3e-4
    assert found.constants.contention == Constants().contention  # what is not measured
    assert (found.peak(4), found.peak(2)) == (pytest.approx(5e10), pytest.approx(2e10))
    assert this_machine("cpu") == found
    assert main(words) == 0
    by_default = capsys.readouterr().out
    assert " cpu, " in by_default
    assert main([*words, "--hardware", str(file)]) == 0
    assert capsys.readouterr().out == by_default
    # What was measured is used: steps are slower where collectives are.
    slow = file.read_text().replace("latency = 0.0003", "latency = 0.3")
    (cache / "slow.toml").write_text(slow)
    assert main([*words, "--hardware", str(cache / "slow.toml")]) == 0
    assert step_seconds(capsys.readouterr().out) > step_seconds(by_default) + 0.04


def step_seconds(printed: str) -> float:
    found = re.search(r"^# (\S+) s a step", printed, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_gpu_is_found_by_its_name() -> None:
    for name, shipped in (
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
    ):
        found = this_machine(name)
        assert found is not None and found.name == shipped
    for name in ("cpu", "NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"):
        assert this_machine(name) is None


@pytest.mark.parametrize(
    ("major", "generation"), [(7, "ampere"), (8, "ampere"), (9, "hopper"), (10, "blackwell")]
)
def test_older_gpus_count_as_the_oldest_generation(
    major: int, generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = SimpleNamespace(
        name="NVIDIA Mine", total_memory=2**34, multi_processor_count=40, major=major
    )
    monkeypatch.setattr(calibration, "answer_of", lambda *_: MEASURED)
    monkeypatch.setattr(calibration.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(calibration.torch.cuda, "get_device_properties", lambda _: about)
    assert calibration.calibrate(1.0).generation == generation


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--seconds", "0"], "--seconds: expected"),
        (["--seconds", "nan"], "--seconds: expected"),
        (["--write", "machine.json"], "--write: expected a .toml"),
    ],
)
def test_calibrate_refuses(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--calibrate", *words]) == 2
    printed = capsys.readouterr().err
    assert problem in printed and len(printed.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "launch = -1.0",
        "lunch = 1.0",
        "launch = nan",
        "latency = 1e308",
        "links = 0",
        "exchange = 5",
        "product_ampere = 0",
        "data_overlap = 5",
        "contention = 0.5",
        "scores = 1e9",
    ],
)
def test_a_wrong_constant_is_one_line(line: str, tmp_path: Path) -> None:
    sizes = "memory_gib peak_tflops matmul_tflops memory_gbps intra_gbps inter_gbps"
    text = "".join(f"{name} = 1.0\n" for name in sizes.split())
    (tmp_path / "wrong.toml").write_text(f"name = 'mine'\n{text}[constants]\n{line}\n")
    with pytest.raises(PlanError, match=line.split()[0]) as error:
        load_hardware(str(tmp_path / "wrong.toml"))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.slow
def test_this_machine_is_measured_in_time(tmp_path: Path) -> None:
    start = time.monotonic()
    file = tmp_path / "here.toml"
    assert main(["plan", "--calibrate", "--seconds", "2", "--write", str(file)]) == 0
    assert time.monotonic() - start < 90
    assert isinstance(load_hardware(str(file)), Hardware)
