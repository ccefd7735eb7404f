"""The models of the tests of hybrid sharding."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer

from meshwright.comm import communicator
from meshwright.data_parallel import keep_batch_norm_local
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ModuleWrapPolicy, ShardingStrategy


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1 = nn.Linear(10, 10)
        self.lin2 = nn.Linear(10, 10)
        self.lin3 = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin3(self.lin2(self.lin1(x)))


class SharedTransformer(nn.Module):
    """A transformer whose output projection is its embedding, with a BatchNorm and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(23, 16)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            self.transformer = nn.Transformer(
                d_model=16,
                num_encoder_layers=2,
                num_decoder_layers=2,
                dim_feedforward=8,
                dropout=0.0,
            )
        self.output_proj = nn.Linear(16, 23)
        self.output_proj.weight = self.embed_tokens.weight
        self.register_buffer("vocab_bias", self.embed_tokens.weight.new_ones((16,)))
        self.register_buffer("long_buffer", torch.zeros(16, dtype=torch.long))
        self.bn = nn.BatchNorm1d(2)
        keep_batch_norm_local(self.bn)

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1 + dist.get_rank())
        src = torch.arange(12, device=device).view(6, 2)
        tgt = torch.arange(8, device=device).view(4, 2)
        return (src + torch.randint(0, 5, src.shape), tgt)

    def forward(self, src_ids: torch.Tensor, tgt_ids: torch.Tensor) -> torch.Tensor:
        src = (
            self.embed_tokens(src_ids) + self.vocab_bias + self.long_buffer.type_as(self.vocab_bias)
        )
        src = self.bn(src)
        tgt = self.embed_tokens(tgt_ids)
        return self.output_proj(self.transformer(src, tgt))


POLICY = ModuleWrapPolicy({TransformerEncoderLayer, TransformerDecoderLayer})


def fsdp_model(use_orig_params: bool) -> FSDP:
    return FSDP(SharedTransformer(), auto_wrap_policy=POLICY, use_orig_params=use_orig_params)


def hybrid_model(
    strategy: ShardingStrategy,
    use_orig_params: bool,
    *,
    mixed: bool = False,
    groups: Any = None,
    mesh: Any = None,
) -> FSDP:
    options: dict[str, Any] = {
        "device_id": communicator().device,
        "auto_wrap_policy": POLICY,
        "sharding_strategy": strategy,
        "use_orig_params": use_orig_params,
        "device_mesh": mesh,
        "process_group": groups,
    }
    model = SharedTransformer()
    if not mixed:
        return FSDP(model, **options)
    model.transformer = FSDP(model.transformer, **options)
    return FSDP(
        model, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=use_orig_params
    )
