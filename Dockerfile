# An image with jaxpar in it, for `jaxpar launch gke` and, by Pyxis, `jaxpar launch slurm`:
#
#   docker build --build-arg EXTRA=tpu  --tag my-registry/jaxpar:1-tpu  .
#   docker build --build-arg EXTRA=cuda --tag my-registry/jaxpar:1-cuda .
#
# The wheels of jax[cuda12] bring CUDA, cuDNN and NCCL, and those of jax[tpu] bring libtpu, so one small image serves both: of
# a GPU only the driver is the host's. Add `,ray` to EXTRA for `jaxpar launch gke --ray`, `,wandb` for its sink, and so on.
FROM python:3.12-slim
ARG EXTRA=tpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE MANIFEST.in ./
COPY jaxpar jaxpar
COPY models models
COPY meshes meshes
COPY configs configs
RUN pip install ".[$EXTRA]" && jaxpar --version
WORKDIR /work
ENTRYPOINT []
CMD ["jaxpar", "--help"]
