"""Two safetensors checkpoints averaged into a third, in the memory of some rows: python layer_by_layer.py A B TARGET"""

import sys

import numpy as np

import convert

first, second, target = sys.argv[1:]
with (
    convert.open(first) as a,
    convert.open(second) as b,
    convert.writer(target, a, overwrite=True) as out,
):
    for name, tensor in a.items():
        if not tensor.shape:
            out.write(name, tensor.numpy())
            continue
        for at in range(0, tensor.shape[0], 256):
            rows = tensor[at : at + 256]
            mean = (rows.astype(np.float32) + b[name][at : at + 256].astype(np.float32)) / 2
            out.write(name, mean.astype(rows.dtype))
print(out.report.to_json())
