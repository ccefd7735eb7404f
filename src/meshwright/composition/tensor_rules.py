"""Rules of axis tensor: styles by their names in plans, and sets of rules for known models.

A plan gives ``[tensor] rules`` as a table of patterns and styles, or as the name of a set::

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import nn

from meshwright.comm import Communicator
from meshwright.composition.whole_run import AxisSplit
from meshwright.layout import Replicate
from meshwright.plan import Plan, match_names
from meshwright.settings import Problem, nearest
from meshwright.tensor_parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)


class _Replicated(SequenceParallel):
    """Replicated parameters on local activations that are sharded along any dim.

    The dim does not matter: gradients of the parameters are partial sums in any case.
    """

    def __init__(self) -> None:
        super().__init__(use_local_output=True)
        self.sequence_dim = None


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

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> ModelCut:
        """Match the rules of ``plan`` to modules of ``model``; none if axis tensor has one rank."""
        rules, ranks = plan.tensor.rules, plan.axes.size("tensor")
        if rules is None or ranks == 1:
            return cls(styles={}, widths={}, ranks=ranks)
        names = [name for name, _ in model.named_modules()]
        by_name = isinstance(rules, str)
        styles = RULES.get(rules, {}) if by_name else rules
        widths = WIDTHS.get(rules, {}) if by_name else {}
        return cls(styles=_matched(styles, names), widths=_matched(widths, names), ranks=ranks)

    def set_widths(self, model: nn.Module) -> None:
        """Divide the width attributes of modules of ``model``, or of a stage, by the ranks."""
        for name, module in model.named_modules():
            attribute = self.widths.get(name, "")
            width = vars(module).get(attribute)
            if isinstance(width, int):
                setattr(module, attribute, width // self.ranks)


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


def _matched(table: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: found for pattern, found in table.items() for name in match_names(pattern, names)}


def rule_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield the rules that do not fit the model or the number of ranks."""
    rules, ranks = plan.tensor.rules, plan.axes.size("tensor")
    if rules is None or ranks == 1:
        return
    key, styles = ("tensor", "rules"), ModelCut.of(model, plan).styles
    if isinstance(rules, str):
        if rules not in RULES:
            hint = _hint(rules, [*RULES])
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
        for heads in _heads_at(model, name).items() if style.startswith("colwise") else ():
            if heads[1] % ranks:  # a part of a head would attend to other scores
                uneven.setdefault(heads, []).append(name)
    for (attribute, count), names in uneven.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Problem(
            ("axes", "tensor"),
            f"{names[0]!r}{others} cannot be split over tensor = {ranks} ranks: the attention has "
            f"{attribute} = {count}, which is no multiple of {ranks}",
        )


def _hint(given: str, known: Sequence[str]) -> str:
    close = nearest(given, known)
    return f"did you mean {close!r}?" if close else f"there are {', '.join(known)}"


def _heads_at(model: nn.Module, name: str) -> dict[str, int]:
    """The numbers of heads that divide the columns of module ``name``, by attribute."""
    parent = model.get_submodule(name.rpartition(".")[0])
    width = getattr(parent, "head_dim", None)
    counts = _heads_of(parent)
    if counts or isinstance(width, int):  # else its config describes a model, not this module
        counts = {**counts, **_heads_of(getattr(parent, "config", None))}
    features = getattr(model.get_submodule(name), "out_features", None)
    if not counts and isinstance(width, int) and isinstance(features, int) and width > 0:
        counts = {"heads": features // width}
    return counts


def _heads_of(holder: object) -> dict[str, int]:
    found = {attribute: getattr(holder, attribute, None) for attribute in _HEADS}
    return {attribute: count for attribute, count in found.items() if isinstance(count, int)}
