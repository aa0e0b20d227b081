"""A text decoder: its network, published configurations and weights, its split over ranks, and text generation."""

from rooftop.models.gpt.configs import gpt_config
from rooftop.models.gpt.generation import Generation, generate, step_cost
from rooftop.models.gpt.layouts import fully_sharded_gpt, parallel_gpt
from rooftop.models.gpt.network import Cache, Gpt, continue_greedily
from rooftop.models.gpt.sampling import Sampling
from rooftop.models.gpt.stages import parallel_gpt_stages
from rooftop.models.gpt.switches import GptConfig
from rooftop.models.gpt.tokenizing import ByteTokenizer, Decoder
from rooftop.models.gpt.weights import gpt_state_dict, hugging_face_state_dict, load_gpt, load_gpt_weights, save_gpt

__all__ = [
    "ByteTokenizer",
    "Cache",
    "Decoder",
    "Generation",
    "Gpt",
    "GptConfig",
    "Sampling",
    "continue_greedily",
    "fully_sharded_gpt",
    "generate",
    "gpt_config",
    "gpt_state_dict",
    "hugging_face_state_dict",
    "load_gpt",
    "load_gpt_weights",
    "parallel_gpt",
    "parallel_gpt_stages",
    "save_gpt",
    "step_cost",
]
