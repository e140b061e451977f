# One image for every role: the command names the package to run, e.g. `proxy --host 0.0.0.0`, `prefill_worker`,
# or `control_plane serve --host 0.0.0.0` for a whole system in one container.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

# Where torch comes from. The CPU builds by default; empty for the package index, whose build brings CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=ucx

# CPU kernels are compiled where they run.
RUN command -v cc >/dev/null || (apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*)

RUN useradd --uid 10001 --create-home baton && install -d -o baton -g baton /var/cache/baton

WORKDIR /opt/baton
RUN python3 -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
COPY . .
RUN python3 -m pip install --no-cache-dir ".[${EXTRAS}]"

ENV BATON_CACHE_DIR=/var/cache/baton \
    PYTHONUNBUFFERED=1
VOLUME /var/cache/baton
USER baton
WORKDIR /home/baton
STOPSIGNAL SIGTERM
ENTRYPOINT ["python3", "-P", "-m"]
CMD ["control_plane", "serve", "--host", "0.0.0.0"]
