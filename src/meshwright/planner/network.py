"""Collectives: latency, and bytes over the links that a group of ranks has for itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.planner.constants import Constants
from meshwright.planner.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Group:
    """``size`` ranks, each ``stride`` after the one before, and the machine below them.

    A ring over whole nodes has all their cards; one with a rank in each node has one card, since
    its neighbors do the same beside it. 365 of 400 GB/s were measured on 4 x 8 H200.
    """

    size: int
    stride: int
    hardware: Hardware

    @property
    def local(self) -> int:
        """Ranks of the group in one node."""
        return max(1, min(self.size, self.hardware.node // self.stride))

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.local)

    def rate(self, constants: Constants) -> float:
        """Bytes a second through each rank of a ring."""
        links = self.hardware.intra_gbps * 1e9 * constants.links
        if self.nodes == 1:
            return links
        return min(links, self.local * self.hardware.inter_gbps * 1e9 * constants.network)

    def gather(self, size: float, constants: Constants) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``size`` bytes in all."""
        if self.size < 2:
            return 0.0
        hops = constants.hop * math.log2(self.nodes) if self.nodes > 1 else 0.0
        moved = (self.size - 1) / self.size * size
        return constants.latency + hops + moved / self.rate(constants)

    def reduce(self, size: float, constants: Constants) -> float:
        """Seconds of an all-reduce of ``size`` bytes on each rank.

        Between nodes it is a tree over the nodes' sums: less than a ring where they are few.
        """
        if self.size < 2:
            return 0.0
        links = self.hardware.intra_gbps * 1e9 * constants.links
        inside = 2 * (self.local - 1) / self.local * size / links
        if self.nodes == 1:
            return constants.latency + inside
        outside = 2 * (self.nodes - 1) / self.nodes * size / self.rate(constants)
        hops = 2 * constants.hop * math.log2(self.nodes)
        return constants.latency + hops + max(inside, outside)

    def exchange(self, size: float, copies: int, constants: Constants) -> float:
        """Seconds of an all-to-all in which each rank sends ``size`` bytes in all.

        They are ``copies`` of each token, of which one travels to each other node, as DeepSeek-AI's
        DeepEP sends them.
        """
        if self.size < 2:
            return 0.0
        inside = (self.size - 1) / self.size * size / (self.hardware.intra_gbps * 1e9)
        nodes = self.nodes
        distinct = (nodes - 1) * (1 - (1 - 1 / nodes) ** copies) / copies
        outside = distinct * size / (self.hardware.inter_gbps * 1e9)
        return constants.latency + max(inside, outside) / constants.exchange

    def send(self, size: float, constants: Constants) -> float:
        """Seconds of a message to the next rank of the group."""
        if self.size < 2:
            return 0.0
        near = self.hardware.intra_gbps * constants.links
        far = self.hardware.inter_gbps * constants.network
        return constants.latency + size / (1e9 * (near if self.local > 1 else far))
