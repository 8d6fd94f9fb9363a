"""Eight simulated CPU devices for every test, before anything touches a backend."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
