# svdpp in a container; see docs/troubleshooting.md for what has been tried. deploy/ has a server in one.
#   docker build -t svdpp .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" svdpp \
#     run photo.jpg --model demo --device cpu --out clips
# PyPI's build of PyTorch contains CUDA and works on a CPU as well. For a small image without CUDA, name an index
# with CPU builds: --build-arg TORCH_INDEX=URL. With GPUs add to `docker run`: --gpus all --shm-size=8g
FROM python:3.11-slim

ARG TORCH_INDEX=
# For servers that share a queue: serve,fleet
ARG EXTRAS=serve

# Any user may run the image, also one without an entry in its user database.
RUN mkdir -m 1777 /home/svdpp && install -d -m 700 -o 1000 -g 1000 /var/lib/svdpp
ENV HOME=/home/svdpp USER=svdpp PYTHONDONTWRITEBYTECODE=1

WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch

COPY pyproject.toml README.md LICENSE ./
COPY svdpp ./svdpp
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

USER 1000:1000
WORKDIR /work
ENTRYPOINT ["svdpp"]
CMD ["--help"]
