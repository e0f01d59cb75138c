"""A checkpoint of numpy into one that MLX maps: python to_mlx.py [SOURCE.npz [TARGET]]

MLX reads no float64 and no float8; a cast says what becomes of them, and refuses a value that would overflow.
"""

import sys

import mlx.core as mx

import convert

source = sys.argv[1] if len(sys.argv) > 1 else "model.npz"
target = sys.argv[2] if len(sys.argv) > 2 else "model.safetensors"

convert.convert_file(source, target, cast=[("float64", "float32")], metadata={"format": "mlx"}, overwrite=True)
for name, array in sorted(mx.load(target).items()):
    print(name, array.dtype, array.shape)
