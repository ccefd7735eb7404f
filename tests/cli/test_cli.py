"""The command as a user gives it: in this process where no rank is started, else as a program."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from meshwright import __version__
from meshwright.checkpoint import latest, verify
from meshwright.cli import main
from meshwright.plan import PipelinePlan, Plan
from meshwright.report import read_chrome_trace, write_chrome_trace
from meshwright.testing import Ranks
from support.internals.composition import chunks_of
from support.internals.recipes import compare_runs
from support.internals.schedule import BUILDERS, Costs, load_csv, lower, one_f_one_b, simulate
from support.recipes.runs import CONFIG, losses, run_tiny, write_text

DEADLINE = 90.0
COMPILED = ("--train.compile=true", "--pipeline.schedule=zb1p")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration of two ranks, with its text."""
    path = tmp_path / "tiny.toml"
    text = write_text(tmp_path)
    path.write_text(
        CONFIG.replace("[data]", f'[data]\npath = "{text}"').replace(
            "[run]", f'[run]\nfolder = "{tmp_path / "run"}"'
        )
        + "\n[axes]\nreplicate = 2\n"
    )
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and standard error of a command that starts no process."""
    status = main(words)
    return status, capsys.readouterr().err


def program(*words: str) -> list[str]:
    return [sys.executable, "-m", "meshwright", *words]


def environment(more: Mapping[str, str] = {}) -> dict[str, str]:
    source = str(Path(__file__).parents[2] / "src")
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    given = {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", **more}
    return {**kept, **given}


def run(*words: str, more: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        program(*words),
        env=environment(more),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def processes_about(folder: Path) -> list[int]:
    """The processes whose command line names ``folder``."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def wait_until_gone(folder: Path) -> None:
    until = time.monotonic() + 10
    while processes_about(folder):
        assert time.monotonic() < until, f"still running: {processes_about(folder)}"
        time.sleep(0.05)


@contextlib.contextmanager
def started(*words: str, shown: str = "step 2/") -> Iterator[subprocess.Popen[str]]:
    """A command that runs, and has shown its second step, or a line that begins so."""
    process = subprocess.Popen(
        program(*words),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(shown):
                break
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


# --------------------------------------------------------------------------- words that are wrong


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "expected a command: train, compare, doctor, report, plan, simulate"),
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["checkpoint", "verfy", "x"], "did you mean 'checkpoint verify'?"),
        (["train"], "meshwright train: Missing from meshwright train: CONFIG.toml"),
        (["train", "x.toml", "--nproc", "two"], "--nproc"),
        (["train", "x.toml", "--nprco", "2"], "Perhaps you meant: --nproc"),
        (["train", "/nowhere/x.toml"], "/nowhere/x.toml: expected a TOML file"),
    ],
)
def test_a_wrong_command_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    status, error = told(capsys, *words)
    assert status == 2
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--run.stepz", "3"], "override 'run.stepz=3': unknown key 'stepz' in [run]"),
        (["--run.steps=many"], "expected a whole number, found"),
        (["--pipeline.schedule", "1f2b"], 'did you mean "1f1b"?'),
        (["--nproc", "3"], "axes multiply to 2"),
        (["--nproc", "3"], "or set replicate = 3 in [axes]"),
        (["--nproc", "-1"], "--nproc: expected a whole number of at least 0, found -1"),
        (["--resume", "/nowhere"], "[run] resume = /nowhere: expected auto, never, the folder"),
        (["--data.path", "/nowhere"], "found nothing at /nowhere"),
        (["--run.folder", "/dev/null/run"], "[run] folder = /dev/null/run: expected a folder that"),
        (["--run.folder", "/proc/run/1"], "in /proc nothing can be written"),
        (["--data.path", "{empty}"], "expected files (.py) that are not empty under {empty}"),
        (["--data.batch-size", "2000"], "found 1"),
        (["--data.batch_size", "3"], "choose a multiple of 2"),
        (["--train.recompute", '["layer.*"]'], "matches no module; did you mean 'layers.*'?"),
        (["--run.trace_modules", '["layers.9.*"]'], "'layers.9.*' matches no module"),
        (
            ["--axes.replicate=1", "--axes.pipeline=2", "--pipeline.microbatches=2", *COMPILED],
            "compile = true: schedule = 'zb1p' in [pipeline] runs a backward in two halves",
        ),
        (["--train.batch_norm", "sync"], "has no effect: the model has no BatchNorm"),
        (
            ["--axes.replicate=1", "--axes.pipeline=2", "--pipeline.microbatches=1"],
            "[pipeline] Number of microbatches (1) must be",
        ),
        (
            ["--axes.replicate=1", "--axes.pipeline=16", "--pipeline.microbatches=16"],
            "the model has 6 modules in a row that a stage may begin with, which is too few for 16",
        ),
    ],
)
def test_a_wrong_configuration_is_found_before_any_process_starts(
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
    words: list[str],
    expected: str,
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    status, error = told(capsys, "train", str(config), *(w.format(empty=empty) for w in words))
    assert status == 2
    assert expected.format(empty=empty) in error
    assert error.count("\n") == 1
    assert error.startswith("meshwright train: ")
    assert not (tmp_path / "run").exists()


def test_all_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    words = ["--run.step=1", "--modle.dim=8", "--train.seed=-1", "--axes.replicat", "2"]
    status, error = told(capsys, "train", str(config), *words)
    assert status == 2
    assert error.count("\n") == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "[axes] dp_shard = -1 takes the ranks that are left: give --nproc"),
        (["--nproc", "3"], "other axes have 2 ranks, which do not divide the 3 ranks"),
        (["--nproc", "10"], "cannot be shared by 5 data ranks"),
    ],
)
def test_shards_take_the_ranks_that_are_left(
    capsys: pytest.CaptureFixture[str], config: Path, words: list[str], expected: str
) -> None:
    config.write_text(config.read_text().replace("replicate = 2", "dp_shard = -1\ntp = 2"))
    status, error = told(capsys, "train", str(config), *words)
    assert (status, error.count("\n")) == (2, 1)
    assert expected in error


def test_what_the_ranks_would_refuse_is_found_first(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    status, error = told(capsys, "train", str(config), "--nproc=5", "--data.path=/nowhere")
    assert status == 2
    assert error.count("\n") == 2


@pytest.mark.parametrize(
    "words", [["--data.path", "/nowhere"], ["--data.path=/nowhere"], ["data.path=/nowhere"]]
)
def test_an_override_is_written_as_in_programs_or_with_dashes(
    capsys: pytest.CaptureFixture[str], config: Path, words: list[str]
) -> None:
    status, error = told(capsys, "train", str(config), *words)
    assert status == 2
    assert "found nothing at /nowhere" in error
    plan = Plan.from_toml("", overrides=["--axes.shard", "2", "--train.seed=3", "train.flat=true"])
    assert (plan.axes.size("shard"), plan.train.seed, plan.train.flat) == (2, 3, True)


def test_a_longer_run_is_refused_at_once_with_the_reason(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    ranks(2, run_tiny, tmp_path, "axes.replicate=2")
    words = ["train", str(config), "run.steps=8"]
    for more in ([], ["--resume", str(tmp_path / "run")]):
        status, error = told(capsys, *words, *more)
        assert status == 2 and error.count("\n") == 1
        assert "run.steps = 6 there, 8 here (the schedule of the learning rate depends" in error
        assert "set [run] accept_changes = true" in error
    ranks(2, run_tiny, tmp_path, "axes.replicate=2", "run.steps=8", "run.accept_changes=true")
    assert list(losses(tmp_path)) == [*range(1, 9)]


def test_a_run_that_is_finished_says_so(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    ranks(1, run_tiny, tmp_path)
    config.write_text(config.read_text().replace("\n[axes]\nreplicate = 2\n", ""))
    done = run("train", str(config))
    assert done.returncode == 0, done.stderr
    assert "nothing left to do: all 6 steps are done; to train longer, give a larger" in done.stdout
    assert "tokens/s" not in done.stdout


def test_help_shows_every_key_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert not caught.value.code
    assert "--nproc N" in shown
    for key in ("--axes.NAME", "--train.clip_norm", "--model.dim", "--run.resume"):
        assert key in shown
    assert max(map(len, shown.splitlines())) <= 80
    for choices in (
        "--train.batch_norm {local, sync} (none)",
        '--train.dropout {local, global} ("local")',
    ):
        assert choices in shown
    for word in ("--help", "help"):
        assert main([word]) == 0
        assert "checkpoint verify" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"meshwright {__version__}\n"


# ------------------------------------------------------------------------------- whole commands


def test_train_prints_parity_baseline_checkpoint_and_trace(config: Path, tmp_path: Path) -> None:
    words = ("--check-parity", "--run.parity_steps=3", "--trace-tensors")
    done = run("train", str(config), *words, '--run.trace_modules=["layers.*"]')
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in (
        "text.txt: ",
        "step 6/6  loss ",
        "finished at step 6 of 6 on 2 ranks over shared memory, ",
        "unigram byte frequencies give",
        "parity: replicate=2 equals one process over 3 steps in float64",
        " MiB at most, on rank ",
        f"checkpoint {tmp_path}/run/checkpoints/step_00000006",
        f"trace      {tmp_path}/run/timeline.json",
        f"tensors    {tmp_path}/run/tensors (meshwright compare {tmp_path}/run OTHER_RUN)",
    ):
        assert words in done.stdout
    assert done.stdout.count("finished at") == 1
    assert read_chrome_trace(tmp_path / "run" / "timeline.json").ranks == (0, 1)
    found = compare_runs(tmp_path / "run", tmp_path / "run")
    assert (len(found.steps), found.counts["activation"]) == (6, 12)
    wait_until_gone(config)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
@pytest.mark.slow
def test_a_signal_saves_and_the_run_can_go_on(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with started("train", str(config), "--run.steps=4000") as process:
        process.send_signal(number)
        output, error = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + number, error
    said, saved = output.index("stopping after this step"), output.index(": saved ")
    assert said < output.index(": stopping on request; saving") < saved
    assert "stopped on request at step" in output
    assert f"--resume {tmp_path / 'run'}" in output
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert verify(newest).step == max(losses(tmp_path))
    wait_until_gone(config)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_last_checkpoint_stays(config: Path, tmp_path: Path) -> None:
    words = ["train", str(config), "--run.steps=4000", "--run.save_every=1"]
    with started(*words) as process:
        victim = max(pid for pid in processes_about(config) if pid != process.pid)
        os.kill(victim, signal.SIGKILL)
        _, error = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    *_, cause, how, memory = error.strip().splitlines()
    assert cause.startswith("meshwright train: rank ")
    assert "signal 9" in cause
    assert f"the last checkpoint is {tmp_path}/run/checkpoints/step_" in how
    assert f"train {config} --run.steps=4000 --run.save_every=1 --resume {tmp_path}/run" in how
    assert "nearly always memory" in memory and f"{tmp_path}/run/metrics.jsonl" in memory
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    verify(newest)
    wait_until_gone(config)


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(config: Path) -> None:
    with started("train", str(config), "--run.steps=100000") as process:
        process.kill()
        process.wait()
        wait_until_gone(config)


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_restart_after_kill_9_goes_on_at_once(
    config: Path, tmp_path: Path
) -> None:
    words = ("train", str(config), "--run.steps=4000", "--run.save_every=2")
    with started(*words) as first:
        second = run(*words)
        third = run(*words, "--resume", str(tmp_path / "run"))
        assert first.poll() is None
        for process in processes_about(config):
            os.kill(process, signal.SIGKILL)
    for refused in (second, third):
        assert refused.returncode == 1
        assert len(refused.stderr.strip().splitlines()) == 1
        assert f"{tmp_path / 'run' / 'checkpoints'} belongs to process " in refused.stderr
        assert "-m meshwright train" in refused.stderr
    with started(*words, shown="step ") as again:
        again.send_signal(signal.SIGINT)
        _, error = again.communicate(timeout=DEADLINE)
    assert again.returncode == 128 + signal.SIGINT, error
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert verify(newest).step == max(losses(tmp_path))


@pytest.mark.slow
def test_a_rank_that_dies_at_the_start_is_named(config: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n    os._exit(7)\n"
    )
    source = str(Path(__file__).parents[2] / "src")
    done = run("train", str(config), more={"PYTHONPATH": f"{tmp_path}:{source}"})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == ("meshwright train: rank 1 of 2 exited with status 7")
    assert "Traceback" not in done.stderr
    wait_until_gone(config)


@pytest.mark.slow
def test_a_port_in_use_is_told(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        group = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = run("train", str(config), "--run.timeout=5", more=group)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "free port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_under_torchrun_the_same_command_works(config: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command = [*torchrun, "--standalone", "-m", "meshwright", "train", str(config)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished at step 6 of 6 on 2 ranks") == 1
    assert max(losses(tmp_path)) == 6


# ---------------------------------------------------------------------------- checkpoint verify


def test_verify_tells_sound_from_damaged(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ranks(1, run_tiny, tmp_path, "run.steps=1")
    folder = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert "sound, step 1" in capsys.readouterr().out
    file = next(path for path in folder.iterdir() if path.suffix == ".safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    status, error = told(capsys, "checkpoint", "verify", str(folder))
    assert status == 1
    assert file.name in error
    status, error = told(capsys, "checkpoint", "verify", str(tmp_path / "run"))
    assert status == 2
    assert f"expected a checkpoint, found a run: give {folder}" in error
    status, error = told(capsys, "checkpoint", "verify", str(tmp_path / "nowhere"))
    assert status == 1
    assert "nowhere" in error


def test_doctor_looks_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure"]) == 0
    assert "torch" in capsys.readouterr().out


def test_train_rehearses_a_rank(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), "--rehearse", "1"]) == 0
    out = capsys.readouterr().out
    assert "MiB: parameters " in out and "resident" in out
    assert not config.with_name("run").exists()
    status, error = told(capsys, "train", str(config), "--rehearse", "2")
    assert status == 2
    assert "rank: expected 0 to 1 (replicate = 2), found 2" in error
    for words in (["--rehearse=-5"], ["--rehearse", "0", "--nproc", "3"]):
        assert told(capsys, "train", str(config), *words)[0] == 2
    assert not config.with_name("run").exists()


def test_simulate_draws_a_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "zbv.csv"
    command = ["simulate", "zbv", "--ranks", "2", "--microbatches", "4", "--write", str(file)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "rank 1: 1F0 2F0 1F1 2F1 2I0" in out
    assert "rank 0: computes 12, idles 0.5, holds the activations of at most 2 micro" in out
    assert "in all 12.5, 4.0% of it idle" in out
    assert file.read_text().startswith("# meshwright schedule 1: name=zbv microbatches=4")


@pytest.mark.parametrize("schedule", sorted(BUILDERS))
def test_simulate_has_the_stages_of_a_plan(
    capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    said: list[str] = []
    chunks = chunks_of(PipelinePlan(schedule=schedule, microbatches=8), 4)  # pyrefly: ignore
    for stages in ([], ["--stages", str(4 * chunks)]):
        assert main(["simulate", schedule, "--ranks", "4", "--microbatches", "8", *stages]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    if schedule == "interleaved1f1b":
        assert "15.8% of it idle" in said[0]


def test_simulate_finds_an_order_for_the_costs_of_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    costs = Costs(forward=[3.0, 1.0], input=[1.0, 2.0], weight=[1.0, 1.0], transfer=0.25)
    ran = simulate(lower(one_f_one_b(2, 4)), costs)
    write_chrome_trace(ran.timeline, tmp_path / "timeline.json")
    assert main(["simulate", str(tmp_path)]) == 0
    assert f"in all {ran.makespan:g}, " in capsys.readouterr().out
    file = tmp_path / "found.csv"
    assert main(["simulate", str(tmp_path), "--find", "--write", str(file)]) == 0
    out = capsys.readouterr().out
    lines = map(str.split, out.split("\n\n")[0].splitlines())
    told = {name: float(seconds.strip(",")) for name, seconds, *_ in lines}
    assert {"1f1b", "gpipe", "zb1p", "zb2p", "automatic", "measured"} <= set(told)
    assert "more than may be" in out  # gpipe holds all microbatches
    assert told["automatic"] < told["1f1b"]
    written = load_csv(file)
    assert (written.name, written.stages, written.microbatches) == ("automatic", 2, 4)
    assert main(["simulate", "1f1b", "--find", "--limit", "0.5"]) == 2
    assert "one microbatch at a time needs 1 of memory" in capsys.readouterr().err
    assert main(["simulate", "1f1b", "--forward", "1e308", "--find"]) == 2
    assert "--forward: expected a number from 0 to 1e100, found 1e+308" in capsys.readouterr().err


def test_report_draws_a_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = simulate(lower(one_f_one_b(2, 4)), Costs(transfer=0.25))
    write_chrome_trace(found.timeline, tmp_path / "timeline.json")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("<svg") == 2
    page = tmp_path / "zbv.html"
    assert main(["simulate", "zbv", "--ranks", "2", "--page", str(page)]) == 0
    assert page.read_text(encoding="utf-8").count("<svg") == 1
    assert "Measured" not in page.read_text(encoding="utf-8")
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert main(["report", str(page)]) == 2
    assert "expected a Chrome trace written by Meshwright" in capsys.readouterr().err


def test_report_of_a_run_that_has_not_ended(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n{"step": 2, "loss": 5.25}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("<svg") == 1


def test_an_unknown_tracker_is_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "train.toml"
    file.write_text('[run]\ntrackers = ["wandbb"]\n')
    assert main(["train", str(file)]) == 2
    assert "[run] trackers: unknown tracker 'wandbb'; expected tensorboard" in (
        capsys.readouterr().err
    )


def test_simulate_reads_files_of_torch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "given.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert main(["simulate", str(file), "--forward", "2", "--transfer", "0.5"]) == 0
    assert "idles" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["zbx"], "unknown schedule 'zbx'; known: gpipe"),
        (["1f1b", "--microbatches", "2"], "Number of microbatches (2) must be greater"),
        (["loopedbfs", "--stages", "6"], "--stages: expected a multiple of the 4 ranks, found 6"),
        (["none.csv"], "none.csv: No such file or directory"),
        (["none.json"], "none.json: No such file or directory"),
        (["gpipe", "--limit", "-1"], "--limit: expected a number from 0 to 1e100, found -1"),
        (["gpipe", "--ranks", "0"], "expected at least 1 for the number of ranks, found 0"),
        (["gpipe", "--forward", "-1"], "--forward: expected a number from 0 to 1e100, found -1"),
        (
            ["gpipe", "--transfer", "nan"],
            "--transfer: expected a number from 0 to 1e100, found nan",
        ),
        (["gpipe", "--write", "/dev/null/x.csv"], "/dev/null/x.csv: Not a directory"),
        (["gpipe", "--page", "/dev/null/x.html"], "/dev/null/x.html: Not a directory"),
    ],
)
def test_simulate_refuses(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    assert problem in capsys.readouterr().err
