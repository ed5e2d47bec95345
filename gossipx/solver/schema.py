"""The schema of solver.prototxt: Caffe's protobuf messages, built at run time without generated files or protoc.

The tables list the names, numbers and types of all fields in ``caffe.proto``, as of BVLC Caffe 1.0 and of its master
branch since then. They omit default values. Those of a solver are in
:class:`gossipx.solver.prototxt.SolverParameter`; those of a net are not needed, because a net that is written in the
solver file is only parsed, to report errors, and never built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_MESSAGES = """
SolverParameter: net 24 string, net_param 25 NetParameter, train_net 1 string, test_net 2 string*,
    train_net_param 21 NetParameter, test_net_param 22 NetParameter*, train_state 26 NetState, test_state 27 NetState*,
    test_iter 3 int32*, test_interval 4 int32, test_compute_loss 19 bool, test_initialization 32 bool, base_lr 5 float,
    display 6 int32, average_loss 33 int32, max_iter 7 int32, iter_size 36 int32, lr_policy 8 string, gamma 9 float,
    power 10 float, momentum 11 float, weight_decay 12 float, regularization_type 29 string, stepsize 13 int32,
    stepvalue 34 int32*, clip_gradients 35 float, snapshot 14 int32, snapshot_prefix 15 string, snapshot_diff 16 bool,
    snapshot_format 37 SnapshotFormat, solver_mode 17 SolverMode, device_id 18 int32, random_seed 20 int64,
    type 40 string, delta 31 float, momentum2 39 float, rms_decay 38 float, debug_info 23 bool,
    snapshot_after_train 28 bool, solver_type 30 SolverType, layer_wise_reduce 41 bool, weights 42 string*
NetState: phase 1 Phase, level 2 int32, stage 3 string*
NetParameter: name 1 string, input 3 string*, input_shape 8 BlobShape*, input_dim 4 int32*, force_backward 5 bool,
    state 6 NetState, debug_info 7 bool, layer 100 LayerParameter*, layers 2 V1LayerParameter*
LayerParameter: name 1 string, type 2 string, bottom 3 string*, top 4 string*, phase 10 Phase, loss_weight 5 float*,
    param 6 ParamSpec*, blobs 7 BlobProto*, propagate_down 11 bool*, include 8 NetStateRule*, exclude 9 NetStateRule*,
    transform_param 100 TransformationParameter, loss_param 101 LossParameter, accuracy_param 102 AccuracyParameter,
    argmax_param 103 ArgMaxParameter, batch_norm_param 139 BatchNormParameter, bias_param 141 BiasParameter,
    clip_param 148 ClipParameter, concat_param 104 ConcatParameter,
    contrastive_loss_param 105 ContrastiveLossParameter, convolution_param 106 ConvolutionParameter,
    crop_param 144 CropParameter, data_param 107 DataParameter, dropout_param 108 DropoutParameter,
    dummy_data_param 109 DummyDataParameter, eltwise_param 110 EltwiseParameter, elu_param 140 ELUParameter,
    embed_param 137 EmbedParameter, exp_param 111 ExpParameter, flatten_param 135 FlattenParameter,
    hdf5_data_param 112 HDF5DataParameter, hdf5_output_param 113 HDF5OutputParameter,
    hinge_loss_param 114 HingeLossParameter, image_data_param 115 ImageDataParameter,
    infogain_loss_param 116 InfogainLossParameter, inner_product_param 117 InnerProductParameter,
    input_param 143 InputParameter, log_param 134 LogParameter, lrn_param 118 LRNParameter,
    memory_data_param 119 MemoryDataParameter, mvn_param 120 MVNParameter, parameter_param 145 ParameterParameter,
    pooling_param 121 PoolingParameter, power_param 122 PowerParameter, prelu_param 131 PReLUParameter,
    python_param 130 PythonParameter, recurrent_param 146 RecurrentParameter, reduction_param 136 ReductionParameter,
    relu_param 123 ReLUParameter, reshape_param 133 ReshapeParameter, scale_param 142 ScaleParameter,
    sigmoid_param 124 SigmoidParameter, softmax_param 125 SoftmaxParameter, spp_param 132 SPPParameter,
    slice_param 126 SliceParameter, swish_param 147 SwishParameter, tanh_param 127 TanHParameter,
    threshold_param 128 ThresholdParameter, tile_param 138 TileParameter, window_data_param 129 WindowDataParameter
BlobShape: dim 1 int64*
BlobProto: shape 7 BlobShape, data 5 float*, diff 6 float*, double_data 8 double*, double_diff 9 double*, num 1 int32,
    channels 2 int32, height 3 int32, width 4 int32
FillerParameter: type 1 string, value 2 float, min 3 float, max 4 float, mean 5 float, std 6 float, sparse 7 int32,
    variance_norm 8 VarianceNorm
NetStateRule: phase 1 Phase, min_level 2 int32, max_level 3 int32, stage 4 string*, not_stage 5 string*
ParamSpec: name 1 string, share_mode 2 DimCheckMode, lr_mult 3 float, decay_mult 4 float
TransformationParameter: scale 1 float, mirror 2 bool, crop_size 3 uint32, mean_file 4 string, mean_value 5 float*,
    force_color 6 bool, force_gray 7 bool
LossParameter: ignore_label 1 int32, normalization 3 NormalizationMode, normalize 2 bool
AccuracyParameter: top_k 1 uint32, axis 2 int32, ignore_label 3 int32
ArgMaxParameter: out_max_val 1 bool, top_k 2 uint32, axis 3 int32
ClipParameter: min 1 float!, max 2 float!
ConcatParameter: axis 2 int32, concat_dim 1 uint32
BatchNormParameter: use_global_stats 1 bool, moving_average_fraction 2 float, eps 3 float
BiasParameter: axis 1 int32, num_axes 2 int32, filler 3 FillerParameter
ContrastiveLossParameter: margin 1 float, legacy_version 2 bool
ConvolutionParameter: num_output 1 uint32, bias_term 2 bool, pad 3 uint32*, kernel_size 4 uint32*, stride 6 uint32*,
    dilation 18 uint32*, pad_h 9 uint32, pad_w 10 uint32, kernel_h 11 uint32, kernel_w 12 uint32, stride_h 13 uint32,
    stride_w 14 uint32, group 5 uint32, weight_filler 7 FillerParameter, bias_filler 8 FillerParameter,
    engine 15 Engine, axis 16 int32, force_nd_im2col 17 bool
CropParameter: axis 1 int32, offset 2 uint32*
DataParameter: source 1 string, batch_size 4 uint32, rand_skip 7 uint32, backend 8 DB, scale 2 float,
    mean_file 3 string, crop_size 5 uint32, mirror 6 bool, force_encoded_color 9 bool, prefetch 10 uint32
DropoutParameter: dropout_ratio 1 float
DummyDataParameter: data_filler 1 FillerParameter*, shape 6 BlobShape*, num 2 uint32*, channels 3 uint32*,
    height 4 uint32*, width 5 uint32*
EltwiseParameter: operation 1 EltwiseOp, coeff 2 float*, stable_prod_grad 3 bool
ELUParameter: alpha 1 float
EmbedParameter: num_output 1 uint32, input_dim 2 uint32, bias_term 3 bool, weight_filler 4 FillerParameter,
    bias_filler 5 FillerParameter
ExpParameter: base 1 float, scale 2 float, shift 3 float
FlattenParameter: axis 1 int32, end_axis 2 int32
HDF5DataParameter: source 1 string, batch_size 2 uint32, shuffle 3 bool
HDF5OutputParameter: file_name 1 string
HingeLossParameter: norm 1 Norm
ImageDataParameter: source 1 string, batch_size 4 uint32, rand_skip 7 uint32, shuffle 8 bool, new_height 9 uint32,
    new_width 10 uint32, is_color 11 bool, scale 2 float, mean_file 3 string, crop_size 5 uint32, mirror 6 bool,
    root_folder 12 string
InfogainLossParameter: source 1 string, axis 2 int32
InnerProductParameter: num_output 1 uint32, bias_term 2 bool, weight_filler 3 FillerParameter,
    bias_filler 4 FillerParameter, axis 5 int32, transpose 6 bool
InputParameter: shape 1 BlobShape*
LogParameter: base 1 float, scale 2 float, shift 3 float
LRNParameter: local_size 1 uint32, alpha 2 float, beta 3 float, norm_region 4 NormRegion, k 5 float, engine 6 Engine
MemoryDataParameter: batch_size 1 uint32, channels 2 uint32, height 3 uint32, width 4 uint32
MVNParameter: normalize_variance 1 bool, across_channels 2 bool, eps 3 float
ParameterParameter: shape 1 BlobShape
PoolingParameter: pool 1 PoolMethod, pad 4 uint32, pad_h 9 uint32, pad_w 10 uint32, kernel_size 2 uint32,
    kernel_h 5 uint32, kernel_w 6 uint32, stride 3 uint32, stride_h 7 uint32, stride_w 8 uint32, engine 11 Engine,
    global_pooling 12 bool, round_mode 13 RoundMode
PowerParameter: power 1 float, scale 2 float, shift 3 float
PythonParameter: module 1 string, layer 2 string, param_str 3 string, share_in_parallel 4 bool
RecurrentParameter: num_output 1 uint32, weight_filler 2 FillerParameter, bias_filler 3 FillerParameter,
    debug_info 4 bool, expose_hidden 5 bool
ReductionParameter: operation 1 ReductionOp, axis 2 int32, coeff 3 float
ReLUParameter: negative_slope 1 float, engine 2 Engine
ReshapeParameter: shape 1 BlobShape, axis 2 int32, num_axes 3 int32
ScaleParameter: axis 1 int32, num_axes 2 int32, filler 3 FillerParameter, bias_term 4 bool,
    bias_filler 5 FillerParameter
SigmoidParameter: engine 1 Engine
SliceParameter: axis 3 int32, slice_point 2 uint32*, slice_dim 1 uint32
SoftmaxParameter: engine 1 Engine, axis 2 int32
SwishParameter: beta 1 float
TanHParameter: engine 1 Engine
TileParameter: axis 1 int32, tiles 2 int32
ThresholdParameter: threshold 1 float
WindowDataParameter: source 1 string, scale 2 float, mean_file 3 string, batch_size 4 uint32, crop_size 5 uint32,
    mirror 6 bool, fg_threshold 7 float, bg_threshold 8 float, fg_fraction 9 float, context_pad 10 uint32,
    crop_mode 11 string, cache_images 12 bool, root_folder 13 string
SPPParameter: pyramid_height 1 uint32, pool 2 PoolMethod, engine 6 Engine
V1LayerParameter: bottom 2 string*, top 3 string*, name 4 string, include 32 NetStateRule*, exclude 33 NetStateRule*,
    type 5 LayerType, blobs 6 BlobProto*, param 1001 string*, blob_share_mode 1002 DimCheckMode*, blobs_lr 7 float*,
    weight_decay 8 float*, loss_weight 35 float*, accuracy_param 27 AccuracyParameter, argmax_param 23 ArgMaxParameter,
    concat_param 9 ConcatParameter, contrastive_loss_param 40 ContrastiveLossParameter,
    convolution_param 10 ConvolutionParameter, data_param 11 DataParameter, dropout_param 12 DropoutParameter,
    dummy_data_param 26 DummyDataParameter, eltwise_param 24 EltwiseParameter, exp_param 41 ExpParameter,
    hdf5_data_param 13 HDF5DataParameter, hdf5_output_param 14 HDF5OutputParameter,
    hinge_loss_param 29 HingeLossParameter, image_data_param 15 ImageDataParameter,
    infogain_loss_param 16 InfogainLossParameter, inner_product_param 17 InnerProductParameter,
    lrn_param 18 LRNParameter, memory_data_param 22 MemoryDataParameter, mvn_param 34 MVNParameter,
    pooling_param 19 PoolingParameter, power_param 21 PowerParameter, relu_param 30 ReLUParameter,
    sigmoid_param 38 SigmoidParameter, softmax_param 39 SoftmaxParameter, slice_param 31 SliceParameter,
    tanh_param 37 TanHParameter, threshold_param 25 ThresholdParameter, window_data_param 20 WindowDataParameter,
    transform_param 36 TransformationParameter, loss_param 42 LossParameter, layer 1 V0LayerParameter
V0LayerParameter: name 1 string, type 2 string, num_output 3 uint32, biasterm 4 bool, weight_filler 5 FillerParameter,
    bias_filler 6 FillerParameter, pad 7 uint32, kernelsize 8 uint32, group 9 uint32, stride 10 uint32,
    pool 11 PoolMethod, dropout_ratio 12 float, local_size 13 uint32, alpha 14 float, beta 15 float, k 22 float,
    source 16 string, scale 17 float, meanfile 18 string, batchsize 19 uint32, cropsize 20 uint32, mirror 21 bool,
    blobs 50 BlobProto*, blobs_lr 51 float*, weight_decay 52 float*, rand_skip 53 uint32, det_fg_threshold 54 float,
    det_bg_threshold 55 float, det_fg_fraction 56 float, det_context_pad 58 uint32, det_crop_mode 59 string,
    new_num 60 int32, new_channels 61 int32, new_height 62 int32, new_width 63 int32, shuffle_images 64 bool,
    concat_dim 65 uint32, hdf5_output_param 1001 HDF5OutputParameter
PReLUParameter: filler 1 FillerParameter, channel_shared 2 bool
"""
"""Rows ``Message: field number kind, ...``. A ``*`` after the kind marks a repeated field, a ``!`` a required one."""
_ENUMS = """
VarianceNorm: FAN_IN 0, FAN_OUT 1, AVERAGE 2
SnapshotFormat: HDF5 0, BINARYPROTO 1
SolverMode: CPU 0, GPU 1
SolverType: SGD 0, NESTEROV 1, ADAGRAD 2, RMSPROP 3, ADADELTA 4, ADAM 5
Phase: TRAIN 0, TEST 1
DimCheckMode: STRICT 0, PERMISSIVE 1
NormalizationMode: FULL 0, VALID 1, BATCH_SIZE 2, NONE 3
Engine: DEFAULT 0, CAFFE 1, CUDNN 2
DB: LEVELDB 0, LMDB 1
EltwiseOp: PROD 0, SUM 1, MAX 2
Norm: L1 1, L2 2
NormRegion: ACROSS_CHANNELS 0, WITHIN_CHANNEL 1
PoolMethod: MAX 0, AVE 1, STOCHASTIC 2
RoundMode: CEIL 0, FLOOR 1
ReductionOp: SUM 1, ASUM 2, SUMSQ 3, MEAN 4
LayerType: NONE 0, ABSVAL 35, ACCURACY 1, ARGMAX 30, BNLL 2, CONCAT 3, CONTRASTIVE_LOSS 37, CONVOLUTION 4, DATA 5,
    DECONVOLUTION 39, DROPOUT 6, DUMMY_DATA 32, EUCLIDEAN_LOSS 7, ELTWISE 25, EXP 38, FLATTEN 8, HDF5_DATA 9,
    HDF5_OUTPUT 10, HINGE_LOSS 28, IM2COL 11, IMAGE_DATA 12, INFOGAIN_LOSS 13, INNER_PRODUCT 14, LRN 15,
    MEMORY_DATA 29, MULTINOMIAL_LOGISTIC_LOSS 16, MVN 34, POOLING 17, POWER 26, RELU 18, SIGMOID 19,
    SIGMOID_CROSS_ENTROPY_LOSS 27, SILENCE 36, SOFTMAX 20, SOFTMAX_LOSS 21, SPLIT 22, SLICE 33, TANH 23,
    WINDOW_DATA 24, THRESHOLD 31
"""
"""Rows ``Enum: NAME number, ...``. An enum that Caffe declares in several messages appears once."""


class Field(NamedTuple):
    """A field of a message.

    Attributes:
        number: the field's number in the binary format.
        kind: a scalar type such as ``float``, or the name of a message or an enum.
        label: ``*`` if repeated, ``!`` if required, else empty.
    """

    number: int
    kind: str
    label: str


def _rows(table: str) -> dict[str, list[list[str]]]:
    """Parse a table: return the entries of each row, split into words, by the row's name."""
    lines = (line.partition(": ") for line in re.sub(r"\n +", " ", table.strip()).splitlines())
    return {name: [entry.split() for entry in rest.split(", ")] for name, _, rest in lines}


def _field(number: str, kind: str) -> Field:
    """Return a field from two words of the table; ``kind`` may end in a label."""
    bare = kind.rstrip("*!")
    return Field(int(number), bare, kind[len(bare) :])


MESSAGES: Mapping[str, Mapping[str, Field]] = {
    message: {name: _field(number, kind) for name, number, kind in rows} for message, rows in _rows(_MESSAGES).items()
}
"""The fields of each message, by name."""
ENUMS: Mapping[str, Mapping[str, int]] = {
    enum: {name: int(number) for name, number in rows} for enum, rows in _rows(_ENUMS).items()
}
"""The number of each value of each enum, by name."""

_PROTO = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _PROTO.TYPE_BOOL,
    "double": _PROTO.TYPE_DOUBLE,
    # Caffe uses 32 bits, but then the text 0.1 would be read as 0.10000000149.
    "float": _PROTO.TYPE_DOUBLE,
    "int32": _PROTO.TYPE_INT32,
    "int64": _PROTO.TYPE_INT64,
    "string": _PROTO.TYPE_STRING,
    "uint32": _PROTO.TYPE_UINT32,
}
_LABELS = {"": _PROTO.LABEL_OPTIONAL, "*": _PROTO.LABEL_REPEATED, "!": _PROTO.LABEL_REQUIRED}


@cache
def message_class(name: str) -> Any:
    """Return protobuf's class for the message ``name`` of :data:`MESSAGES`."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))


@cache
def _pool() -> Any:
    """Return a descriptor pool with all messages.

    It is not protobuf's default pool: if pycaffe is imported, too, that already has messages of the same names.
    """
    file = descriptor_pb2.FileDescriptorProto(name="gossipx/solver.proto")
    for enum, values in ENUMS.items():
        # protobuf requires unique value names within the scope of an enum, and several enums have SUM and MAX.
        declared = file.message_type.add(name=enum).enum_type.add(name="Value")
        for name, number in values.items():
            declared.value.add(name=name, number=number)
    for message, fields in MESSAGES.items():
        target = file.message_type.add(name=message)
        for name, field in fields.items():
            entry = target.field.add(name=name, number=field.number, label=_LABELS[field.label])
            if field.kind in _SCALARS:
                entry.type = _SCALARS[field.kind]
            elif field.kind in ENUMS:
                entry.type, entry.type_name = _PROTO.TYPE_ENUM, f".{field.kind}.Value"
            else:
                entry.type, entry.type_name = _PROTO.TYPE_MESSAGE, f".{field.kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool
