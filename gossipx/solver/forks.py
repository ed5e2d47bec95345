"""Fields that forks of Caffe have added, so that a file for such a fork is told from a typing error.

The tables list the names in ``caffe.proto`` of NVIDIA's branches caffe-0.13 to caffe-0.17, of the branch ssd of
weiliu89/caffe (SSD, the Single Shot MultiBox Detector), and of Intel's last release (without SSD's, which it includes),
that are not in the schema of BVLC's Caffe.
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
_INTEL = {
    "SolverParameter": """disabled_update engine local_gw_ratio local_lr_auto stageiter stagelr test_offset warmup_iter
        warmup_start_lr""",
    "NetParameter": "bn_stats_batch_size compile_net_state engine multinode",
    "LayerParameter": """box_annotator_ohem_param engine eval_detection_param mn_activation_param mn_grad_compress_param
        multinode psroi_pooling_param quantization_param region_loss_param reorg_param roi_pooling_param
        smooth_l1_loss_param spatial_dropout_param split_param""",
    "TransformationParameter": "bgr2rgb flow pad random_aspect_ratio_param random_resize_param",
    "FillerParameter": "scale",
    "LossParameter": "label_smoothing pre_fixed_normalizer",
    "ConcatParameter": "engine per_fla_fuse",
    "BatchNormParameter": "bias_filler bias_term engine filler relu stats_batch_size use_weight_bias",
    "ConvolutionParameter": "coeff conv_algorithm fusion_type negative_slope relu",
    "DataParameter": "shuffle side",
    "EltwiseParameter": "engine",
    "ImageDataParameter": "min_height min_width",
    "InnerProductParameter": "engine negative_slope relu",
    "PoolingParameter": "avg_include_pad axis kernel_size_3d pad_3d stride_3d",
    "ReLUParameter": "fuse",
    "ReshapeParameter": "pixelshuffler",
}
_FORKS = {"SSD's fork of Caffe": _SSD, "NVIDIA's fork of Caffe": _NVIDIA, "Intel's fork of Caffe": _INTEL}


def fork_of(message: str, name: str) -> str | None:
    """Return which fork has added the field ``name`` to a message of the schema; None: no known one."""
    return next((fork for fork, added in _FORKS.items() if name in added.get(message, "").split()), None)
