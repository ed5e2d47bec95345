# gossipx on CPUs. Without arguments, two peers train the built-in task.
#   docker build -t gossipx . && docker run --rm gossipx
# An image with a script of your own: FROM gossipx, COPY train.py .
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml setup.cfg constraints.txt README.md LICENSE ./
COPY topologies topologies
COPY gossipx gossipx
# PyTorch's own index has the builds without CUDA, which are preferred: their version, such as 2.13.0+cpu, is higher.
RUN pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu ".[certs,codecs,zstd]" \
    && useradd --create-home --uid 1000 gossipx \
    && echo "localhost slots=2" > /home/gossipx/hosts.txt

WORKDIR /home/gossipx
# A number, so that Kubernetes sees that it is not root.
USER 1000
ENTRYPOINT ["gossipx"]
CMD ["run", "--peers", "hosts.txt"]
