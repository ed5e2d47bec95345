"""Features of Lightning, the Trainer and Accelerate that change a model or its steps, with two real peers."""

from __future__ import annotations

from typing import Any

import pytest
from test_integrations import ACCELERATE, LIGHTNING, TRANSFORMERS, require, run_both

from runs import Folder

pytestmark = pytest.mark.slow

TELL = """
told["ended"] = values(module)
(FOLDER / f"{PEER}.json").write_text(json.dumps(told))
"""


def told_by_both(two: Folder, text: str) -> list[Any]:
    """Run a script as two peers, and return what they told; both end with one model."""
    run_both(two, text + TELL)
    here = [two.told(peer) for peer in range(2)]
    assert here[0]["ended"] == pytest.approx(here[1]["ended"], abs=1e-5)
    return here


def mean(one: list[float], other: list[float]) -> Any:
    return pytest.approx([(a + b) / 2 for a, b in zip(one, other, strict=True)], abs=1e-5)


# --- the Hugging Face Trainer -----------------------------------------------------------------------------------

TRAINER = """
def best_first(prediction):
    return {"score": -float(gossip.peer.iteration)}  # so that the first checkpoint is the best


data = Data()
gossip = GossipCallback(**settings)
arguments = TrainingArguments(
    num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=0.01,
    save_strategy="epoch", eval_strategy="epoch", use_cpu=True, report_to="none", disable_tqdm=True,
    # More arguments
)
trainer = Trainer(
    Module(PretrainedConfig()), arguments, train_dataset=gossip.shard(data), eval_dataset=data,
    compute_metrics=best_first, callbacks=[gossip],
)
trainer.train()
module = trainer.model
"""


def trainer(arguments: str) -> str:
    return TRANSFORMERS[: TRANSFORMERS.index("data = Data()")] + TRAINER.replace("# More arguments", arguments)


@pytest.mark.fault(60)
def test_the_finish_averages_the_best_models_of_the_trainer(two: Folder) -> None:
    """Each peer loads the best of its own checkpoints; training is in bfloat16."""
    require("transformers")
    best = 'load_best_model_at_end=True, metric_for_best_model="score", bf16=True, save_total_limit=1'
    after = """
told["best"] = trainer.state.best_model_checkpoint
told["kept"] = values(Module.from_pretrained(told["best"]))
told["dtypes"] = sorted({str(tensor.dtype) for tensor in module.parameters()})
"""
    one, other = told_by_both(two, trainer(best) + after)
    for peer, told in enumerate((one, other)):
        assert told["best"] == f"trainer_output/peer-{peer:02d}/checkpoint-4" and told["dtypes"] == ["torch.float32"]
    assert one["kept"] != other["kept"]
    assert one["ended"] == mean(one["kept"], other["kept"])


def test_the_trainer_with_a_schedule_free_optimizer(two: Folder) -> None:
    """Its checkpoints, which resume the training, have both sets of weights."""
    require("transformers")
    pytest.importorskip("schedulefree")
    more = 'optim="schedule_free_adamw", lr_scheduler_type="constant"'
    after = """
told["scored"] = trainer.evaluate()["eval_loss"]
gossip = GossipCallback(**settings)
again = Trainer(
    Module(PretrainedConfig()), arguments, train_dataset=gossip.shard(data), eval_dataset=data,
    compute_metrics=best_first, callbacks=[gossip],
)
arguments.num_train_epochs = 4
again.train(resume_from_checkpoint=True)
told["iteration"] = gossip.peer.iteration
module = again.model
"""
    one, other = told_by_both(two, trainer(more) + after)
    assert one["scored"] == pytest.approx(other["scored"], abs=1e-5)
    assert one["iteration"] == other["iteration"] == 16


# --- Lightning --------------------------------------------------------------------------------------------------

LIT = LIGHTNING[: LIGHTNING.index("data = Data()")]
FIT = """
gossip = GossipCallback(**settings)
module = Fitted()
trainer = lightning.Trainer(
    max_epochs=4, accelerator="cpu", devices=1, callbacks=[*more, gossip, Began()], logger=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(gossip.shard(Data()), batch_size=8))
told["iteration"] = gossip.peer.iteration
"""


def test_the_finish_averages_the_averages_of_lightning(two: Folder) -> None:
    """StochasticWeightAveraging replaces the weights by their average after the last epoch."""
    require("lightning")
    text = """
from lightning.pytorch.callbacks import StochasticWeightAveraging


class Fitted(Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Linear(4, 1)  # without BatchNorm, for which SWA makes another pass over the data


class Averages(StochasticWeightAveraging):
    def on_train_end(self, trainer, module):
        super().on_train_end(trainer, module)
        told["own"] = values(module)


more = [Averages(0.05, swa_epoch_start=2)]
"""
    one, other = told_by_both(two, LIT + text + FIT)
    assert one["iteration"] == other["iteration"] == 16
    assert one["own"] != other["own"]
    assert one["ended"] == mean(one["own"], other["own"])


def test_manual_optimization_with_two_optimizers(two: Folder) -> None:
    """An iteration ends when both have stepped, in any order, and the weights of both are exchanged."""
    require("lightning")
    text = """
class Fitted(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.network = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def training_step(self, batch, number):
        both = list(zip(self.network, self.optimizers()))
        for part, optimizer in both if number % 2 else reversed(both):
            loss = (part(batch["x"]) - batch["labels"] - PEER).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in self.network]


more = []
"""
    one, other = told_by_both(two, LIT + text + FIT)
    assert one["iteration"] == other["iteration"] == 16
    moved = [abs(before - after) for before, after in zip(one["began"], one["ended"], strict=True)]
    assert min(max(moved[:5]), max(moved[5:])) > 0.1


@pytest.mark.fault(49)
def test_a_backbone_that_lightning_unfreezes_is_exchanged(two: Folder) -> None:
    """And the checkpoint that Lightning writes after an exception is each peer's own."""
    require("lightning")
    text = """
from lightning.pytorch.callbacks import BackboneFinetuning, OnExceptionCheckpoint


class Fitted(Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.network = nn.Sequential(self.backbone, nn.ReLU(), nn.Linear(8, 1))

    def configure_optimizers(self):
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.01)


more = [BackboneFinetuning(1, verbose=False), OnExceptionCheckpoint("exc")]
"""
    one, other = told_by_both(two, LIT + text + FIT + "told['saves'] = more[1].ckpt_path\n")
    assert [told["saves"] for told in (one, other)] == [f"exc/peer-0{peer}/on_exception.ckpt" for peer in range(2)]
    moved = [abs(before - after) for before, after in zip(one["began"][:32], one["ended"][:32], strict=True)]
    assert max(moved) > 1e-3  # the weight of the backbone


# --- Accelerate -------------------------------------------------------------------------------------------------


def test_accelerate_in_bfloat16_with_projects_that_name_checkpoints(two: Folder) -> None:
    """``save_state()`` and ``load_state()`` without a directory number the checkpoints in the peer's own."""
    require("accelerate")
    begin = """
from accelerate.utils import ProjectConfiguration

project = ProjectConfiguration("project", automatic_checkpoint_naming=True)
options.update(mixed_precision="bf16", project_config=project)
"""
    loop = """
with join(accelerator, model, optimizer, **settings) as peer:
    train(4)
    accelerator.save_state()
    told["kept"] = values(plain)
    train(8)
    accelerator.load_state(f"project/peer-{PEER:02d}/checkpoints/checkpoint_0")
    told["loaded"], told["at"] = values(plain), peer.iteration
    train(8)
module = plain
"""
    text = begin + ACCELERATE[: ACCELERATE.index("with join")] + loop
    one, other = told_by_both(two, text)
    for told in (one, other):
        assert told["loaded"] == told["kept"] and told["at"] == 4
    assert one["kept"] != other["kept"]
