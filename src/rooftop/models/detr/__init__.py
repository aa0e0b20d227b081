"""DETR, a transformer that predicts the set of objects in an image: the network, its losses, weights from other
libraries, and detection on photographs."""

from rooftop.models.detr.losses import Detections, Matcher, SetCriterion, Target, corners, to_detections
from rooftop.models.detr.network import Detr, detr_resnet50, detr_resnet101, pad_images
from rooftop.models.detr.weights import detr_state_dict, load_detr_weights

__all__ = [
    "Detections",
    "Detr",
    "Matcher",
    "SetCriterion",
    "Target",
    "corners",
    "detr_resnet50",
    "detr_resnet101",
    "detr_state_dict",
    "load_detr_weights",
    "pad_images",
    "to_detections",
]
