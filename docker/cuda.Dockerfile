# skyrl on CUDA, with Ray and vLLM. Not tried yet: the image has not been built so far.
#
#     docker build -f docker/cuda.Dockerfile -t skyrl:cuda .
#     docker run --rm -it --gpus all --shm-size 16g -v "$PWD:/work" skyrl:cuda doctor run.toml
#     docker run --rm -it --gpus all --shm-size 16g -v "$PWD:/work" skyrl:cuda run run.toml
#
# The host needs the NVIDIA driver and its container toolkit. Processes of Ray and NCCL share memory: --shm-size.
FROM nvidia/cuda:12.9.1-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_WAIT_POLICY=PASSIVE

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/skyrl PATH=/opt/skyrl/bin:$PATH
RUN python3 -m venv /opt/skyrl

# Without constraints.txt, which holds the versions of the tests on CPUs: vLLM chooses torch and the libraries of CUDA.
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY skyrl skyrl
# hadolint ignore=DL3013
RUN pip install ".[train,data,ray,vllm,serve,tensorboard,wandb]"

RUN useradd --create-home --uid 10001 skyrl && mkdir -p /work && chown skyrl /work
USER 10001
WORKDIR /work
ENTRYPOINT ["skyrl"]
CMD ["--help"]
