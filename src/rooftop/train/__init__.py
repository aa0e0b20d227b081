"""Train a GPT in one or many processes, with the same losses, up to rounding, in every layout of ranks.

    torchrun --nproc-per-node 4 -m rooftop.train gpt --tensor-parallel-size 2 --data-path text/

`GptTraining` describes a training, `GptTrainer` runs its steps, and `run_steps` is the loop. `save_training` and
`load_training` write and read checkpoints; a `Saver` writes them in the background.
"""

from rooftop.train.checkpoints.savers import Saver
from rooftop.train.checkpoints.trainings import find_training, load_training, nothing_saved, other_data, save_training
from rooftop.train.gpt.running import StepReport, run_steps
from rooftop.train.gpt.speeds import StepRoof, step_cost, step_roof
from rooftop.train.gpt.trainer import GptTrainer
from rooftop.train.gpt.training import GptTraining
from rooftop.train.gpt.validating import Validation, split_tokens
from rooftop.train.optimizers.adamw import AdamW
from rooftop.train.optimizers.main_weights import MainWeights
from rooftop.train.replays import Replayed
from rooftop.train.tokens.batches import Batches
from rooftop.train.tokens.mixtures import Mixture, open_mixture
from rooftop.train.tokens.tokens import Tokens, open_tokens

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
    "Validation",
    "find_training",
    "load_training",
    "nothing_saved",
    "open_mixture",
    "open_tokens",
    "other_data",
    "run_steps",
    "save_training",
    "split_tokens",
    "step_cost",
    "step_roof",
]
