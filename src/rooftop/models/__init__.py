"""Models that load other libraries' weights and state dicts, and functions that read photographs for them."""

from rooftop.models.conv_lstm.keras_weights import load_keras_weights
from rooftop.models.conv_lstm.layer import ConvLSTM2D
from rooftop.models.conv_lstm.network import (
    NextFrameNetwork,
    colour_next_frame_network,
    next_frame_network,
    predict_frames,
)
from rooftop.models.detr.coco import CocoDataset, as_lists, average_precision
from rooftop.models.detr.detection import Detected, FoundObject, detect, draw_objects, load_detector
from rooftop.models.detr.network import Detr, detr_resnet50, detr_resnet101
from rooftop.models.detr.small import detr_small
from rooftop.models.gpt.configs import gpt_config
from rooftop.models.gpt.generation import Generation, generate
from rooftop.models.gpt.layouts import fully_sharded_gpt, parallel_gpt
from rooftop.models.gpt.network import Gpt, continue_greedily
from rooftop.models.gpt.stages import parallel_gpt_stages
from rooftop.models.gpt.switches import GptConfig
from rooftop.models.gpt.weights import gpt_state_dict, hugging_face_state_dict, load_gpt, save_gpt
from rooftop.models.images import Preprocessing, find_images, load_images, read_image
from rooftop.models.loading import load, load_report
from rooftop.models.point_clouds.second import SecondBackbone, second_backbone, second_state_dict
from rooftop.models.point_clouds.sparse_unet import MinkUNet, SparseUNet, minkunet18, minkunet34
from rooftop.models.registry import ModelEntry, builtin_models, model_entry
from rooftop.models.vision.classification import Classified, Guess, classify, load_classifier
from rooftop.models.vision.hybrid import Hybrid, hybrid_s, hybrid_t
from rooftop.models.vision.resnet import (
    ResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnext50_32x4d,
    resnext101_32x8d,
    resnext101_64x4d,
    wide_resnet50_2,
    wide_resnet101_2,
)
from rooftop.models.vision.swin import SwinTransformer, swin_b, swin_s, swin_t, swin_v2_b, swin_v2_s, swin_v2_t
from rooftop.models.vision.video_classification import ClassifiedFrame, SampledVideo, classify_video
from rooftop.models.weights.load_reports import LoadReport

__all__ = [
    "Classified",
    "ClassifiedFrame",
    "CocoDataset",
    "ConvLSTM2D",
    "Detected",
    "Detr",
    "FoundObject",
    "Generation",
    "Gpt",
    "GptConfig",
    "Guess",
    "Hybrid",
    "LoadReport",
    "MinkUNet",
    "ModelEntry",
    "NextFrameNetwork",
    "Preprocessing",
    "ResNet",
    "SampledVideo",
    "SecondBackbone",
    "SparseUNet",
    "SwinTransformer",
    "as_lists",
    "average_precision",
    "builtin_models",
    "classify",
    "classify_video",
    "colour_next_frame_network",
    "continue_greedily",
    "detect",
    "detr_resnet50",
    "detr_resnet101",
    "detr_small",
    "draw_objects",
    "find_images",
    "fully_sharded_gpt",
    "generate",
    "gpt_config",
    "gpt_state_dict",
    "hugging_face_state_dict",
    "hybrid_s",
    "hybrid_t",
    "load",
    "load_classifier",
    "load_detector",
    "load_gpt",
    "load_images",
    "load_keras_weights",
    "load_report",
    "minkunet18",
    "minkunet34",
    "model_entry",
    "next_frame_network",
    "parallel_gpt",
    "parallel_gpt_stages",
    "predict_frames",
    "read_image",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "save_gpt",
    "second_backbone",
    "second_state_dict",
    "swin_b",
    "swin_s",
    "swin_t",
    "swin_v2_b",
    "swin_v2_s",
    "swin_v2_t",
    "wide_resnet50_2",
    "wide_resnet101_2",
]
