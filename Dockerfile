# The CPU image: docker build -t fasttrain .
# With CUDA:     docker build -t fasttrain:cuda --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 \
#                    --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
ARG BASE=python:3.12-slim

FROM ${BASE} AS packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=tensorboard,onnx,metrics
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN command -v python3 >/dev/null && python3 -m venv --help >/dev/null 2>&1 \
    || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/fasttrain
# Versions change rarely and the source often: what is heavy is a layer of its own.
COPY constraints.txt /tmp/
RUN /opt/fasttrain/bin/pip install "torch$(sed -n 's/^torch\(==[0-9.]*\).*/\1/p' /tmp/constraints.txt)" --index-url ${TORCH_INDEX}
COPY pyproject.toml README.md LICENSE /source/
COPY conf /source/conf
COPY docs /source/docs
COPY src /source/src
RUN /opt/fasttrain/bin/pip install -c /tmp/constraints.txt "/source[${EXTRAS}]"

FROM ${BASE}
RUN command -v python3 >/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*)
COPY --from=packages /opt/fasttrain /opt/fasttrain
ENV PATH=/opt/fasttrain/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home trainer && mkdir /runs && chown trainer /runs
USER trainer
# Kernels are compiled for the processor that builds the image; on another kind they are compiled at the first start.
RUN cd /home/trainer && fasttrain train warmup=only +profile=speed
WORKDIR /runs
ENTRYPOINT ["fasttrain"]
CMD ["--help"]
