"""Training: a GPT on one process or on many, the same in every layout.

    torchrun --nproc-per-node 4 -m rooftop.train gpt --tensor-parallel-size 2 --data-path text/

`GptTraining` says what is trained, `GptTrainer` makes its steps, `run_steps` is the loop; `save_training` and
`load_training` write and read it, and a `Saver` writes it beside the steps.
"""

from rooftop.train.adamw import AdamW
from rooftop.train.batches import Batches
from rooftop.train.checkpoints import find_training, load_training, nothing_saved, other_data, save_training
from rooftop.train.gpt_trainer import GptTrainer
from rooftop.train.gpt_training import GptTraining
from rooftop.train.main_weights import MainWeights
from rooftop.train.mixtures import Mixture, open_mixture
from rooftop.train.replays import Replayed
from rooftop.train.running import StepReport, run_steps
from rooftop.train.savers import Saver
from rooftop.train.speeds import StepRoof, step_cost, step_roof
from rooftop.train.tokens import Tokens, open_tokens

__all__ = [
    "AdamW",
    "Batches",
    "GptTrainer",
    "GptTraining",
    "MainWeights",
    "Mixture",
    "Replayed",
    "Saver",
    "StepReport",
    "StepRoof",
    "Tokens",
    "find_training",
    "load_training",
    "nothing_saved",
    "open_mixture",
    "open_tokens",
    "other_data",
    "run_steps",
    "save_training",
    "step_cost",
    "step_roof",
]
