"""Draws the picture of README: one step of a pipeline, measured, above the same step simulated.

python docs/pictures/draw_report.py

`zbv_step.csv` holds the compute actions of the last step of this run, on a machine of two cores
that other programs used at the same time:

meshwright train example --axes.replicate 1 --axes.pipeline 2 --pipeline.schedule zbv \\
    --pipeline.microbatches 4 --model.layers 4
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from meshwright.schedule.measured import compare
from meshwright.timeline import Event, Timeline

FOLDER = Path(__file__).parent
PICTURE = FOLDER / "report.svg"
COLORS = {
    "F": ("#3b76c4", "forward"),
    "I": ("#2fa3a0", "backward, input half"),
    "W": ("#d98a26", "backward, weight half"),
    "optimizer": ("#7a5c3e", "optimizer"),
}
LEFT, WIDTH, ROW, TITLE = 58, 690, 26, 30


def measured() -> Timeline:
    """Read the step that was recorded."""
    with (FOLDER / "zbv_step.csv").open(encoding="utf-8") as file:
        return Timeline(
            Event(
                name=row["action"],
                lane="compute",
                rank=int(row["rank"]),
                start=int(row["start_us"]) / 1e6,
                end=int(row["end_us"]) / 1e6,
                category=row["action"][1] if row["action"][0].isdigit() else "",
            )
            for row in csv.DictReader(file)
        )


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    """Write words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def bands(timeline: Timeline, top: float, scale: float) -> Iterator[str]:
    """Draw a band for each rank; what stays gray is idle."""
    for rank in timeline.ranks:
        y = top + rank * (ROW + 6)
        yield text(LEFT - 8, y + ROW / 2 + 4, f"rank {rank}", "rank", "end")
        whole = f'width="{(timeline.end - timeline.start) * scale:.1f}" height="{ROW}"'
        yield f'<rect x="{LEFT}" y="{y:.1f}" {whole} class="idle"/>'
        for event in timeline.select(rank=rank, lane="compute").events:
            kind = "optimizer" if event.name == "optimizer" else event.name[1]
            color, _ = COLORS[kind]
            x = LEFT + (event.start - timeline.start) * scale
            wide = max(0.5, event.duration * scale)
            # Stages 2 and 3 run on the same ranks as stages 1 and 0: they are drawn paler.
            pale = ' fill-opacity="0.75"' if event.name[0] in "23" else ""
            box = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{ROW}"'
            yield f'<rect {box} fill="{color}"{pale} stroke="#fff" stroke-width="0.5"/>'
            if wide > 12 and kind != "optimizer":
                yield text(x + wide / 2, y + ROW / 2 + 4, event.name[2:], "label", "middle")


def draw() -> str:
    """Write the picture as SVG."""
    found = compare(measured())
    assert found is not None
    both = (found.measured, found.simulated)
    scale = WIDTH / max(timeline.end - timeline.start for timeline in both)
    parts = []
    top = float(TITLE)
    for name, timeline, idle in (
        ("Measured", found.measured, found.bubble),
        ("Simulated", found.simulated, found.simulated_bubble),
    ):
        parts.append(text(LEFT, top - 9, f"{name}: {idle:.1%} idle", "title"))
        parts += bands(timeline, top, scale)
        top += len(timeline.ranks) * (ROW + 6) + TITLE
    x = float(LEFT)
    for color, name in COLORS.values():
        parts.append(
            f'<rect x="{x:.1f}" y="{top - 18:.1f}" width="10" height="10" fill="{color}"/>'
        )
        parts.append(text(x + 15, top - 9, name, "rank"))
        x += 40 + 6.6 * len(name)
    style = (
        "text{font:12px system-ui,sans-serif;fill:#202124}.title{font-weight:600;font-size:13px}"
        ".label{fill:#fff;font-size:11px}.idle{fill:#e3e6e8}"
    )
    size = f'viewBox="0 0 {LEFT + WIDTH + 12} {top:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
