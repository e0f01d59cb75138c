"""Parameters of Flax, a tree of JAX arrays, into safetensors and back: python from_flax.py [TARGET]"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

import convert

target = sys.argv[1] if len(sys.argv) > 1 else "model.safetensors"
model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(4)])
variables = model.init(jax.random.key(0), jnp.ones((1, 8)))

convert.save(variables, target, separator="/", overwrite=True)
back = unflatten_dict(convert.load(target), sep="/")

same = jax.tree.map(lambda a, b: bool((a == b).all()), variables, back)
print("the same" if all(jax.tree.leaves(same)) else "different")
