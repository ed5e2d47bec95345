"""Fields that forks of Caffe have added, so that a file for such a fork is told from a typing error.

The tables list the names in ``caffe.proto`` of NVIDIA's branches caffe-0.13 to caffe-0.17, and of the branch ssd of
weiliu89/caffe (SSD, the Single Shot MultiBox Detector), that are not in the schema of BVLC's Caffe.
"""

from __future__ import annotations

_SSD = {
    "SolverParameter": "ap_version eval_type plateau_winsize show_per_class_result",
    "LayerParameter": """annotated_data_param detection_evaluate_param detection_output_param multibox_loss_param
        norm_param permute_param prior_box_param video_data_param""",
    "TransformationParameter": "crop_h crop_w distort_param emit_constraint expand_param noise_param resize_param",
}
_NVIDIA = {
    "SolverParameter": """larc larc_eta larc_policy larc_turbo max_momentum max_weight_decay min_lr momentum_policy
        momentum_power per_parameter_reduce rampup_interval rampup_lr solver_data_type store_blobs_in_old_format
        test_and_snapshot_last_epochs weight_decay_policy weight_decay_power""",
    "NetParameter": """default_backward_math default_backward_type default_conv_algos_override
        default_cudnn_math_override default_forward_math default_forward_type eltwise_mem_sharing global_grad_scale
        global_grad_scale_adaptive reduce_buckets""",
    "LayerParameter": """backward_math backward_type cudnn_math_override debug detectnet_augmentation_param
        detectnet_groundtruth_param forward_math forward_type trt_param""",
    "BlobProto": "raw_data raw_data_type raw_diff raw_diff_type",
    "TransformationParameter": """allow_upscale display forward_packing horizontal_stretch_lower
        horizontal_stretch_upper img_rand_resize_lower img_rand_resize_upper interpolation_algo_down
        interpolation_algo_up num_labels rand_resize_ratio_lower rand_resize_ratio_upper random_seed use_gpu_transform
        vertical_stretch_lower vertical_stretch_upper""",
    "LossParameter": "label_smoothing",
    "ConvolutionParameter": """CuDNNBwdDataAlgo CuDNNBwdFilterAlgo CuDNNFwdAlgo CuDNNWorkspaceSize conv_algos_override
        cudnn_convolution_algo_seeker""",
    "DataParameter": "cache parser_threads precache shuffle threads",
    "DropoutParameter": "engine random_seed",
    "ImageDataParameter": "cache dataset_share_per_node precache short_side threads",
    "PoolingParameter": "torch_pooling",
    "BatchNormParameter": "bias_filler engine scale_bias scale_filler",
    "ELUParameter": "lambda",
}
_FORKS = {"SSD's fork of Caffe": _SSD, "NVIDIA's fork of Caffe": _NVIDIA}


def fork_of(message: str, name: str) -> str | None:
    """Return which fork has added the field ``name`` to a message of the schema; None: no known one."""
    return next((fork for fork, added in _FORKS.items() if name in added.get(message, "").split()), None)
