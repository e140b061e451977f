# One image for every role: the command names the package to run, e.g. `proxy --host 0.0.0.0`, `prefill_worker`,
# or `control_plane serve --host 0.0.0.0` for a whole system in one container.
#
# BASE_IMAGE needs Python 3.11 or later; BUILD_IMAGE the same one at the same path, and what else the build shall find,
# such as wheels where there is no package index.
ARG BASE_IMAGE=python:3.11-slim
ARG BUILD_IMAGE=

FROM ${BUILD_IMAGE:-${BASE_IMAGE}} AS build
RUN command -v cc >/dev/null || (apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev)
RUN python3 -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH

# Where torch comes from. The CPU builds by default; empty for the package index, whose build brings CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0

ARG EXTRAS=ucx
COPY . /src
RUN pip install --no-cache-dir "/src${EXTRAS:+[$EXTRAS]}" && cd / && python -P -m kernels.native /opt/baton/kernels

FROM ${BASE_IMAGE}
# Nothing that builds, but for GPUs: Triton compiles what launches its kernels where they run.
ARG EXTRAS=ucx
RUN case ",$EXTRAS," in *,gpu,*) apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* ;; esac
RUN useradd --uid 10001 --create-home baton && install -d -o baton -g baton /var/cache/baton
COPY --from=build /opt/baton /opt/baton

ENV PATH=/opt/baton/bin:$PATH \
    BATON_CACHE_DIR=/var/cache/baton \
    BATON_NATIVE_DIR=/opt/baton/kernels \
    PYTHONUNBUFFERED=1
VOLUME /var/cache/baton
USER baton
WORKDIR /home/baton
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-P", "-m"]
CMD ["control_plane", "serve", "--host", "0.0.0.0"]
