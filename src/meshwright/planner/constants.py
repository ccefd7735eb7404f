"""The numbers that no data sheet has: each with its meaning, its range and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


def _in(value: float, prior: float, low: float, high: float, source: str) -> float:
    """A constant: its fitted value, what one would guess from its source alone, and its range."""
    return field(
        default=value, metadata={"prior": prior, "low": low, "high": high, "source": source}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Fitted to all published runs, within ranges that physics and measurements allow."""

    product_ampere: float = _in(
        0.862, 0.88, 0.7, 1.0, "share of the measured ceiling that products of a model reach"
    )
    product_hopper: float = _in(
        0.773, 0.8, 0.55, 1.0, "the same; power caps clocks under full load"
    )
    product_blackwell: float = _in(0.858, 0.8, 0.5, 1.0, "the same")
    fp8: float = _in(1.0, 0.9, 0.4, 1.0, "further share of the fp8 ceiling that remains")
    half_size: float = _in(30.0, 120, 30, 400, "smallest dim at which a product has half its rate")
    flash_first: float = _in(
        0.417, 0.4, 0.25, 0.55, "share of the ceiling; on A100, 2307.08691: 30-50 %"
    )
    flash_second: float = _in(0.597, 0.65, 0.4, 0.8, "the same for version 2, 2307.08691: 50-73 %")
    flash_third: float = _in(
        0.619, 0.65, 0.4, 0.85, "kernels of the generation, 2407.08608: up to 75 %"
    )
    ported: float = _in(0.595, 0.6, 0.4, 0.9, "of it, one generation later; 2407.08608: 350 of 740")
    scores: float = _in(14.6, 13, 6, 30, "bytes moved for each score without flash, 2205.05198")
    elementwise: float = _in(48.4, 40, 15, 90, "bytes moved for each value of hidden size, forward")
    compiled: float = _in(0.455, 0.5, 0.3, 1.0, "share of these that fused kernels move")
    quantize: float = _in(
        5.91, 6, 0, 20, "bytes for each input of an fp8 product to scale and cast"
    )
    launch: float = _in(
        3e-05, 15e-6, 3e-6, 40e-6, "seconds for which the host is busy with a kernel"
    )
    uneven: float = _in(
        0.232, 0.2, 0.0, 0.4, "slower where host and kernels are as fast: each waits at times"
    )
    links: float = _in(
        0.762, 0.78, 0.6, 0.95, "share of NVLink's rate; A100 235 of 300, H100 367 of 450"
    )
    network: float = _in(0.596, 0.7, 0.4, 0.95, "share of the cards' rate; H200 365 of 400")
    latency: float = _in(2.88e-05, 25e-6, 8e-6, 80e-6, "seconds before a collective moves data")
    hop: float = _in(5.29e-06, 5e-6, 1e-6, 30e-6, "seconds for each doubling of its nodes")
    tensor_overlap: float = _in(
        0.679, 0.5, 0.0, 0.9, "share of tensor collectives hidden where cut"
    )
    data_overlap: float = _in(
        0.771, 0.7, 0.2, 1.0, "share of compute that may hide data collectives"
    )
    contention: float = _in(1.19, 1.1, 1.0, 1.35, "slower compute beside a collective")
    optimizer: float = _in(34.5, 34, 28, 80, "bytes moved for each parameter by the optimizer")
    step: float = _in(0.00735, 0.01, 0.0, 0.06, "seconds of the host for each step")
    straggle: float = _in(
        0.00259, 0.005, 0.0, 0.03, "slower for each doubling of nodes: the slowest counts"
    )
    dispatch: float = _in(31.1, 30, 6, 60, "bytes for each routed value to permute and to sum")
    ring: float = _in(0.313, 0.3, 0.0, 0.9, "slower attention by parts of the keys, at many parts")
    deterministic: float = _in(
        2.0, 1.5, 1.0, 3.0, "slower backward of attention that adds in order"
    )
    exchange: float = _in(0.78, 0.7, 0.2, 0.95, "share of the links that an all-to-all reaches")


def ranges() -> Mapping[str, tuple[float, float]]:
    """The range of each constant, by name."""
    return {f.name: (f.metadata["low"], f.metadata["high"]) for f in fields(Constants)}


def priors() -> Constants:
    """Every constant before any run is looked at."""
    return Constants(**{f.name: f.metadata["prior"] for f in fields(Constants)})
