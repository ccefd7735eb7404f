from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import claim, latest, verify
from meshwright.comm import connect
from meshwright.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointWriteError,
    MeshwrightError,
    PlanError,
    ScheduleError,
)
from meshwright.report import read_chrome_trace, read_metrics
from meshwright.report import read_run as report_of
from meshwright.testing import Ranks
from support.checkpoint.jobs import job
from support.internals.recipes import RunOutcome, train
from support.recipes.runs import (
    FailingTracker,
    losses,
    read_run,
    run_tiny,
    saved_tensors,
    stop_in_step,
)

TRACKED = 'run.trackers=["support.recipes.runs:FailingTracker"]'
TWO = "axes.replicate=2"


def refusal(folder: Path, *overrides: str) -> tuple[str, str]:
    """Type and message of the error with which a run ends on this rank."""
    try:
        run_tiny(folder, *overrides)
    except MeshwrightError as error:
        return type(error).__name__, str(error)
    return "", ""


# ------------------------------------------------------------------------------------ a run


def test_a_run_leaves_metrics_checkpoint_summary_and_trace(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, run_tiny, tmp_path, TWO, "train.accumulate=2", "run.validate_every=3")
    folder = tmp_path / "run"
    assert first.is_finished
    assert first.loss == second.loss
    assert first.validation_loss == second.validation_loss
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert verify(folder / "checkpoints" / "step_00000006").step == 6
    assert json.loads((folder / "summary.json").read_text())["step"] == 6
    assert read_run(tmp_path).model.dim == 16
    assert "validation_loss" in (folder / "metrics.jsonl").read_text()


def run_large_on_rank_1(folder: Path) -> RunOutcome:
    if connect().rank == 1:
        torch.ones(2**26)  # 256 MiB, which the other rank does not have
    return run_tiny(folder, "axes.shard=2", "run.peak_tflops=0.001")


def test_metrics_tell_speed_and_memory_and_become_a_report(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, run_large_on_rank_1, tmp_path)
    outcome, second = outcomes
    assert outcome.peak_rank == second.peak_rank == 1
    assert outcome.peak_memory == second.peak_memory >= 2**28
    first, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    model = read_run(tmp_path).model
    hidden = model.hidden or 4 * model.dim
    layer = 2 * (4 * model.dim**2 + 2 * model.dim * hidden) + 4 * model.context * model.dim
    forward = first["tokens"] * (model.layers * layer + 2 * 256 * model.dim)
    assert first["flops_per_second"] == pytest.approx(3 * forward / first["seconds"])
    assert first["mfu"] == pytest.approx(3 * forward / first["seconds"] / 0.002e12)
    assert first["hfu"] == first["mfu"]
    assert outcome.mfu == pytest.approx(outcome.flops_per_second / 0.002e12)
    ((kind, memory), *others) = first["memory"].items()
    assert [kind, *dict(others)] in (["0-1"], ["0", "1"])  # as the parameters divide
    # AdamW keeps two moments of each element, and a step of four bytes for each parameter.
    assert memory["parameters"] < memory["optimizer"] / 2 < 1.2 * memory["parameters"]
    assert memory["peak"] > memory["parameters"] + memory["optimizer"]
    page = Path(outcome.report).read_text(encoding="utf-8")
    facts = report_of(tmp_path / "run").facts
    assert [*facts][:4] == ["layout", "hosts", "ranks", "backend"] and facts["steps"] == "6 of 6"
    assert facts["hosts"] == socket.gethostname()
    assert facts["backend"] in ("shared memory", "simulated")
    assert f"torch {torch.__version__}, Python 3." in facts["versions"]
    for name, fact in facts.items():
        assert f"<td>{name}</td><td>{fact}</td>" in page
    assert "Configuration of run" in page and "peak_tflops = 0.001" in page
    # What does not change is a line of text in place of a chart.
    assert page.count("<svg") + page.count(" in every step") == 9 + len(others)
    assert "gather parameters" in page


def facts_in_step_3(folder: Path, *overrides: str) -> dict[str, str]:
    """What a report says of a run while it goes on, on rank 0."""
    facts: list[dict[str, str]] = []

    def tell(line: str) -> None:
        if line.startswith("step 3/"):
            facts.append({**report_of(folder / "run").facts})

    run_tiny(folder, "run.log_every=1", *overrides, tell=tell)
    return facts[0] if facts else {}


@pytest.mark.few(1)
@pytest.mark.parametrize("given", ["run.resume=never", "run.accept_changes=true"])
def test_a_report_of_a_run_that_goes_on_has_its_facts(
    ranks: Ranks, tmp_path: Path, given: str
) -> None:
    if given == "run.accept_changes=true":  # the summary of what had ended is not that of this run
        ranks(2, run_tiny, tmp_path, TWO, "run.steps=2")
    facts, _ = ranks(2, facts_in_step_3, tmp_path, TWO, given, "run.check_parity=true")
    assert facts["layout"] == "replicate 2" and facts["ranks"] == "2"
    assert facts["steps"] == "3, the run has not ended"
    assert facts["parity"].startswith("parity: replicate=2 equals one process over")
    assert (
        float(facts["training loss"]) > 0 and float(facts["tokens a second"].replace(",", "")) > 0
    )
    assert facts["time"].endswith(" s") and "Python 3." in facts["versions"]


def run_that_cannot_be_drawn(folder: Path) -> tuple[list[str], str]:
    from support.internals.recipes import loop

    def refuse(*_: object, **__: object) -> None:
        raise ScheduleError("no schedule has this order")

    loop.write_runs = refuse
    lines: list[str] = []
    outcome = run_tiny(folder, tell=lines.append)
    assert outcome.is_finished
    return [line for line in lines if line.startswith("error")], outcome.report


def test_a_report_that_cannot_be_drawn_does_not_end_a_run(ranks: Ranks, tmp_path: Path) -> None:
    ((told, report),) = ranks(1, run_that_cannot_be_drawn, tmp_path)
    assert len(told) == 1 and "report.html cannot be written: no schedule" in told[0]
    assert report == "" and (tmp_path / "run" / "summary.json").exists()


def run_tracked(folder: Path) -> tuple[list[int], list[str]]:
    lines: list[str] = []
    run_tiny(folder, TWO, TRACKED, tell=lines.append)
    return FailingTracker.told, [line for line in lines if line.startswith("error")]


def test_a_tracker_that_fails_is_told_once_and_left_out(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, run_tracked, tmp_path)
    said = "error: tracker support.recipes.runs:FailingTracker: no answer; training goes on without"
    assert first == ([1, 2], [f"{said} it"])
    assert second == ([], [])


def test_the_trace_shows_every_rank_lane_and_reason(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, run_tiny, tmp_path, TWO)
    timeline = read_chrome_trace(tmp_path / "run" / "timeline.json")
    names = {event.name for event in timeline.select(rank=1, lane="compute").events}
    assert timeline.ranks == (0, 1)
    assert names == {"forward", "backward", "optimizer"}
    labels = {event.name for event in timeline.select(rank=1, lane="reduce").events}
    assert any("bucket" in label for label in labels)
    assert len(timeline.select(rank=0, lane="compute").events) == 2 * 3


def test_the_loss_falls(ranks: Ranks, tmp_path: Path) -> None:
    (outcome,) = ranks(1, run_tiny, tmp_path, "run.steps=60", "optimizer.learning_rate=1e-2")
    assert outcome.loss is not None
    assert outcome.validation_loss is not None
    assert outcome.validation_loss < outcome.unigram_loss - 0.1


def test_numbers_do_not_depend_on_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    outcomes: list[RunOutcome] = []
    for count in (1, 2, 4):
        folder = tmp_path / str(count)
        folder.mkdir()
        outcomes.append(ranks(count, run_tiny, folder, f"axes.replicate={count}")[0])
        assert losses(folder) == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    for outcome in outcomes[1:]:
        assert outcome.validation_loss == pytest.approx(outcomes[0].validation_loss, rel=1e-5)
        assert outcome.unigram_loss == outcomes[0].unigram_loss


# ----------------------------------------------------------------------------- going on exactly


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    options = (TWO, "train.accumulate=2", "model.dropout=0.1", "train.clip_norm=0.5")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    ranks(2, run_tiny, whole, *options)
    stopped = ranks(2, stop_in_step, parts, 2, *options)
    assert stopped[0].step == stopped[1].step
    assert 2 < stopped[0].step < 6
    assert not stopped[0].is_finished
    assert stopped[0].validation_loss is None
    resumed = ranks(2, run_tiny, parts, *options)
    assert resumed[0].is_finished
    assert losses(parts) == losses(whole)
    assert saved_tensors(parts) == saved_tensors(whole)


def test_a_folder_that_another_run_writes_to_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def other_run(tell: Callable[[object], None]) -> None:
        claim(folder / "checkpoints")
        tell("")
        time.sleep(60)

    with job(other_run) as other:
        other.told()
        for given in ((), (f"run.resume={folder}",)):
            first, second = ranks(2, refusal, tmp_path, TWO, *given)
            assert first[0] == "CheckpointClaimedError"
            assert f"{folder / 'checkpoints'} belongs to process {other.pid} on host " in first[1]
            assert second[0] == "RankFailedError"
            assert second[1].startswith("rank 0 failed first in set up")
            assert f"CheckpointClaimedError: {folder / 'checkpoints'} belongs to" in second[1]
        assert sorted(os.listdir(folder)) == ["checkpoints"], "nothing was written over"
    ranks(2, run_tiny, tmp_path, TWO)
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert not (folder / "checkpoints" / ".claim").exists()


IN_DOUBLE = ("precision.parameters=float64", "train.clip_norm=0.5")


def go_on(folder: Path, *overrides: str) -> RunOutcome:
    return run_tiny(folder, *IN_DOUBLE, *overrides, "run.accept_changes=true")


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Copies on 4 ranks, then parts on 4 ranks, then both: the numbers of a run without a stop."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    longer = (*IN_DOUBLE, "run.steps=18")  # a request to stop is noticed some steps later
    ranks(1, run_tiny, whole, *longer)
    first = ranks(4, stop_in_step, parts, 1, *longer, "axes.replicate=4")[0]
    sharded = ("axes.shard=4", "run.accept_changes=true")
    second = ranks(4, stop_in_step, parts, first.step + 1, *longer, *sharded)[0]
    assert 1 <= first.step < second.step < 18
    assert not second.is_finished
    last = ranks(4, go_on, parts, "run.steps=18", "axes.replicate=2", "axes.shard=2")
    assert all(outcome.is_finished for outcome in last)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-12)
    found, wanted = saved_tensors(parts), saved_tensors(whole)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(
            torch.tensor(found[name], dtype=torch.float64),
            torch.tensor(values, dtype=torch.float64),
            rtol=1e-9,
            atol=1e-11,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_a_finished_run_has_nothing_left_to_do(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(1, run_tiny, tmp_path)[0]
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    again = ranks(1, run_tiny, tmp_path)[0]
    assert again.loss is None
    assert again.validation_loss == first.validation_loss
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_resuming_from_a_named_checkpoint_elsewhere(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, run_tiny, tmp_path, "run.save_every=3")
    start = tmp_path / "run" / "checkpoints" / "step_00000003"
    (tmp_path / "other").mkdir()
    ranks(
        1,
        run_tiny,
        tmp_path,
        f"run.folder={tmp_path / 'other' / 'run'}",
        f"run.resume={start}",
    )
    first, second = losses(tmp_path), losses(tmp_path / "other")
    assert second == {step: first[step] for step in (4, 5, 6)}


def stop_twice(folder: Path) -> None:
    """Asks itself to stop again, after the moment in which two signals count as one."""

    def tell(line: str) -> None:
        if line.startswith(("step 1/", "step 2/")):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause() if line.startswith("step 2/") else signal.sigtimedwait([], 0.6)

    run_tiny(folder, "run.steps=500", tell=tell)


def test_a_second_signal_quits_at_once(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="SIGINT"):
        ranks(1, stop_twice, tmp_path)
    assert latest(tmp_path / "run" / "checkpoints") is None


# ------------------------------------------------------------------- what a run refuses to use


@pytest.mark.slow
def test_a_checkpoint_of_another_plan_is_refused_unless_asked_for(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(1, run_tiny, tmp_path, "run.steps=2")
    for override, words in (
        (TWO, "axes.replicate = nothing there, 2 here"),
        ("train.seed=1", "train.seed = 0 there, 1 here"),
        ("model.heads=1", "model.heads = 2 there, 1 here"),
        ("run.steps=6", "run.steps = 2 there, 6 here"),
    ):
        for kind, message in ranks(2 if override == TWO else 1, refusal, tmp_path, override):
            assert kind == CheckpointMismatchError.__name__
            assert words in message
            assert "\n" not in message
    (outcome,) = ranks(1, run_tiny, tmp_path, "run.steps=6", "run.accept_changes=true")
    assert outcome.step == 6


def test_a_checkpoint_of_another_text_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, run_tiny, tmp_path, "run.steps=2")
    with (tmp_path / "text.txt").open("ab") as file:
        file.write(b"one more line\n")
    ((kind, message),) = ranks(1, refusal, tmp_path, "run.steps=2")
    assert kind == CheckpointMismatchError.__name__
    assert "text.training" in message
    (outcome,) = ranks(1, run_tiny, tmp_path, "run.steps=3", "run.accept_changes=true")
    assert outcome.step == 3


def test_another_model_is_refused_even_where_changes_are_accepted(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(1, run_tiny, tmp_path, "run.steps=2")
    ((kind, message),) = ranks(1, refusal, tmp_path, "model.dim=8", "run.accept_changes=true")
    assert kind == CheckpointMismatchError.__name__
    assert "belongs to another model" in message
    assert "\n" not in message


def test_a_truncated_checkpoint_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, run_tiny, tmp_path, "run.steps=2")
    start = tmp_path / "run" / "checkpoints" / "step_00000002"
    file = next(path for path in start.iterdir() if path.suffix == ".safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    ((kind, message),) = ranks(1, refusal, tmp_path, f"run.resume={start}")
    assert kind == CheckpointDamagedError.__name__
    assert file.name in message
    # Nor does a run start over beside it without a word.
    ((kind, message),) = ranks(1, refusal, tmp_path)
    assert kind == CheckpointDamagedError.__name__
    assert "start over" in message


def test_ranks_with_different_configurations_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    read_run(tmp_path)
    for kind, message in ranks(2, refusal_with_own_seed, tmp_path):
        assert kind == PlanError.__name__
        assert "config.train.seed is 0 on ranks [0]; 1 on ranks [1]" in message


def refusal_with_own_seed(folder: Path) -> tuple[str, str]:
    return refusal(folder, TWO, f"train.seed={connect().rank}")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.resume=never"], "holds checkpoints of an earlier run"),
        (["run.resume={folder}/nowhere"], "found no such folder"),
        (["run.resume={folder}/run/checkpoints/step_00000002"], "holds a later checkpoint"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    ranks: Ranks, tmp_path: Path, overrides: list[str], words: str
) -> None:
    ranks(1, run_tiny, tmp_path, "run.steps=4", "run.save_every=2")
    given = [override.format(folder=tmp_path) for override in overrides]
    ((kind, message),) = ranks(1, refusal, tmp_path, "run.steps=4", *given)
    assert kind == PlanError.__name__
    assert words in message


# ------------------------------------------------------------------------------------- saving


def told_of_saves(folder: Path, how: str) -> list[str]:
    lines: list[str] = []
    run_tiny(folder, TWO, "run.save_every=2", f"run.save={how}", tell=lines.append)
    return [line for line in lines if "saved" in line or "saving" in line]


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["background", "foreground"])
def test_the_save_under_way_is_shown(ranks: Ranks, tmp_path: Path, how: str) -> None:
    lines, others = ranks(2, told_of_saves, tmp_path, how)
    folder = tmp_path / "run" / "checkpoints"
    saved = [f"step {step}: saved {folder / f'step_{step:08}'}" for step in (2, 4, 6)]
    assert [line for line in lines if ": saved " in line] == saved and others == []
    begun = [line.partition(" in the background")[0] for line in lines if "saving" in line]
    expected = [f"step {step}: saving step_{step:08}" for step in (2, 4)]
    assert begun == (expected if how == "background" else []), "the last is in the foreground"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step_{step:08}" for step in (2, 4, 6)
    ]


# ------------------------------------------------------------------------------------- disk full


def fill_the_disk_after_the_first_save(folder: Path) -> tuple[str, str, list[str]]:
    """From then on no file of this process may be larger than 4 kB."""
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        if "saved" in line:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    world = connect()
    try:
        train(read_run(folder, TWO, "run.save_every=2"), world, tell)
    except MeshwrightError as error:
        return type(error).__name__, str(error), lines
    return "", "", lines


def test_a_full_disk_is_told_and_the_last_checkpoint_stays(ranks: Ranks, tmp_path: Path) -> None:
    for kind, message, lines in ranks(2, fill_the_disk_after_the_first_save, tmp_path):
        assert kind == CheckpointWriteError.__name__
        assert "step_00000006 was not saved" in message
        assert "\n" not in message
        assert sum("training goes on" in line for line in lines) == 1
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert verify(newest).step == 2


def train_with_tiny_files(folder: Path) -> list[str]:
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        if line.startswith("step 1/"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        if line.startswith("step 5/"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    run_tiny(folder, tell=tell)
    return lines


def test_metrics_that_cannot_be_written_do_not_stop_a_run(ranks: Ranks, tmp_path: Path) -> None:
    (lines,) = ranks(1, train_with_tiny_files, tmp_path)
    told = [line for line in lines if "metrics.jsonl cannot be written" in line]
    assert len(told) == 1
    assert told[0].endswith("training goes on")
    assert verify(tmp_path / "run" / "checkpoints" / "step_00000006").step == 6


def test_weights_that_are_no_use_end_the_run_with_an_error(ranks: Ranks, tmp_path: Path) -> None:
    def body(folder: Path) -> tuple[str, str]:
        from support.internals.recipes import loop

        loop.validation_loss = lambda *_, **__: math.nan
        return refusal(folder)

    ((kind, message),) = ranks(1, body, tmp_path)
    assert kind == "NonFiniteError"
    assert message.startswith("the validation loss is nan after step 6: the weights in")
    assert (tmp_path / "run" / "summary.json").exists()
