"""A model of torch into safetensors: python from_torch.py [TARGET]

Takes what safetensors' own `save_file` refuses or has to be told about: tied weights, transposed and shared tensors.
"""

import sys

import torch

import convert

target = sys.argv[1] if len(sys.argv) > 1 else "model.safetensors"
embedding = torch.nn.Embedding(1000, 64, dtype=torch.bfloat16)
head = torch.nn.Linear(64, 1000, bias=False, dtype=torch.bfloat16)
head.weight = embedding.weight
model = torch.nn.Sequential(embedding, torch.nn.LayerNorm(64), head)

report = convert.save(model.state_dict(), target, metadata={"format": "pt"}, overwrite=True)
print(*report.notes, f"{len(report.tensors)} tensors, {report.target_bytes} bytes", sep="\n")
