"""Trains a small Llama of Hugging Face, sharded, and exports it for `from_pretrained`.

torchrun --nproc-per-node 2 examples/hugging_face.py exported
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright import checkpoint
from meshwright.comm import connect

if len(sys.argv) != 2:
    sys.exit("usage: torchrun --nproc-per-node 2 examples/hugging_face.py FOLDER")
folder = sys.argv[1]
world = connect()  # reads what torchrun put into the environment
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config)
for layer in model.model.layers:
    mw.fully_shard(layer)
mw.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
tokens = torch.randint(128, (16, 32), generator=torch.Generator().manual_seed(1))
mine = tokens.chunk(world.size)[world.rank]
for _ in range(20):
    loss = model(input_ids=mine, labels=mine).loss
    optimizer.zero_grad()
    loss.backward()
    mw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
path = checkpoint.save(
    "checkpoints", 20, model=model, optimizer=optimizer, extra={"config": config.to_dict()}
)
# On the command line: meshwright checkpoint export checkpoints/step_00000020 exported --to hf
checkpoint.export_weights(path, folder, to="hf")
alone = LlamaForCausalLM.from_pretrained(folder)
with torch.no_grad():
    loss = model(input_ids=mine, labels=mine).loss
    same = alone(input_ids=mine, labels=mine).loss
print(f"rank {world.rank} of {world.size}: loss {loss:.6f}, from_pretrained {same:.6f}")
