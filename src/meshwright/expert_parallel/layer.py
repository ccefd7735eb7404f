"""The class around a module of experts, each on one rank of an axis.

Tokens go to the ranks of their experts and come back (`exchange`); in between this rank's experts
run on local leaves. Every rank takes part in every exchange, with however many tokens.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.comm.dtensors.local_leaves import is_taken_over, local_part_of
from meshwright.comm.graphs.untraced import untraced
from meshwright.comm.streams import is_host
from meshwright.expert_parallel.arithmetic import fused_experts
from meshwright.expert_parallel.exchange import Route, moved, pairs_of, plan_route
from meshwright.expert_parallel.forms import ExpertForm
from meshwright.expert_parallel.routing import OWN_LOSS, ROUTING, count_tokens
from meshwright.gradients import mean_axes
from meshwright.tensor_parallel.functions import copy_to, gather_from, own_part, scatter_to
from meshwright.tensor_parallel.layouts import Site
from meshwright.torch_internals.autograd import running_backward
from meshwright.torch_internals.tensors import version_of

Exchange = Literal["tokens", "pairs"]


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """The settings of the style for one module. Copies of the module share them."""

    site: Site
    form: ExpertForm
    experts: int
    exchange: Exchange
    own_auxiliary: bool
    """True when the model may compute an auxiliary loss of this rank's tokens itself."""
    slices: Communicator | None = None
    """Ranks with the same tokens, each of which computes a slice of them."""
    partial: tuple[()] = ()
    """Gradients of no parameter lack a sum over this axis."""
    routes: weakref.WeakSet[Route] = field(default_factory=weakref.WeakSet)
    """Those whose graphs are alive: a recomputation has to find its own among them."""
    ungraphed: deque[tuple[list[int], int]] = field(default_factory=lambda: deque(maxlen=128))
    """The counts of the last forwards without a graph, each with a hash of where tokens went:
    reentrant recomputation begins like that, and has to find its own here."""

    def __deepcopy__(self, memo: object) -> ExpertSettings:
        return self


class ExpertLayer(nn.Module):
    """The mixin that `ExpertParallel` puts before a module's own class."""

    _meshwright_style: ExpertSettings

    def forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """Send each token to its experts, wherever they are, and add up what they return.

        Raises ValueError for indices of no expert, and for a model with an auxiliary loss of its
        own; RuntimeError when a recomputation routes differently.
        """
        if options:
            own = inspect.signature(super().forward).bind(*inputs, **options)
            inputs = own.args
        return untraced(self._run, *inputs)

    def extra_repr(self) -> str:
        """Add the axis to the module's own ``extra_repr``."""
        own, settings = super().extra_repr(), self._meshwright_style
        axis = settings.site.axis
        text = f"{settings.experts} experts over axis {axis.axis} of {axis.size} ranks"
        return f"{own}{', ' if own else ''}{text}"

    def _run(
        self, hidden: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        settings = self._meshwright_style
        self._check_config()
        x = hidden.reshape(-1, hidden.shape[-1])
        if settings.form is ExpertForm.COUNTED:
            indices = _sorted_experts(routing, len(x), settings)
        else:
            indices = routing.reshape(-1, routing.shape[-1])
            weights = self._checked_weights(weights, routing, len(x)).reshape(indices.shape)
        routed, slices, labels = indices, settings.slices, settings.site.labels
        if slices is not None:
            x, indices = scatter_to(x, slices, labels, dim=0), own_part(indices, slices, 0)
            weights = None if weights is None else scatter_to(weights, slices, labels, dim=0)
        n, k = indices.shape
        is_weighed_here = settings.exchange == "pairs" and settings.form is ExpertForm.FUSED
        if settings.exchange == "pairs":  # each one a token of its own, with one expert
            x, indices = x.repeat_interleave(k, 0), indices.reshape(-1, 1)
        travels = None if weights is None or is_weighed_here else weights.reshape(indices.shape)
        y = self._on_ranks(x, indices, travels)
        count_tokens(self, routed, settings.experts)
        if settings.exchange == "pairs" and settings.form is not ExpertForm.COUNTED:
            y = y.view(n, k, y.shape[-1])
            y = (y * weights.unsqueeze(-1) if is_weighed_here and weights is not None else y).sum(1)
        y = y.to(hidden.dtype)
        if slices is not None:
            y = gather_from(y, slices, labels, dim=0, total=len(routed))
        return y.view(hidden.shape)

    def _on_ranks(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the sum of each token's experts, weighed where ``weights`` are given."""
        settings = self._meshwright_style
        route = plan_route(indices, settings.experts, settings.site.axis, settings.site.labels.name)
        self._note(route)
        narrow = route.indices.to(torch.int16 if settings.experts < 2**15 else torch.int32)
        given = (x, narrow) if weights is None else (x, weights, narrow)
        rows, *scales, slots = moved(route, given, back=False)
        places, experts = pairs_of(route, slots, settings.experts)
        (pairs,) = moved(places, [rows], back=False)
        scale = scales[0].reshape(-1).index_select(0, places.at) if scales else None
        y = self._computed(pairs, route, experts, scale)
        (y,) = moved(places, [y], back=True)
        (y,) = moved(route, [y.to(x.dtype)], back=True, guard=self._written())
        if not y.requires_grad and running_backward() == -1:
            settings.ungraphed.append((route.counts, _hash_of(route.indices)))
        return y

    def _computed(
        self,
        pairs: torch.Tensor,
        route: Route,
        experts: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run this rank's experts on ``pairs``, sorted by expert."""
        form = self._meshwright_style.form
        if form is ExpertForm.FUSED:
            held = [key for key, parameter in self._parameters.items() if parameter is not None]
            leaves = {key: self._local(key) for key in held}
            y = fused_experts(self, pairs, route, experts, leaves)
            return y if scale is None else y * scale.unsqueeze(-1)
        with self._on_leaves(len(route.here)) as leaves:
            if not len(pairs):  # zeros of no elements, which give every parameter its gradient
                used = [leaf.reshape(-1)[:0].sum() for leaf in leaves if leaf.is_floating_point()]
                return sum(used, pairs if scale is None else pairs * scale.unsqueeze(-1))
            if form is ExpertForm.COUNTED:
                return super().forward(pairs, torch.diff(route.ends, prepend=route.ends[:1] * 0))
            if scale is None:
                raise AssertionError("tokens of a module with weights travel with them")
            return super().forward(pairs, experts.unsqueeze(-1), scale.unsqueeze(-1))

    def _local(self, key: str) -> torch.Tensor:
        """Return this rank's experts of a parameter; their gradient is that of all slices."""
        parameter, slices = getattr(self, key), self._meshwright_style.slices
        self._check_unit(key, parameter)
        part = local_part_of(parameter)
        return part if slices is None else copy_to(part, slices, self._meshwright_style.site.labels)

    @contextmanager
    def _on_leaves(self, count: int) -> Iterator[list[torch.Tensor]]:
        """Have the module hold ``count`` experts, as local leaves, in the block."""
        at_rest = {key: p for key, p in self._parameters.items() if is_dtensor(p)}
        number = vars(self).get("num_experts")
        try:
            parts: dict[str, Any] = {key: self._local(key) for key in at_rest}
            self._parameters.update(parts)
            if number is not None:
                vars(self)["num_experts"] = count
            yield [getattr(self, key) for key, p in self._parameters.items() if p is not None]
        finally:
            self._parameters.update(at_rest)
            if number is not None:
                vars(self)["num_experts"] = number

    # ------------------------------------------------------------------ what is checked

    def _check_config(self) -> None:
        settings = self._meshwright_style
        routing, config = vars(self).get(ROUTING), getattr(self, "config", None)
        own = getattr(config, OWN_LOSS, False) if routing is None else routing.has_own_loss
        if own and not settings.own_auxiliary:
            raise ValueError(
                f"axis {settings.site.axis.axis}: the model returns an auxiliary loss of its own "
                "(output_router_logits=True), computed from this rank's tokens. Set it to False "
                'and give [expert] auxiliary and balance = "global", or set balance = "rank"'
            )

    def _check_unit(self, key: str, parameter: nn.Parameter) -> None:
        """Raise RuntimeError where data-parallel ranks would not reduce a gradient of experts."""
        is_trained = parameter.requires_grad and torch.is_grad_enabled()
        # Where no rank holds the same experts, a unit gathers nothing, and shapes do not tell.
        if is_trained and mean_axes((parameter,)) and not is_taken_over(parameter):
            raise RuntimeError(
                f"'{self._meshwright_style.site.labels.name}' is called outside of its unit of "
                f"fully_shard, which would not reduce this gradient of {key}. Where several blocks "
                "share these experts, shard a module that holds all of the blocks, as one unit"
            )

    def _checked_weights(
        self, weights: torch.Tensor | None, indices: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        found = None if weights is None else tuple(weights.shape)
        if weights is None or weights.shape != indices.shape or indices[..., 0].numel() != tokens:
            settings = self._meshwright_style
            raise ValueError(
                f"axis {settings.site.axis.axis}: '{settings.site.labels.name}' got {tokens} "
                f"tokens, indices of shape {tuple(indices.shape)} and weights of shape {found}: "
                "expected both of shape (tokens, experts of each)"
            )
        return weights

    def _note(self, route: Route) -> None:
        """Compare a recomputed route with the first."""
        settings = self._meshwright_style
        if running_backward() == -1:
            settings.routes.add(route)
            return
        routes = list(settings.routes)
        known = [r.counts for r in routes] + [counts for counts, _ in settings.ungraphed]
        if not known or any(_is_same(route, r) for r in routes):
            return
        if route.counts in known and (route.counts, _hash_of(route.indices)) in settings.ungraphed:
            return
        nearest = min(known, key=lambda counts: _difference(counts, route.counts))
        pairs = enumerate(zip(route.counts, nearest, strict=True))
        other = [f"expert {e}: {now} tokens, {before} before" for e, (now, before) in pairs
                 if now != before]  # fmt: skip
        raise RuntimeError(
            f"axis {route.axis.axis}: the router of '{route.name}' routed differently when "
            f"recomputed ({other[0] if other else 'as many tokens to each expert, but others'}). "
            "Make it a function of its input only"
        )

    def _written(self) -> Callable[[], None]:
        """Make a check that nothing has written parameters since: autograd sees the leaves only."""
        held = [(key, p, version_of(p)) for key, p in self._parameters.items()
                if p is not None and is_dtensor(p) and not p.is_inference()]  # fmt: skip
        name = self._meshwright_style.site.labels.name

        def check() -> None:
            for key, parameter, version in held:
                if version_of(parameter) != version:
                    raise RuntimeError(
                        f"{name}.{key} has been modified by an inplace operation between forward "
                        f"and backward (version {version_of(parameter)}, expected {version}): step "
                        "the optimizer after the backward, or run the forward again"
                    )

        return check


def _sorted_experts(counts: torch.Tensor, rows: int, settings: ExpertSettings) -> torch.Tensor:
    """Return the expert of each row (rows, 1), for rows that are sorted by expert."""
    numbers = counts.long()
    if is_host(counts.device) and (len(counts) != settings.experts or int(numbers.sum()) != rows):
        raise ValueError(
            f"axis {settings.site.axis.axis}: '{settings.site.labels.name}' got {rows} rows and "
            f"counts {counts.tolist()}: expected {settings.experts} counts that add up to the rows"
        )
    each = torch.arange(settings.experts, device=counts.device)
    return each.repeat_interleave(numbers, output_size=rows).unsqueeze(1)


def _is_same(route: Route, known: Route) -> bool:
    if route.counts != known.counts:
        return False
    # On a device a comparison of all indices would stop the host.
    return not is_host(route.indices.device) or torch.equal(route.indices, known.indices)


def _hash_of(indices: torch.Tensor) -> int:
    """Hash which experts tokens go to; 0 on a device, where the host would have to wait."""
    return hash(indices.cpu().numpy().tobytes()) if is_host(indices.device) else 0


def _difference(counts: list[int], others: list[int]) -> int:
    return sum(abs(a - b) for a, b in zip(counts, others, strict=True))
