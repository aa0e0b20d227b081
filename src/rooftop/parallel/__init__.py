"""One model on several GPUs: split models and batches over ranks, and start and end ranks together.

    from rooftop.parallel import Layout, join, launched

    layout = Layout.of_world(launched().size, tp=2)
    with join(layout) as world:
        groups = layout.process_groups()

The package imports each name at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftop.first_use import on_first_use

if TYPE_CHECKING:
    from rooftop.parallel.chunks import Chunks
    from rooftop.parallel.contexts import TRANSPORTS, Context, ContextAttention
    from rooftop.parallel.data_parallel import DataParallel, gather, parallel_apply, scatter
    from rooftop.parallel.deferred import defer_weight_gradients
    from rooftop.parallel.documents import Documents
    from rooftop.parallel.dropouts import CounterDropouts
    from rooftop.parallel.errors import RankError
    from rooftop.parallel.exchanges import (
        copy_to_ranks,
        gather_of_ranks,
        join_of_ranks,
        scattered_sum_of_ranks,
        sum_of_ranks,
    )
    from rooftop.parallel.gradients import ModelGradients, targets_of_all_ranks
    from rooftop.parallel.launchers import Launch, launched
    from rooftop.parallel.layouts import Layout
    from rooftop.parallel.mlps import ParallelMLP
    from rooftop.parallel.packings import Packing
    from rooftop.parallel.pipelines import Pipeline
    from rooftop.parallel.places import others_wait, report
    from rooftop.parallel.processes import World, join
    from rooftop.parallel.randomness import Constant, Normal, Stream, Uniform, init_on_meta, materialize
    from rooftop.parallel.replicas import replicate
    from rooftop.parallel.schedules import Schedule, schedule_of, simulate
    from rooftop.parallel.self_attentions import ParallelSelfAttention
    from rooftop.parallel.sharded_data import fully_sharded
    from rooftop.parallel.shards import Piece, Shard, shards_of
    from rooftop.parallel.tensor_linears import ColumnParallelLinear, RowParallelLinear
    from rooftop.parallel.transport_plans import Exchange, TransportPlan, choose_transport
    from rooftop.parallel.vocab_embeddings import VocabParallelEmbedding
    from rooftop.parallel.vocab_losses import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

__all__ = [
    "TRANSPORTS",
    "Chunks",
    "ColumnParallelLinear",
    "Constant",
    "Context",
    "ContextAttention",
    "CounterDropouts",
    "DataParallel",
    "Documents",
    "Exchange",
    "Launch",
    "Layout",
    "ModelGradients",
    "Normal",
    "Packing",
    "ParallelMLP",
    "ParallelSelfAttention",
    "Piece",
    "Pipeline",
    "RankError",
    "RowParallelLinear",
    "Schedule",
    "Shard",
    "Stream",
    "TransportPlan",
    "Uniform",
    "VocabParallelEmbedding",
    "World",
    "choose_transport",
    "copy_to_ranks",
    "defer_weight_gradients",
    "fully_sharded",
    "gather",
    "gather_of_ranks",
    "init_on_meta",
    "join",
    "join_of_ranks",
    "launched",
    "materialize",
    "others_wait",
    "parallel_apply",
    "replicate",
    "report",
    "scatter",
    "scattered_sum_of_ranks",
    "schedule_of",
    "shards_of",
    "simulate",
    "sum_of_ranks",
    "targets_of_all_ranks",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        ".chunks": "Chunks",
        ".contexts": "Context ContextAttention TRANSPORTS",
        ".data_parallel": "DataParallel gather parallel_apply scatter",
        ".documents": "Documents",
        ".deferred": "defer_weight_gradients",
        ".dropouts": "CounterDropouts",
        ".errors": "RankError",
        ".exchanges": "copy_to_ranks gather_of_ranks join_of_ranks scattered_sum_of_ranks sum_of_ranks",
        ".gradients": "ModelGradients targets_of_all_ranks",
        ".launchers": "Launch launched",
        ".layouts": "Layout",
        ".mlps": "ParallelMLP",
        ".packings": "Packing",
        ".pipelines": "Pipeline",
        ".places": "others_wait report",
        ".processes": "World join",
        ".randomness": "Constant Normal Stream Uniform init_on_meta materialize",
        ".replicas": "replicate",
        ".schedules": "Schedule schedule_of simulate",
        ".self_attentions": "ParallelSelfAttention",
        ".sharded_data": "fully_sharded",
        ".shards": "Piece Shard shards_of",
        ".tensor_linears": "ColumnParallelLinear RowParallelLinear",
        ".transport_plans": "Exchange TransportPlan choose_transport",
        ".vocab_embeddings": "VocabParallelEmbedding",
        ".vocab_losses": "vocab_parallel_cross_entropy vocab_parallel_linear_cross_entropy",
    },
)
