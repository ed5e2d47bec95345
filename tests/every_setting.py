"""Every setting of a run with another value than its default, in Python and as TOML."""

from __future__ import annotations

from typing import Any

EVERY_KEY: dict[str, dict[str, Any]] = {
    "run": {
        "peers": "here.txt",
        "name": "mine",
        "logdir": "elsewhere",
        "overwrite": True,
        "seed": 7,
        "iterations": 11,
        "seconds": 600.0,
        "threads": 2,
        "restart": 3,
        "device": "cuda:0",
        "log_interval": 3,
        "eval_interval": 0,
        "metrics_port": "9400",
        "recorder": "csv",
        "save_model": False,
        "checkpoint_every": "60s",
        "keep_checkpoints": 5,
    },
    "task": {
        "task": "mnist",
        "data_dir": "data",
        "model": "convnet",
        "batch_size": 16,
        "optimizer": "lars",
        "base_lr": 0.5,
        "gamma": 0.25,
        "momentum": 0.75,
        "nesterov": True,
        "weight_decay": 0.125,
        "lr_steps": (0.5, 0.75),
        "partition": "dirichlet:alpha=0.3",
    },
    "sync": {
        "preset": "paper",
        "policy": "tau:20",
        "mode": "push",
        "exchange": "waves",
        "topology": "ring",
        "schedule": "one-peer",
        "weights": "metropolis",
        "mixing": "average:beta=0.25",
        "outer": "momentum:gamma=0.5",
        "fragments": 3,
        "codec": "int8",
        "references": 3,
        "blocking": True,
        "finish": "none",
        "finish_timeout": 60.0,
        "init": "own",
        "buffers": "local",
        "delta": "sampled",
        "min_peers": 2,
        "distance_interval": 5,
    },
    "hub": {"hub": "0", "hub_only": True, "alpha": 0.25, "beta": 0.5, "hub_lost": "wait"},
    "server": {
        "servers": "0,1",
        "servers_only": True,
        "sync": "ssp:staleness=3|asp",
        "sync_plan": "5=asp",
        "pulls": "soft",
        "apply": "each",
        "placement": "sliced",
        "bucket": 0,
        "push_codec": "3lc:sparsity=1.75",
        "pull_codec": "topk+zlib",
        "rescale_error": True,
        "wait_free": False,
        "overlap": False,
        "server_replicas": 1,
        "journal": False,
        "server_lost": "stop",
    },
    "exchange": {
        "bind": "0.0.0.0",
        "advertise": "me.example",
        "secret_file": "secret",
        "tls_cert": "here.crt",
        "tls_key": "here.key",
        "tls_ca": "ca.crt",
        "transport": "tcp",
        "max_rate": "100mbit",
        "max_served": 2,
        "max_pushes": 3,
        "serve_share": 0.1,
        "peer_timeout": 1.5,
        "rendezvous_timeout": 60.0,
    },
}
"""Every setting with a value that is not its default, as TOML holds it."""


CONFIG_TOML = """\
[run]
peers = "here.txt"
name = "mine"
logdir = "elsewhere"
overwrite = true
seed = 7
iterations = 11
seconds = 600.0
threads = 2
device = "cuda:0"
restart = 3
log_interval = 3
eval_interval = 0
metrics_port = "9400"
recorder = "csv"
save_model = false
checkpoint_every = "60s"
keep_checkpoints = 5

[task]
task = "mnist"
data_dir = "data"
model = "convnet"
batch_size = 16
optimizer = "lars"
base_lr = 0.5
gamma = 0.25
momentum = 0.75
nesterov = true
weight_decay = 0.125
lr_steps = [0.5, 0.75]
partition = "dirichlet:alpha=0.3"

[sync]
preset = "paper"
policy = "tau:20"
mode = "push"
exchange = "waves"
topology = "ring"
schedule = "one-peer"
weights = "metropolis"
outer = "momentum:gamma=0.5"
fragments = 3
mixing = "average:beta=0.25"
codec = "int8"
references = 3
blocking = true
finish = "none"
finish_timeout = 60.0
init = "own"
buffers = "local"
delta = "sampled"
min_peers = 2
distance_interval = 5

[hub]
hub = "0"
hub_only = true
alpha = 0.25
beta = 0.5
hub_lost = "wait"

[server]
servers = "0,1"
servers_only = true
sync = "ssp:staleness=3|asp"
sync_plan = "5=asp"
pulls = "soft"
apply = "each"
placement = "sliced"
bucket = 0
push_codec = "3lc:sparsity=1.75"
pull_codec = "topk+zlib"
rescale_error = true
wait_free = false
overlap = false
server_replicas = 1
journal = false
server_lost = "stop"

[exchange]
bind = "0.0.0.0"
advertise = "me.example"
secret_file = "secret"
tls_cert = "here.crt"
tls_key = "here.key"
tls_ca = "ca.crt"
transport = "tcp"
max_rate = "100mbit"
max_served = 2
max_pushes = 3
serve_share = 0.1
peer_timeout = 1.5
rendezvous_timeout = 60.0
"""
