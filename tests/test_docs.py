"""What README and docs show is true: code runs, commands start, plans hold, messages are said.

How each block is tested stands in a comment above it, which `support.docs.blocks` reads.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright
from meshwright import checkpoint, tensor_parallel
from meshwright.cli import main
from meshwright.comm import communicator
from meshwright.testing import Ranks, on_devices
from support.architecture import table
from support.docs import commands, messages
from support.docs.blocks import ALL, LANGUAGES, MARKS, PAGES, ROOT, Block, Group, blocks, groups
from support.docs.setups import SETUPS, nothing
from support.internals.axes import KNOWN_AXES
from support.internals.cli import COMMANDS
from support.internals.environment import torchrun_variables
from support.internals.schedule import Costs, build, lower, simulate
from support.recipes.runs import CONFIG, write_text

NOT_RUN: tuple[str, ...] = ()
"""The pages of blocks that are not run, with as many entries as blocks."""


def of(page: str, language: str) -> list[str]:
    """The blocks of code of one page."""
    return [block.code for block in blocks(f"docs/{page}") if block.language == language]


# ------------------------------------------------------------------------------------- blocks


def test_every_block_says_how_it_is_tested() -> None:
    for page in PAGES:
        fences = re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * len([*blocks(page)]), f"{page}: a block that is not understood"
    for block in ALL:
        assert block.language in LANGUAGES, block
        assert not block.mark or block.mark in MARKS, block


def test_the_blocks_that_are_not_run_are_few() -> None:
    idle = [block for block in ALL if block.mark == "not run"]
    assert tuple(block.page for block in idle) == NOT_RUN
    assert all(block.said for block in idle)


def run_block(block: Block, names: dict[str, Any]) -> None:
    """Run code with ``names``, or commands one after the other."""
    if block.language == "python":
        code = re.sub(r"num_workers=\d", "num_workers=0", block.code)  # they would be processes
        exec(compile(code, str(block), "exec"), names)
        return
    for words in commands.lines(block):
        assert main(words[1:]) == int("diff" in words), words


def run_group(group: Group) -> dict[str, Any]:
    """Run all of ``group`` here; the names that it has made."""
    if group.ranks == 1:  # the reader's python, which no launcher has started
        for name in torchrun_variables(0, 1, 0):
            os.environ.pop(name, None)
    names: dict[str, Any] = {"__name__": "page"}
    setup = SETUPS.get(group.page, nothing)(names)
    next(setup)
    for block in group.blocks:
        run_block(block, names)
    next(setup, None)
    return names


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("group", groups(), ids=str)
def test_the_code_of_a_page_runs(
    group: Group, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if group.ranks:
        ranks(group.ranks, lambda: bool(run_group(group)), connected=False, timeout=120)
        return
    names = run_group(group)
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test(ranks)
        if any("simulated" in mark.args for mark in getattr(test, "pytestmark", ())):
            test(on_devices(ranks))


def test_code_of_examples_is_their_files() -> None:
    shown = [block for block in ALL if block.mark == "file"]
    assert shown
    for block in shown:
        _, _, code = (ROOT / block.said).read_text().partition("import annotations\n\n")
        assert block.code == code, block


def test_the_tests_that_blocks_name_are_there() -> None:
    for block in [block for block in ALL if block.mark == "test"]:
        file, _, name = block.said.partition("::")
        text = (ROOT / file).read_text()
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        (found,) = [function for function in functions if function.name == name]
        assert Path(block.page).name in ast.unparse(found), block


def parsed(language: str) -> list[Block]:
    return [block for block in ALL if block.language == language and not block.mark]


@pytest.mark.parametrize("block", parsed("bash"), ids=str)
def test_a_command_would_start(block: Block) -> None:
    for words in commands.lines(block):
        commands.check(words)


@pytest.mark.parametrize("page", PAGES)
def test_a_command_in_the_text_is_there(page: str) -> None:
    for words in commands.inline(page):
        commands.check_inline(words)


@pytest.mark.parametrize("block", parsed("toml"), ids=str)
def test_a_plan_holds(block: Block) -> None:
    commands.check_toml(block)


# ------------------------------------------------------------------------------------- messages


def said_by() -> list[Block]:
    return [block for block in ALL if block.mark == "said by"]


@pytest.mark.parametrize("block", said_by(), ids=lambda block: block.said)
def test_a_message_is_said(block: Block, ranks: Ranks, tmp_path: Path) -> None:
    """A test provokes it, or a file of the source has all of it that is no value."""
    parts = [" ".join(part.split()) for part in block.code.split("…")]
    if block.said.endswith(".py"):
        words = texts_of(ROOT / "src/meshwright" / block.said)
        assert all(part in words for part in parts if part), parts
        return
    found = " ".join(getattr(messages, block.said)(ranks, tmp_path).split())
    assert re.search(".*".join(map(re.escape, parts)), found), found


def texts_of(file: Path) -> str:
    """The strings of a source file; where one has a value in it there is a dot."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found += [str(v.value) if isinstance(v, ast.Constant) else "." for v in node.values]
    return " ".join(" ".join(found).split())


def test_every_provoked_message_is_on_the_page() -> None:
    tree = ast.parse(Path(messages.__file__).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    provoked = {f.name for f in functions if [a.arg for a in f.args.args] == ["ranks", "folder"]}
    assert provoked == {block.said for block in said_by() if not block.said.endswith(".py")}


# ------------------------------------------------------------------------------------- status


def table_rows() -> list[list[str]]:
    """The cells of each row of the table of what works."""
    section = (ROOT / "docs/status.md").read_text().partition("## What works now")[2]
    table = section.partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("row", table_rows(), ids=lambda row: row[0][:40])
def test_a_row_of_the_table_names_what_is_there(row: list[str]) -> None:
    part, on_cpus, on_gpus = row
    assert on_cpus.startswith("works")
    assert on_gpus.startswith(("run", "simulated", "not run", "not yet"))
    for text in re.findall(r"`([^`]+)`", part):
        for word in re.findall(r"^meshwright ([a-z ]+)", text):
            assert word in COMMANDS, text
        if re.fullmatch(r"[A-Za-z_]+(\.[a-z_]+)*", text) and text not in KNOWN_AXES:
            assert exists(text), text


def exists(dotted: str) -> bool:
    """Look ``dotted`` up as a module, or as a public name of the library or of torch."""
    if dotted.startswith("meshwright."):
        return importlib.util.find_spec(dotted) is not None
    homes = (meshwright, tensor_parallel, torch)
    return any(hasattr(home, dotted.removeprefix("torch.")) for home in homes)


# ------------------------------------------------------------------------------------- README


LOOP = """
import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
{changed}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(4, 8, generator=draw)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = [p.detach().clone() for p in model.parameters()]
"""


def test_the_diff_of_readme_keeps_the_numbers(ranks: Ranks) -> None:
    (diff,) = (block.code for block in blocks("README.md") if block.language == "diff")

    def program(side: str) -> str:
        lines = [line[1:] for line in diff.splitlines() if line[:1] in (side, " ", "")]
        return LOOP.format(changed="\n".join(lines))

    def body(side: str) -> list[torch.Tensor]:
        names: dict[str, Any] = {}
        exec(program(side), names)
        assert type(names["model"]).__module__.startswith("torch" if side == "-" else "meshwright")
        return names["weights"]

    before, after = (ranks(2, body, side, connected=False)[0] for side in "-+")
    for theirs, ours in zip(before, after, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_unchanged_program_of_readme_gets_our_classes(ranks: Ranks, tmp_path: Path) -> None:
    (code,) = (b.code for b in blocks("README.md") if b.said.endswith("gets_our_classes"))
    (tmp_path / "train.py").write_text(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "from torch.distributed.fsdp import fully_shard\n"
    )

    def body() -> tuple[str, str]:
        sys.path.insert(0, str(tmp_path))
        names: dict[str, Any] = {}
        exec(code, names)
        program = names["train"]
        return program.DDP.__module__, program.fully_shard.__module__

    for module in ranks(1, body, connected=False)[0]:
        assert module.startswith("meshwright")


def test_the_simulation_of_readme_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = (b.code for b in blocks("README.md") if b.said.endswith("the_command_prints"))
    (words,) = (words for words in commands.inline("README.md") if "simulate" in words[:2])
    assert main(words[1:]) == 0
    assert shown in capsys.readouterr().out


def test_the_picture_of_readme_is_what_its_script_draws() -> None:
    script = ROOT / "docs/pictures/draw_report.py"
    assert "](docs/pictures/report.svg)" in (ROOT / "README.md").read_text()
    drawn = runpy.run_path(str(script))["draw"]()
    assert drawn == script.with_name("report.svg").read_text(), f"run python {script}"


def test_the_integrations_of_readme_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"`from meshwright.integrations import (\w+)`, then `.*?\1\.(\w+)\(", text)
    assert [module for module, _ in found] == ["accelerate", "transformers", "lightning"]
    for module, function in found:
        source = (ROOT / f"src/meshwright/integrations/{module}.py").read_text()
        assert f"def {function}(" in source


ROWS = {
    "4 x Linear(2000, 2000), shared memory": "net, shm: fully_shard over torch's best, CPU",
    "6-layer GPT, shared memory": "gpt, shm: fully_shard over torch's best, CPU",
    "6-layer GPT, Gloo": "gpt, gloo: {strategy} over torch's best, CPU",
    "6-layer GPT, shared memory, compiled": (
        "compiled gpt, shm: fully_shard compiled over torch's best, CPU"
    ),
    "1F1B pipeline of tiny stages, Gloo": "transfers, 1F1B: ours gloo over torch, cpu",
}
"""What README calls some of the rows of `docs/measurements.md`."""


def test_the_speeds_of_readme_are_those_of_the_page_of_measurements() -> None:
    measured = (ROOT / "docs/measurements.md").read_text()
    section = (ROOT / "README.md").read_text().partition("## Speed")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert len(rows[2:]) == 6
    for name, strategy, ratio in rows[2:]:
        row = ROWS[name.strip()].format(strategy=strategy.strip(" `"))
        (found,) = re.findall(rf"^\| {re.escape(row)} \| ([\d.]+) ", measured, re.MULTILINE)
        shown = float(re.findall(r"[\d.]+", ratio)[0])
        assert abs(shown - float(found)) < 0.006, row
        assert ("slower" in ratio) == (float(found) > 1.0), row


def test_the_places_of_pickle_in_security_are_those_of_the_source() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    sources = re.findall(r"^\|.*\| `([\w./]+)` \|$", text, re.MULTILINE)
    assert set(sources) == table.PICKLE_ROOMS | table.PICKLE_FILES
    for name in sources:  # the table of the architecture allows no more than what is used
        path = ROOT / "src/meshwright" / name
        files = [path] if path.is_file() else [*path.glob("*.py")]
        uses = "\n".join(file.read_text() for file in files)
        assert re.search(r"pickle\.(loads|dumps|Unpickler)|torch\.(load|save)\(|weights_only", uses)


def test_every_link_of_a_page_leads_somewhere() -> None:
    for page in (*PAGES, "SECURITY.md"):
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]*)\)", text):
            if not target.startswith(("http:", "https:")):
                path, _, anchor = target.partition("#")
                file = (ROOT / page).parent / path if path else ROOT / page
                assert file.exists(), f"{page}: {target}"
                assert not anchor or anchor in anchors(file), f"{page}: {target}"


def anchors(file: Path) -> set[str]:
    """The anchors of a page's headings, as they are on code hosts and through Sphinx."""
    titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


# ------------------------------------------------------------------------------------- pages


def test_the_table_of_schedules_is_what_is_simulated() -> None:
    page = (ROOT / "docs/pipelines.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d) \| (\w+) \| ([\d.]+)% \| ([\d.]+) \|", page, re.M)
    assert len(rows) == 10
    for name, stages, backward, idle, held in rows:
        schedule = build(name, 4, 8, int(stages))
        found = simulate(lower(schedule), Costs.shared(int(stages)), events=False)
        assert f"{found.bubble_fraction:.1%}" == f"{idle}%", name
        assert max(found.peaks) == float(held), name
        assert bool(schedule.split_backward) == (backward == "halves"), name


@pytest.mark.slow
def test_the_tutorial_trains_one_model_in_each_of_its_ways(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one, several, sharded, planned, saved, resumed = of("tutorial.md", "python")[:6]

    def weights(model: nn.Module) -> list[torch.Tensor]:
        state = model.state_dict().values()
        return [getattr(each, "full_tensor", lambda each=each: each)() for each in state]

    def body() -> list[list[torch.Tensor]]:
        os.chdir(tmp_path)
        made, loop = several.split("mw.replicate(model)", 1)
        found = []
        for middle in ("mw.replicate(model)", sharded):
            names: dict[str, Any] = {}
            exec(made + middle + loop, names)
            found.append(weights(names["model"]))
        exec(saved, names)
        exec(saved, names)  # running the file again neither raises nor saves twice
        exec(resumed, names)
        names = {}
        exec(made, names)
        exec(planned, names)
        found.append([*names["trainable"].weights().values()])
        return found

    alone: dict[str, Any] = {}
    exec(one, alone)
    assert float(capsys.readouterr().out.split()[-1]) < 0.5
    ways = ranks(4, body, connected=False, timeout=180)[0]
    other = copy.deepcopy(alone["model"])
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    assert checkpoint.load(tmp_path / "checkpoints", model=other).step == 100
    for found in (*ways, weights(other)):
        for mine, theirs in zip(weights(alone["model"]), found, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-4)


def test_every_name_on_the_page_for_users_of_others_is_there() -> None:
    page = (ROOT / "docs" / "coming_from.md").read_text()
    dotted = set(re.findall(r"`((?:meshwright|torch)\.[\w.]+)", page))
    assert len(dotted) > 25
    for name in sorted(dotted):
        assert resolves(name), name
    for line in page.splitlines():
        cells = line.strip("|").split("|")
        if "under the same names" in line or "`meshwright.tensor_parallel`" in line:
            (home,) = re.findall(r"`(meshwright\.[a-z_]+)`(?!; )", cells[1])[:1]
            theirs = re.findall(r"`(?:torch\.[\w.]+\.)?(\w+)`", cells[0])
            assert all(hasattr(importlib.import_module(home), name) for name in theirs[1:]), line


def test_the_rows_for_users_of_accelerate_run(ranks: Ranks) -> None:
    page = (ROOT / "docs/coming_from.md").read_text()
    section = page.partition("## From Accelerate")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]

    def body() -> int:
        ran = 0
        for row in rows:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(2, 2))
            names = {"meshwright": meshwright, "model": model, "block": model[0], "loss": torch.sum}
            names |= {"x": torch.ones(2, 2), "world": communicator()}
            if "no_sync" in row[1]:
                meshwright.replicate(model)
            for code in re.findall(r"`([^`]+)`", row[1]):
                if re.search(r"[(=]", code):
                    exec(code, names)
                    ran += 1
            if "gathered" in names:
                assert names["gathered"].shape == (4, 2)
        return ran

    assert min(ranks(2, body)) >= 11


def test_the_settings_for_users_of_deepspeed_are_there() -> None:
    page = (ROOT / "docs/coming_from.md").read_text()
    settings = re.findall(r"`\[(\w+)\] (\w+) = ([^`]+)`", page)
    assert len(settings) > 1
    for table_name, key, value in settings:
        meshwright.Plan.from_toml(f"[{table_name}]\n{key} = {value}")


def resolves(dotted: str) -> bool:
    """Look ``dotted`` up: modules as far as they go, then attributes."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of torch, for its own
                found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[count:])
    return False


@pytest.mark.slow
def test_the_command_for_several_machines_starts_the_main_job_on_one(tmp_path: Path) -> None:
    (line,) = (code for code in of("several_machines.md", "bash") if "meshwright train" in code)
    write_text(tmp_path)
    start = f"[axes]\nreplicate = 2\n{CONFIG}"
    (tmp_path / "my.toml").write_text(start.replace("[data]\n", "[data]\npath = 'text.txt'\n"))
    (tmp_path / "meshwright").write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    (tmp_path / "meshwright").chmod(0o755)
    here = {"FIRST_MACHINE:29500": "localhost:0", "--nnodes 2": "--nnodes 1", "node 8": "node 2"}
    for shown, given in here.items():
        assert shown in line
        line = line.replace(shown, given).replace("\\\n", " ")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 6/6" in done.stdout


def shown_commands() -> list[str]:
    """What README, docs and examples show of examples, each once."""
    found = [words for block in ALL if block.language == "bash" for words in commands.lines(block)]
    for file in sorted((ROOT / "examples").glob("*.py")):
        text = (ast.get_docstring(ast.parse(file.read_text())) or "").replace("\\\n", " ")
        found += [shlex.split(line) for line in re.findall(r"^torchrun .*", text, re.MULTILINE)]
    found = [[Path(words[0]).name, *words[1:]] for words in found]
    lines = [shlex.join(words) for words in found if "examples/" in " ".join(words)]
    return [line for line in dict.fromkeys(lines) if line.startswith(("torchrun", "meshwright"))]


@pytest.mark.few(0)
@pytest.mark.parametrize("line", shown_commands())
def test_the_commands_shown_run_as_they_stand(line: str, tmp_path: Path) -> None:
    name, *words = shlex.split(line)
    if "llama.py" in line or "hugging_face.py" in line:
        pytest.importorskip("transformers")
    if name == "meshwright":  # a short run of its own
        (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 200)
        words = [str(tmp_path) if word == "~/texts" else word for word in words]
        words += ["--run.folder", str(tmp_path / "run"), "--run.steps=3", "--run.parity-steps=1"]
        words = ["-m", "meshwright", *words]
    else:
        words = ["-m", "torch.distributed.run", "--standalone", *words]
    done = subprocess.run(
        [sys.executable, *(str(ROOT / w) if w.startswith("examples/") else w for w in words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout
