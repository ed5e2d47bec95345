"""Records of TensorBoard's event files: scalars, the layout of the custom-scalars page, and hyperparameters.

torch.utils.tensorboard makes the same ones, but the parent process of a run does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

FIRST = ("policy", "seed")
"""Hyperparameters by which runs are told apart. TensorBoard shows five, first those that are marked as different."""
Page = Mapping[str, Mapping[str, Sequence[str]]]
"""Parts of the custom-scalars page: for each chart by title, patterns that the tags of its curves begin with."""


def scalar(tag: str, value: float) -> Any:
    """Return the record of one value."""
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def page(parts: Page) -> Any:
    """Return the record of the custom-scalars page."""
    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=part,
                chart=[
                    layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
                    for title, tags in charts.items()
                ],
            )
            for part, charts in parts.items()
        ]
    )
    content = TensorProto(dtype=DT_STRING, string_val=[layout.SerializeToString()], tensor_shape=TensorShapeProto())
    metadata = _of_plugin("custom_scalars")
    return Summary(value=[Summary.Value(tag="custom_scalars__config__", tensor=content, metadata=metadata)])


def trial(hparams: Mapping[str, str | float], metrics: Sequence[str]) -> list[Any]:
    """Return the records of one trial on the HPARAMS page.

    Args:
        hparams: its hyperparameters.
        metrics: tags of the scalars that are shown beside them.
    """
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=name, type=_kind_of(value), differs=name in FIRST)
            for name, value in hparams.items()
        ],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )
    start = plugin_data_pb2.SessionStartInfo()
    for name, value in hparams.items():
        if isinstance(value, str):
            start.hparams[name].string_value = value
        else:
            start.hparams[name].number_value = value
    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.Status.Value("STATUS_SUCCESS"))
    parts = {"experiment": experiment, "session_start_info": start, "session_end_info": end}
    return [_of_trial(name, part) for name, part in parts.items()]


def _kind_of(value: str | float) -> Any:
    return api_pb2.DataType.Value("DATA_TYPE_STRING" if isinstance(value, str) else "DATA_TYPE_FLOAT64")


def _of_trial(name: str, part: Any) -> Any:
    data = plugin_data_pb2.HParamsPluginData(version=0, **{name: part})
    metadata = _of_plugin("hparams", data.SerializeToString())
    return Summary(value=[Summary.Value(tag=f"_hparams_/{name}", metadata=metadata)])


def _of_plugin(name: str, content: bytes = b"") -> Any:
    return SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=name, content=content))
