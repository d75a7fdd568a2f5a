# skyrl without a GPU: the quick start, `skyrl config check` and `skyrl plan`, small trainings. Not tried yet.
#
#     docker build -f docker/cpu.Dockerfile -t skyrl:cpu .
#     docker run --rm -it -v "$PWD/runs:/work/runs" skyrl:cpu init runs/mine
#     docker run --rm -it -v "$PWD/runs:/work/runs" -w /work/runs/mine skyrl:cpu run run.toml
FROM python:3.12-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_WAIT_POLICY=PASSIVE

# torch's own index has the builds without CUDA, which are a tenth of the size.
WORKDIR /src
COPY constraints.txt ./
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0

COPY pyproject.toml README.md LICENSE ./
COPY skyrl skyrl
RUN pip install ".[train,serve]" -c constraints.txt

RUN useradd --create-home --uid 10001 skyrl && mkdir -p /work && chown skyrl /work
USER 10001
WORKDIR /work
ENTRYPOINT ["skyrl"]
CMD ["--help"]
