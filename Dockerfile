# gossipx on CPUs. Without arguments, two peers train the built-in task.
#   docker build -t gossipx --build-arg PIP_EXTRA_INDEX_URL=URL . && docker run --rm gossipx
# An image with a script of your own: FROM gossipx, COPY train.py .
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml setup.cfg constraints.txt README.md LICENSE ./
COPY topologies topologies
COPY gossipx gossipx
# The index of PyTorch's builds without CUDA; pip reads this variable, and prefers those builds. Without it the image has
# torch for CUDA, which runs on CPUs too, and is several GB larger.
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir --constraint constraints.txt ".[certs,codecs,zstd]" \
    && useradd --create-home --uid 1000 gossipx \
    && echo "localhost slots=2" > /home/gossipx/hosts.txt

WORKDIR /home/gossipx
# A number, so that Kubernetes sees that it is not root.
USER 1000
ENTRYPOINT ["gossipx"]
CMD ["run", "--peers", "hosts.txt"]
