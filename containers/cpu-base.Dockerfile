# A base without NGC: a plain Debian plus the locked torch, for laptops and CI. Runs on CPU and on NVIDIA GPUs.
#   invoke build --base cpu [--os-image debian:bookworm-slim@sha256:...]
ARG OS_IMAGE=debian:bookworm-slim
FROM ${OS_IMAGE}

RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/* /var/cache/debconf/*-old \
 && find /var/log -type f -delete \
 && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# The host's pip settings and certificates are secrets of the build: used here, stored nowhere. Bytecode is checked
# never (unchecked-hash): containers are read-only and a file whose time stamp changed would be compiled at each start.
# One file of torch is left out: its syntax is that of newer Pythons.
COPY containers/torch.lock /tmp/torch.lock
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    if [ -f /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi \
 && if [ -f /run/secrets/ca.pem ]; then export PIP_CERT=/run/secrets/ca.pem; fi \
 && pip install --no-cache-dir --no-compile --require-hashes -r /tmp/torch.lock \
 && rm /tmp/torch.lock \
 && python3 -m compileall -q -f -j 0 -x '/py312_intrinsics\.py$' --invalidation-mode unchecked-hash /opt/venv/lib \
 && python3 -B -c 'import torch, torchvision'

ARG OS_IMAGE
LABEL org.opencontainers.image.base.name=${OS_IMAGE}
