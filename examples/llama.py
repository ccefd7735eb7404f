r"""Trains a small Llama of Hugging Face, from random weights, over the axes of a plan.

torchrun --nproc-per-node 4 examples/llama.py examples/llama.toml
torchrun --nproc-per-node 4 examples/llama.py examples/llama.toml axes.shard=1 axes.pipeline=2 \
    pipeline.microbatches=4
"""

from __future__ import annotations

import sys
from typing import cast

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import meshwright as mw
from meshwright.comm import connect


def next_token_loss(output: CausalLMOutputWithPast, tokens: torch.Tensor) -> torch.Tensor:
    logits = cast("torch.Tensor", output.logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


if len(sys.argv) < 2:
    sys.exit("usage: torchrun --nproc-per-node 4 examples/llama.py PLAN.toml [KEY=VALUE ...]")
world = connect()  # reads what torchrun put into the environment
plan = mw.Plan.from_file(sys.argv[1], overrides=sys.argv[2:])
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
)
tokens = torch.randint(128, (16, 32))
trainable = mw.parallelize(
    model,
    plan,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    loss=next_token_loss,
    example=(tokens[:2],),
)
# Ranks that share a batch (along tensor and pipeline) read the same part of it.
mine = tokens.chunk(trainable.data_size)[trainable.data_rank]
for step in range(10):
    result = trainable.step(mine, mine)
    if world.rank == 0:
        print(f"step {step}: loss {result.loss:.6f}", flush=True)
