"""Integrations with the real Lightning, Hugging Face Trainer and Accelerate: two peers in real processes.

Each script trains, writes a checkpoint with its framework, and resumes from it; rank 0 of each peer reports figures.
Both peers leave everything that concerns directories at the framework's defaults and share one working directory.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from seeds import some

from runs import Ended, Folder, all_end

BEGIN = """
import logging
import warnings

from gossipx.errors import GossipxError

warnings.simplefilter("ignore")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", ACCELERATE_USE_CPU="true")
PEER, RANKS = int(sys.argv[2]), int(sys.argv[3])
os.chdir(FOLDER)
torch.manual_seed(PEER)
torch.set_num_threads(1)
logging.basicConfig(format="%(message)s")
settings = {"peers": "hosts.txt", "rank": PEER, "policy": "tau:3", "blocking": True, "peer_timeout": 20}
told, looked, options = {}, [], {}


def network():
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def muon(module):
    # With torch's older than 2.9 AdamW alone.
    has_muon = hasattr(torch.optim, "Muon")
    return gossipx.optimizers.muon(module, 0.01) if has_muon else torch.optim.AdamW(module.parameters(), lr=0.01)


def evaluate(module):
    looked.append(type(module).__name__)
    return 0.5


class Data(torch.utils.data.Dataset):
    # 64 rows; a row's first value says which.
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=generator)
        return {"x": x, "labels": x.sum()[None]}


def values(module):
    return [value.item() for tensor in module.state_dict().values() for value in tensor.flatten()]


def counts(peer):
    return peer._peer._role.sync.retrievals


def refused(resume, kept):
    # The message with which a peer refuses another peer's state.
    try:
        resume(kept)
    except GossipxError as error:
        return str(error)
"""

LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import Callback

from gossipx.integrations.lightning import GossipCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, number):
        return (self.network(batch["x"]) - batch["labels"]).square().mean()

    def validation_step(self, batch, number):
        self.log("accuracy", 0.25, sync_dist=True)

    def configure_optimizers(self):
        return muon(self)


class Began(Callback):
    def on_train_start(self, trainer, module):
        told["began"], told["at"] = values(module), gossip.peer.iteration


def fit(epochs, kept=None):
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto",
        callbacks=[gossip, Began()], accumulate_grad_batches=2, enable_progress_bar=False, enable_model_summary=False,
    )
    module = Module()
    loaders = torch.utils.data.DataLoader(part, batch_size=4), torch.utils.data.DataLoader(data)
    trainer.fit(module, *loaders, ckpt_path=kept)
    return module, trainer.checkpoint_callback.best_model_path


data = Data()
gossip = GossipCallback(**settings, evaluate=evaluate, accuracy="accuracy")
part = gossip.shard(data)
first, last = fit(2)
told["first"] = {"began": told["began"], "iteration": gossip.peer.iteration, "ended": values(first)}
if gossip.peer._peer is not None:
    told["first"]["retrievals"] = counts(gossip.peer)
checkpoint = torch.load(last, weights_only=True)
kept = [value.item() for tensor in checkpoint["state_dict"].values() for value in tensor.flatten()]
told["kept"] = [kept, checkpoint["global_step"]]
second, last = fit(3, last)
other = next(Path("lightning_logs").glob(f"*/checkpoints/peer-{1 - PEER:02d}/*.ckpt"))
told["refused"] = refused(lambda kept: fit(4, kept), other)
"""

TRANSFORMERS = """
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from gossipx.integrations.transformers import GossipCallback


class Module(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.network = network()
        self.post_init()

    def forward(self, x, labels):
        out = self.network(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Began(TrainerCallback):
    def on_train_begin(self, args, state, control, model, **kwargs):
        told["began"], told["at"] = values(model), gossip.peer.iteration


def train(epochs, kept=None):
    arguments = TrainingArguments(
        num_train_epochs=epochs, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        use_cpu=True, report_to="none", logging_steps=2, save_strategy="epoch", eval_strategy="epoch",
        disable_tqdm=True, learning_rate=0.01, ddp_backend="gloo" if RANKS > 1 else None,
    )
    module = Module(PretrainedConfig())
    trainer = Trainer(
        module, arguments, train_dataset=part, eval_dataset=data, callbacks=[gossip, Began()],
        optimizers=(muon(module), None),
    )
    trainer.train(resume_from_checkpoint=kept)
    return trainer.model


data = Data()
gossip = GossipCallback(**settings, evaluate=evaluate, accuracy="eval_loss")
part = gossip.shard(data)
first = train(2)
told["first"] = {"began": told["began"], "iteration": gossip.peer.iteration, "ended": values(first)}
if gossip.peer._peer is not None:
    told["first"]["retrievals"] = counts(gossip.peer)
last = f"trainer_output/peer-{PEER:02d}/checkpoint-{8 // RANKS}"
state = json.loads(Path(last, "trainer_state.json").read_text())
told["kept"] = [values(Module.from_pretrained(last)), state["global_step"]]
second = train(3, True)
told["refused"] = refused(lambda kept: train(4, kept), f"trainer_output/peer-{1 - PEER:02d}/checkpoint-{12 // RANKS}")
"""

ACCELERATE = """
from accelerate import Accelerator
from safetensors.torch import load_file

from gossipx.integrations.accelerate import join, shard

accelerator = Accelerator(gradient_accumulation_steps=2, **options)
data = Data()
model = Module = network()
optimizer = muon(model)
part = shard(data, peers="hosts.txt", rank=PEER)
loader = torch.utils.data.DataLoader(part, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
plain = accelerator.unwrap_model(model)


def train(until):
    while peer.iteration < until:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch["x"]) - batch["labels"]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


with join(accelerator, model, optimizer, evaluate=evaluate, **settings) as peer:
    began = values(plain)
    train(8)
    told["first"] = {"began": began, "iteration": peer.iteration}
    if peer._peer is not None:
        told["first"]["retrievals"] = counts(peer)
    accelerator.save_state("kept")
    accelerator.save_model(model, f"model-{PEER}")
    accelerator.wait_for_everyone()
    stored, saved = load_file(f"kept/peer-{PEER:02d}/model.safetensors"), load_file(f"model-{PEER}/model.safetensors")
    names = list(plain.state_dict())
    told["kept"] = [[value.item() for name in names for value in stored[name].flatten()], peer.iteration]
    told["saved"] = sorted(saved) == sorted(names)
    train(12)
    told["missing"] = refused(accelerator.load_state, f"kept/peer-{1 - PEER:02d}")
    accelerator.load_state("kept")
    told["began"], told["at"] = values(plain), peer.iteration
    train(12)
    told["refused"] = refused(peer.load_state_dict, {**peer.state_dict(), "rank": 1 - PEER})
second = plain
gossip = type("Gossip", (), {"peer": peer})
told["first"]["ended"] = values(plain)
"""

END = """
told["second"] = {"iteration": gossip.peer.iteration, "ended": values(second)}
told["place"], told["looked"] = [gossip.peer.rank, gossip.peer.size], looked
told["directory"] = str(gossip.peer.directory)
told["part"] = sorted(part.indices)
rank = os.environ.get("LOCAL_RANK", "0")
(FOLDER / f"{PEER}-{rank}.json").write_text(json.dumps(told))
"""

LOOPS = {"lightning": LIGHTNING, "transformers": TRANSFORMERS, "accelerate": ACCELERATE}


def run_both(two: Folder, text: str) -> list[Ended]:
    """Run a script as two peers of one process each."""
    script = two.script(BEGIN + text)
    return all_end([two.start(script, two.path, str(peer), "1") for peer in range(2)])


def check(here: list[Any], iterations: int) -> None:
    """Check the reports of two peers that train for ``iterations``, resume, and train half as many more."""
    one, other = here
    assert one["first"]["began"] == other["first"]["began"]  # both start with one peer's weights
    for peer, told in enumerate(here):
        assert told["place"] == [peer, 2]
        # Two batches are accumulated per iteration, as the framework counts.
        assert told["first"]["iteration"] == told["kept"][1] == iterations
        assert told["first"]["retrievals"] == iterations // 3
        # The second training resumes from the peer's own checkpoint, weights and count.
        assert told["at"] == iterations and told["began"] == told["kept"][0]
        assert told["second"]["iteration"] == iterations * 3 // 2
        assert {"Module", "Sequential"} >= set(told["looked"]) != set()
        assert Path(told["directory"]).is_absolute() and told["directory"].endswith(f"runs/joined/peer-{peer:02d}")
        assert (
            told["refused"]
            == f"this is the state of peer {1 - peer}, not of peer {peer}: each peer resumes from its own"
        )
    assert one["kept"][0] != other["kept"][0]
    for training in ("first", "second"):
        assert one[training]["ended"] == pytest.approx(other[training]["ended"], abs=1e-5)  # the finish
    assert sorted(one["part"] + other["part"]) == list(range(64))


def require(framework: str) -> None:
    """Skip the test if the framework, which is an extra, is not installed; importing it here would take seconds."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


@pytest.mark.fault(60)
@pytest.mark.parametrize("name", some(LOOPS, "transformers", "accelerate"))
def test_a_framework_gossips_and_resumes_from_its_own_checkpoint(two: Folder, name: str) -> None:
    require(name)
    for ended in run_both(two, LOOPS[name] + END):
        assert "each peer keeps its checkpoints in a directory of its own there, this one in" in ended.errors
    here = [two.told(f"{peer}-0") for peer in range(2)]
    check(here, 8)
    assert all(told.get("saved", True) for told in here)
    if name == "accelerate":
        for peer, told in enumerate(here):
            foreign = f"kept/peer-{1 - peer:02d}/peer-{peer:02d}: no state of this peer"
            assert told["missing"] == f"{foreign}: give load_state the directory that save_state was given"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_failed_training_does_not_finish(two: Folder, name: str) -> None:
    """This holds even if the script catches the failure and ends normally."""
    require(name)
    whole, call = LOOPS[name], {"lightning": "fit(2)", "transformers": "train(2)"}[name]
    fails = f"""
def broken(*given, **named):
    if PEER == 1 and gossip.peer.iteration == 3:
        raise ArithmeticError("of the script")


Began.on_train_batch_start = Began.on_step_begin = broken
try:
    {call}
except ArithmeticError:
    told["caught"] = gossip.peer.iteration
(FOLDER / f"{{PEER}}.json").write_text(json.dumps(told))
"""
    script = two.script(BEGIN + whole[: whole.index("first")] + fails)
    one, other = (two.start(script, two.path, str(peer), "1") for peer in range(2))
    assert other.end().code == 0 and two.told(1)["caught"] == 3
    ended = one.end()
    assert ended.code == 0 and "caught" not in two.told(0), ended.shown
    assert "peer 1 has left" in ended.output + ended.errors, ended.shown
    assert "no longer waiting" not in ended.output + ended.errors, ended.shown


@pytest.mark.fault(53)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_signal_leaves_a_checkpoint_of_the_framework(two: Folder, name: str) -> None:
    """And the line says from where the framework continues."""
    require(name)
    whole, call = LOOPS[name], {"lightning": "fit(2, kept)", "transformers": "train(2, kept)"}[name]
    stops = f"""
def stop(*given, **named):
    if kept is None and gossip.peer.iteration == 3:
        os.kill(os.getpid(), signal.SIGTERM)


assert gossip.directory.is_dir()
kept = sys.argv[4] if len(sys.argv) > 4 else None
Began.on_train_batch_start = Began.on_step_begin = stop
{call}
(FOLDER / f"{{PEER}}.json").write_text(json.dumps(told))
"""
    text = whole[: whole.index("first")] + stops
    told = "stopped at ([34]); continue with .*, each peer from its own checkpoint, such as (.*)"
    found = []
    for peer, ended in enumerate(run_both(two, text)):
        found += re.findall(told, ended.errors)
        assert len(found) == peer + 1 and f"peer-{peer:02d}" in found[peer][1], ended.shown
    script = two.script(BEGIN + text)
    all_end([two.start(script, two.path, str(peer), "1", kept) for peer, (_, kept) in enumerate(found)])
    assert [two.told(peer)["at"] for peer in range(2)] == [int(at) for at, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_same_with_two_processes_per_peer(two: Folder, name: str) -> None:
    require(name)
    script = two.script(BEGIN + LOOPS[name] + END)
    launched = name != "lightning"  # Lightning starts its processes itself
    by = [
        ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)) for port in free_ports(2)
    ]
    all_end([two.start(*(by[peer] if launched else ()), script, two.path, str(peer), "2") for peer in range(2)])
    check([two.told(f"{peer}-0") for peer in range(2)], 8 if name == "accelerate" else 4)
    for peer in range(2):
        one, other = two.told(f"{peer}-0"), two.told(f"{peer}-1")
        assert one["second"] == other["second"] and one["began"] == other["began"]  # bit for bit, on both ranks
        assert other["looked"] == []
