"""Training recipes as data, and their implementation: optimizers, schedules, averaged weights, mixup and CutMix."""

from rooftop.train.recipes.checks import check_recipe
from rooftop.train.recipes.freezing import freeze
from rooftop.train.recipes.mean_weights import MeanWeights
from rooftop.train.recipes.mixing import mixer
from rooftop.train.recipes.optimizers import optimizer_of
from rooftop.train.recipes.preparing import prepare_model
from rooftop.train.recipes.rates import rate_factor, set_rates
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.recipes.regularizing import regularize
from rooftop.train.recipes.starting import Started, start_from

__all__ = [
    "MeanWeights",
    "Recipe",
    "Started",
    "check_recipe",
    "freeze",
    "mixer",
    "optimizer_of",
    "prepare_model",
    "rate_factor",
    "regularize",
    "set_rates",
    "start_from",
]
