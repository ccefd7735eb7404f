"""Rules of axis tensor: styles by their names in plans, and sets of rules for known models.

A plan gives ``[tensor] rules`` as a table of patterns and styles, as the name of a set, or as
"model": then the words of the plan that the model carries are read as these styles::

    style                 weight                   input                    output
    colwise               output features sharded  whole                    its part of the features
    colwise_2, colwise_3  the same for each of     whole                    its part of each
                          2 or 3 matrices
    colwise_gathered      output features sharded  whole                    the whole, gathered
    rowwise               input features sharded   its part of the features the whole, summed
    rowwise_scattered     input features sharded   whole                    the whole, summed
    embedding             rows of a table sharded  ids                      the whole, summed
    replicated            whole                    sharded activations      the same part
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import AnyPlacement
from meshwright.comm.dtensors.gather_dtensor import side_by_side
from meshwright.composition.carried_plans import carried_plan, carries
from meshwright.composition.whole_run import AxisSplit
from meshwright.layout import Replicate, Shard
from meshwright.mesh import DeviceMesh
from meshwright.plan import Plan, match_names
from meshwright.settings import Problem, nearest
from meshwright.tensor_parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from meshwright.tensor_parallel.functions import copy_to
from meshwright.tensor_parallel.layouts import Site
from meshwright.tensor_parallel.own_parameters import OwnParameters


class _Replicated(SequenceParallel):
    """Replicated parameters on local activations that are sharded along any dim.

    The dim does not matter: gradients of the parameters are partial sums in any case.
    """

    def __init__(self) -> None:
        super().__init__(use_local_output=True)
        self.sequence_dim = None


class _SharedTail(ParallelStyle):
    """A whole layer whose last features, the rotated keys of all heads, go into attention.

    Each rank uses them for its own heads, so their gradients are summed over the ranks; the other
    features go on to a layer that sums by itself.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._site = self.site_of(module, device_mesh)
        return module

    def finish(self, root: nn.Module) -> None:
        """Register the hook: the module above says how many features are rotated."""
        name = self._site.labels.name
        width = getattr(root.get_submodule(name.rpartition(".")[0]), "qk_rope_head_dim", None)
        if not isinstance(width, int):
            raise ValueError(
                f"'{name}' has the style mla_kv_a_proj, and the module above it has no "
                "qk_rope_head_dim, the number of its features that attention uses directly"
            )
        hook = partial(_sum_tail, self._site, width)
        root.get_submodule(name).register_forward_hook(hook)


def _sum_tail(
    site: Site, width: int, module: nn.Module, inputs: object, output: torch.Tensor
) -> torch.Tensor:
    """Forward hook: has the gradient of the last ``width`` features summed over the ranks."""
    head, tail = output.split([output.shape[-1] - width, width], dim=-1)
    return torch.cat([head, copy_to(tail, site.axis, site.labels)], dim=-1)


class _Divided(ParallelStyle):
    """A module that every rank runs inside of one whose outputs are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = self.site_of(module, device_mesh).axis.size
        module.register_forward_pre_hook(partial(_divide, ranks))
        return module


def _divide(ranks: int, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> object:
    """Forward pre-hook: each of ``ranks`` computes an equal part of the sum."""
    return (inputs[0] / ranks, *inputs[1:])


STYLES: Mapping[str, Callable[[], ParallelStyle]] = MappingProxyType(
    {
        "colwise": ColwiseParallel,
        "colwise_2": partial(FusedColwiseParallel, 2),
        "colwise_3": partial(FusedColwiseParallel, 3),
        "colwise_gathered": partial(ColwiseParallel, output_layouts=Replicate()),
        "rowwise": RowwiseParallel,
        "rowwise_scattered": partial(RowwiseParallel, input_layouts=Replicate()),
        "embedding": partial(RowwiseParallel, input_layouts=Replicate()),
        "replicated": _Replicated,
    }
)
"""The styles that a plan may name."""

_CARRIED: Mapping[str, Callable[[], ParallelStyle]] = MappingProxyType(
    {
        "sequence_parallel": partial(SequenceParallel, use_local_output=True),
        "mla_kv_a_proj": _SharedTail,
        "moe_identity_expert": _Divided,
    }
)
"""Words of plans that models carry that no plan of ours may name."""
_OWN = MappingProxyType({"moe_tp_experts": True, "all_reduce": True, "local_params": False})
"""Words for modules that compute with parameters of their own: are their outputs summed?"""

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "colwise_gather_output": "colwise_gathered",
        "colwise_rep": "colwise_gathered",
        "rowwise_split_input": "rowwise_scattered",
        "rowwise_rep": "rowwise_scattered",
        "embedding_rowwise": "embedding",
        "embedding_colwise": "colwise_gathered",
        "packed_colwise": "colwise_2",
        "replicated_with_grad_allreduce": "replicated",
        **{word: word for word in (*_CARRIED, *_OWN)},
        "replicate": "",
    }
)
"""The words for modules in plans that models carry, and our styles; "" leaves a module as it is."""

_PARAMETERS: Mapping[str, Callable[[int], AnyPlacement | None]] = MappingProxyType(
    {
        "colwise": lambda dims: Shard(max(dims - 2, 0)),
        "rowwise": lambda dims: Shard(dims - 1),
        "packed_colwise": lambda dims: side_by_side(dims - 2, 2) if dims > 1 else Shard(0),
        "packed_rowwise": lambda dims: side_by_side(dims - 1, 2) if dims > 1 else None,
        "replicate": lambda dims: None,
    }
)
"""The words for single parameters: their placements, by number of dims; None leaves them whole."""

_LLAMA = {
    "**.self_attn.q_proj": "colwise",
    "**.self_attn.k_proj": "colwise",
    "**.self_attn.v_proj": "colwise",
    "**.self_attn.q_norm": "replicated",
    "**.self_attn.k_norm": "replicated",
    "**.self_attn.o_proj": "rowwise",
    "**.mlp.gate_proj": "colwise",
    "**.mlp.up_proj": "colwise",
    "**.mlp.down_proj": "rowwise",
    "**.embed_tokens": "embedding",
    "**.lm_head": "colwise_gathered",
}

_ATTENTION_OF_CLIP = {
    "**.q_proj": "colwise",
    "**.k_proj": "colwise",
    "**.v_proj": "colwise",
    "**.out_proj": "rowwise",
    "**.fc1": "colwise",
    "**.fc2": "rowwise",
}

RULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "language-model": {
            "embedding": "embedding",
            "layers.*.attention.wq": "colwise",
            "layers.*.attention.wk": "colwise",
            "layers.*.attention.wv": "colwise",
            "layers.*.attention.wo": "rowwise",
            "layers.*.feed_forward.w1": "colwise",
            "layers.*.feed_forward.w3": "colwise",
            "layers.*.feed_forward.w2": "rowwise",
            "head": "colwise_gathered",
        },
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "gemma": _LLAMA,
        # Experts are parameters of three dims, and replicated.
        "mixtral": _LLAMA,
        "gpt2": {
            "**.wte": "embedding",
            "**.attn.c_attn": "colwise_3",
            "**.attn.c_proj": "rowwise",
            "**.mlp.c_fc": "colwise",
            "**.mlp.c_proj": "rowwise",
            "**.lm_head": "colwise_gathered",
        },
        # Query, key and value of one head are adjacent, so plain column shards have full heads.
        "gpt_neox": {
            "**.embed_in": "embedding",
            "**.attention.query_key_value": "colwise",
            "**.attention.dense": "rowwise",
            "**.mlp.dense_h_to_4h": "colwise",
            "**.mlp.dense_4h_to_h": "rowwise",
            "**.lm_head": "colwise_gathered",
        },
        # The word table is tied to a head whose bias is not its own module's: both are replicated.
        "bert": {
            "**.self.query": "colwise",
            "**.self.key": "colwise",
            "**.self.value": "colwise",
            "**.intermediate.dense": "colwise",
            "**.output.dense": "rowwise",
        },
        "t5": {
            "**.shared": "embedding",
            "**.embed_tokens": "embedding",
            "**.q": "colwise",
            "**.k": "colwise",
            "**.v": "colwise",
            "**.o": "rowwise",
            "**.relative_attention_bias": "colwise",
            "**.wi": "colwise",
            "**.wi_0": "colwise",
            "**.wi_1": "colwise",
            "**.wo": "rowwise",
            "**.lm_head": "colwise_gathered",
        },
        "vit": {
            "**.attention.q_proj": "colwise",
            "**.attention.k_proj": "colwise",
            "**.attention.v_proj": "colwise",
            "**.attention.o_proj": "rowwise",
            "**.mlp.fc1": "colwise",
            "**.mlp.fc2": "rowwise",
        },
        "clip": {**_ATTENTION_OF_CLIP, "**.token_embedding": "embedding"},
        "whisper": {
            **_ATTENTION_OF_CLIP,
            "**.embed_tokens": "embedding",
            "**.proj_out": "colwise_gathered",
        },
    }
)
"""Sets of rules by name: of this library's language model, and of Hugging Face's models."""

WIDTHS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": {"**.attn": "split_size"},
        "t5": {"**.SelfAttention": "n_heads", "**.EncDecAttention": "n_heads"},
        "whisper": {"**.self_attn": "num_heads", "**.encoder_attn": "num_heads"},
    }
)
"""By set, attributes of modules (numbers of features or heads) to divide by the ranks."""

_HEADS = (
    "num_heads",
    "n_heads",
    "num_attention_heads",
    "n_head",
    "nhead",
    "num_key_value_heads",
    "n_kv_heads",
    "num_kv_heads",
)
"""Attributes of attention modules, or of their ``config``, with the number of heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCut:
    """The rules of a plan for the modules of one model, by their names."""

    styles: Mapping[str, str]
    widths: Mapping[str, str]
    """Attributes as in `WIDTHS`."""
    ranks: int
    own: Mapping[str, Mapping[str, AnyPlacement]] = field(default_factory=dict)
    """Placements of parameters that modules compute with themselves, by module and parameter."""

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> ModelCut:
        """Match the rules of ``plan`` to modules of ``model``; none if axis tensor has one rank."""
        rules, ranks = plan.tensor.rules, plan.axes.size("tensor")
        if rules is None or ranks == 1:
            return cls(styles={}, widths={}, ranks=ranks)
        names = [name for name, _ in model.named_modules()]
        if rules == CARRIED:
            return cls._carried(model, names, plan)
        by_name = isinstance(rules, str)
        styles = RULES.get(rules, {}) if by_name else rules
        widths = WIDTHS.get(rules, {}) if by_name else {}
        return cls(styles=_matched(styles, names), widths=_matched(widths, names), ranks=ranks)

    @classmethod
    def _carried(cls, model: nn.Module, names: Sequence[str], plan: Plan) -> ModelCut:
        words, ranks = carried_plan(model, "tp_plan"), plan.axes.size("tensor")
        styles = {name: WORDS.get(word, "") for name, word in _matched(words, names).items()}
        own: dict[str, dict[str, AnyPlacement]] = {}
        dims = {name: parameter.dim() for name, parameter in model.named_parameters()}
        for name, word in _matched(words, [*dims]).items():
            path, _, key = name.rpartition(".")
            placement = _PARAMETERS[word](dims[name]) if word in _PARAMETERS else None
            if placement is not None:
                own.setdefault(path, {})[key] = placement
                if styles.get(path, "") not in _OWN:
                    styles[path] = "local_params"
        # Axis expert gives each rank whole experts.
        by_expert = [n for n, style in styles.items() if style == "moe_tp_experts"]
        apart = tuple(f"{n}." for n in by_expert if plan.axes.size("expert") > 1)
        kept = {n: style for n, style in styles.items() if style and not f"{n}.".startswith(apart)}
        return cls(styles=kept, widths={}, ranks=ranks, own=own)

    def style_of(self, name: str) -> ParallelStyle:
        """Make the style of the module called ``name``."""
        style = self.styles[name]
        if style in _OWN:
            return OwnParameters(self.own.get(name, {}), is_summed=_OWN[style])
        return (STYLES.get(style) or _CARRIED[style])()

    def set_widths(self, model: nn.Module) -> None:
        """Divide the width attributes of modules of ``model``, or of a stage, by the ranks."""
        for name, module in model.named_modules():
            attribute = self.widths.get(name, "")
            width = vars(module).get(attribute)
            if isinstance(width, int):
                setattr(module, attribute, width // self.ranks)


def origin_of_rules(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Say where the rules of axis tensor come from, and how many modules or parameters each has."""
    rules = plan.tensor.rules
    if rules is None or plan.axes.size("tensor") == 1:
        return
    if rules == CARRIED:
        whose, table = f"the tp_plan of {type(model).__name__}", carried_plan(model, "tp_plan")
    elif isinstance(rules, str):
        whose, table = f"the set {rules!r} of meshwright", RULES[rules]
    else:
        whose, table = "a table of the plan", rules
    names = [name for each in (model.named_modules(), model.named_parameters()) for name, _ in each]
    counts = {pattern: len(match_names(pattern, names)) for pattern in table}
    used = [f"{pattern} = {table[pattern]} ({count})" for pattern, count in counts.items() if count]
    idle = ", ".join(pattern for pattern, count in counts.items() if not count)
    rest = f"; nothing is called {idle}" if idle else ""
    yield f"tensor.rules: from {whose}: {', '.join(used)}{rest}"


def tensor_split(axis: Communicator) -> AxisSplit:
    """How axis tensor splits a model: every rank computes all of its outputs."""
    return AxisSplit(
        axis=axis,
        judges=axis,
        setting="[tensor] rules",
        on_shapes="Give the last module a style that gathers its output, such as "
        '"colwise_gathered" or "rowwise"',
        on_outputs="the styles of [tensor] rules do not fit together, or the model computes with "
        "sizes that are cut",
        on_gradients="Where its module computes on activations that are cut, give it the style "
        '"replicated" in [tensor] rules',
    )


CARRIED = "model"
"""The word for rules that the model carries."""


def _matched(table: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: found for pattern, found in table.items() for name in match_names(pattern, names)}


def rule_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield the rules that do not fit the model or the number of ranks."""
    rules, ranks = plan.tensor.rules, plan.axes.size("tensor")
    if rules is None or ranks == 1:
        return
    key, styles = ("tensor", "rules"), ModelCut.of(model, plan).styles
    if rules == CARRIED:
        yield from _carried_problems(model, styles)
    elif isinstance(rules, str):
        if rules not in RULES:
            hint = _hint(rules, [*RULES, CARRIED])
            yield Problem(key, f"there is no set of [tensor] rules called {rules!r}; {hint}")
        elif not styles:
            yield Problem(
                key,
                f"[tensor] rules {rules!r} match no module of {type(model).__name__}: give a "
                "table of patterns and styles",
            )
    else:
        for pattern, style in rules.items():
            if style not in STYLES:
                hint = _hint(style, [*STYLES])
                yield Problem((*key, pattern), f"unknown style {style!r} in [tensor] rules; {hint}")
    uneven: dict[tuple[str, int], list[str]] = {}
    for name, style in styles.items():
        for heads in _heads_at(model, name).items() if style in _BY_HEADS else ():
            if heads[1] % ranks:  # a part of a head would attend to other scores
                uneven.setdefault(heads, []).append(name)
    for (attribute, count), names in uneven.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Problem(
            ("axes", "tensor"),
            f"{names[0]!r}{others} cannot be split over tensor = {ranks} ranks: the attention has "
            f"{attribute} = {count}, which is no multiple of {ranks}",
        )


_BY_HEADS = ("colwise", "colwise_2", "colwise_3")
"""Styles whose outputs stay cut, so that attention after them sees some of the heads."""


def _carried_problems(model: nn.Module, styles: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what cannot be read of the tensor plan that ``model`` carries."""
    key, words = ("tensor", "rules"), carried_plan(model, "tp_plan")
    if not words:
        yield Problem(
            key,
            f'[tensor] rules = "model": {carries(model)}, and no tp_plan. Give the name of a set '
            f"({', '.join(RULES)}), or a table of patterns and styles",
        )
        return
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    for pattern, word in words.items():
        for names, known in ((modules, [*WORDS]), (parameters, [*_PARAMETERS])):
            is_new = word not in {*WORDS, *_PARAMETERS}
            if word not in known and (is_new or match_names(pattern, names)):
                yield Problem(
                    key,
                    f'[tensor] rules = "model": the tp_plan of {type(model).__name__} gives '
                    f"{pattern!r} the word {word!r}, which is not known; {_hint(word, known)}",
                )
                break
    if not styles:
        close = {n for p in words for n in difflib.get_close_matches(p, modules, n=1, cutoff=0.4)}
        yield Problem(
            key,
            f'[tensor] rules = "model": no pattern of the tp_plan of {type(model).__name__} '
            f"({', '.join(words)}) matches a module; the nearest names are "
            f"{', '.join(sorted(close)) or ', '.join(modules[:8])}",
        )


def _hint(given: str, known: Sequence[str]) -> str:
    close = nearest(given, known)
    return f"did you mean {close!r}?" if close else f"there are {', '.join(known)}"


def _heads_at(model: nn.Module, name: str) -> dict[str, int]:
    """The numbers of heads that divide the columns of module ``name``, by attribute."""
    parent: Any = model.get_submodule(name.rpartition(".")[0])
    width = getattr(parent, "head_dim", None)
    config: Any = getattr(parent, "config", None)
    if getattr(config, "is_heterogeneous", False):  # its layers have numbers of their own
        index = getattr(parent, "layer_idx", None)
        config = None if index is None else config.per_layer_config[index]
    counts = _heads_of(parent)
    if counts or isinstance(width, int):  # else its config describes a model, not this module
        counts = {**counts, **_heads_of(config)}
    features = getattr(model.get_submodule(name), "out_features", None)
    if not counts and isinstance(width, int) and isinstance(features, int) and width > 0:
        counts = {"heads": features // width}
    return counts


def _heads_of(holder: object) -> dict[str, int]:
    found = {attribute: getattr(holder, attribute, None) for attribute in _HEADS}
    return {attribute: count for attribute, count in found.items() if isinstance(count, int)}
