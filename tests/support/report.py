"""A run of invented numbers, and a timeline with a span of each kind."""

from __future__ import annotations

from support.internals.timeline import Collective, Event, Timeline


def rows(count: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for step in range(1, count + 1):
        found.append(
            {
                "step": step,
                "loss": 5.0 / step,
                "grad_norm": 1.0,
                "learning_rate": 1e-3 * step,
                "tokens": 100 * step,
                "seconds": 0.5,
                "mfu": 0.25,
                "hfu": 0.25,
                "memory": {
                    "0-2,5": {"parameters": 1000, "optimizer": 2000, "peak": 10**8},
                    "3-4": {"parameters": 3000, "optimizer": 6000, "peak": 2 * 10**8},
                },
            }
        )
        if step % 2 == 0:
            found.append({"step": step, "validation_loss": 6.0 / step})
    return found


def of(kind: str, label: str, axis: str, rank: int, start: float) -> Event:
    collective = Collective(kind=kind, axis=axis, shape=(4,), label=label)
    return Event.of(collective, rank=rank, start=start, end=start + 0.5)


def layouts() -> Timeline:
    """Two ranks, sharded and cut within layers, and a span of each kind."""
    events = []
    for rank in range(2):
        events += [
            Event(name="forward", lane="compute", rank=rank, start=0.0, end=2.0),
            Event(name="backward", lane="compute", rank=rank, start=2.0, end=5.0),
            Event(name="optimizer", lane="compute", rank=rank, start=5.0, end=6.0),
            Event(name="data", lane="compute", rank=rank, start=6.0, end=6.5),
            of("all_gather", "unshard layers.0", "shard", rank, 0.0),
            of("reduce_scatter", "reduce layers.0", "shard", rank, 4.0),
            of("all_reduce", "reduce bucket 0", "replicate", rank, 4.5),
            of("all_reduce", "layers.0.attention forward", "tensor", rank, 1.0),
            of("all_reduce", "gradient norm", "shard", rank, 5.0),
        ]
    return Timeline(events)
