"""Run one rank of a pipeline: execute its instructions, and exchange activations and gradients with other ranks.

    pipeline = Pipeline(schedule, group=groups["pp"], shape=(B, S, W), dtype=torch.bfloat16, device=world.device)
    losses = pipeline.run(lambda stage, micro_batch, x: model(...))   # afterwards, gradients are in the parameters

The tensors between stages always have the same shape and dtype, so ranks need not exchange sizes. For a micro-batch in
flight, a rank keeps the tensors that autograd has saved and the stage's input. The stage's output is kept only until it
is sent. `rooftop.parallel.transfers` orders sends and receives so that no rank waits forever.

If a schedule splits backward, the model's linear layers defer their weights' gradients (`rooftop.parallel.deferred`).
Deferred gradients are summed in the same order of micro-batches as gradients without deferral, so the results are
equal.

If a rank waits for another rank that will never answer, the wait fails like any communication within
`rooftop.parallel.join`. The error names the awaited instruction and its rank. On a GPU, the error names the instruction
that the GPU has reached, and not the instruction that Python has reached.

On a GPU, the host does not wait during a step, so a CUDA graph can capture the step with its sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rooftop.parallel.deferred import Deferral, Later
from rooftop.parallel.exchanges import Group, place_in
from rooftop.parallel.places import awaiting
from rooftop.parallel.progress import Progress
from rooftop.parallel.schedules import Instruction, Schedule
from rooftop.parallel.transfers import AHEAD, Receive, Send, Transfer, program_of, stage_after

Compute = Callable[[int, int, Tensor | None], Tensor]
"""A function of the stage, the micro-batch and the previous stage's result (None at the first stage). The function
returns the next stage's input or, at the last stage, the micro-batch's share of the loss, (). If a stage is frozen or
does not use its input, the gradient of its input is 0.
"""


class Pipeline:
    """One rank of a pipeline. All ranks of the pipeline create a `Pipeline` and call its methods together.

    Args:
        schedule: a schedule for as many ranks as the group has.
        group: the ranks of the pipeline; None: only this rank.
        shape: the shape that the tensors between stages have on this rank.
        dtype, device: dtype and device of these tensors.
        deferral: the deferral of the model's layers, which a schedule that splits backward needs.

    Attributes:
        program: this rank's work in a step.

    Raises:
        ValueError: the schedule is for another number of ranks than the group has, or the schedule splits backward and
            there is no deferral.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        group: Group,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        deferral: Deferral | None = None,
    ) -> None:
        self.rank, ranks = place_in(group)
        if schedule.ranks != ranks:
            raise ValueError(
                f"Pipeline: the schedule {schedule.name} is for {schedule.ranks} ranks, but the group has {ranks}: "
                "create the schedule for that number"
            )
        if schedule.splits_backward and deferral is None:
            raise ValueError(
                f"Pipeline: the schedule {schedule.name} computes weight gradients separately: give the deferral "
                "from rooftop.parallel.defer_weight_gradients(model)"
            )
        self.schedule, self.group = schedule, group
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.deferral = deferral
        self.program = program_of(schedule, self.rank, 0 if device.type == "cuda" else AHEAD)
        self.progress = Progress(self._places(), device) if device.type == "cuda" else None

    def _places(self) -> Iterator[str]:
        """Yield the texts for `progress`, which describe this rank's activity: its wait and its computation for each
        instruction, and its wait at the end."""
        arriving = {each.transfer.made_by: each.transfer for each in self.program if isinstance(each, Receive)}
        for instruction in (each for each in self.program if isinstance(each, Instruction)):
            awaited = [arriving[each] for each in self.schedule.needs(instruction) if each in arriving]
            yield self.awaited(awaited[0]) if awaited else f"about to compute the {instruction.words}"
            yield f"computing the {instruction.words}"
        yield "waiting for other ranks to receive its results"

    def awaited(self, transfer: Transfer) -> str:
        """Describe this rank's wait for a transfer that it receives."""
        return f"awaiting the {transfer.made_by.words} of rank {self.global_rank(transfer.source)}"

    def run(self, compute: Compute) -> list[Tensor]:
        """Run one step: forward and backward of all micro-batches. Gradients are accumulated in the parameters.

        Args:
            compute: runs a stage on a micro-batch. `run` calls it for this rank's stages, in the schedule's order.

        Returns:
            The detached losses of the micro-batches in order, () each; empty on a rank without the last stage.

        Raises:
            RuntimeError: a rank failed (a note says what this rank was computing or awaiting), a stage other than the
                last did not return a tensor of the common shape and dtype, or the last stage did not return a scalar
                that requires a gradient.
        """
        step = _Step(self, compute)
        for each in self.program:
            if isinstance(each, Receive):
                step.receive(each.transfer)
            elif isinstance(each, Send):
                step.send(each.transfer)
            else:
                step.do(each)
        step.finish()
        step.at(Progress.DONE)
        return [loss for _, loss in sorted(step.losses.items())]

    @torch.no_grad()
    def forward(self, compute: Compute, micro_batches: int) -> list[Tensor]:
        """Run only forward, as for validation. Returns and raises the same as `run`, but does not check the result of
        the last stage.

        All ranks process the micro-batches in the same order, so no rank can wait forever. A rank with one stage
        computes all micro-batches without waiting for later stages. At the end, it waits until they have received its
        outputs.
        """
        rank_of, stages = self.schedule.rank_of, self.schedule.stages
        losses, sending, made = list[Tensor](), list[_Posted](), torch.empty(0)
        for number in range(micro_batches):
            for stage in range(stages):
                if rank_of[stage] != self.rank:
                    continue
                if stage and rank_of[stage - 1] != self.rank:
                    given = Instruction("F", stage - 1, number)
                    transfer = Transfer(number * stages + stage - 1, given, rank_of[stage - 1], self.rank)
                    made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
                    with _noting(self.awaited(transfer)):
                        dist.recv(made, group=self.group, tag=transfer.number, group_src=transfer.source)
                instruction = Instruction("F", stage, number)
                with _noting(f"computing the {instruction.words}"):
                    made = compute(stage, number, made if stage else None)
                    if stage + 1 < stages:
                        self.check(stage, made)
                if stage + 1 == stages:
                    losses.append(made)
                elif rank_of[stage + 1] != self.rank:
                    transfer = Transfer(number * stages + stage, instruction, self.rank, rank_of[stage + 1])
                    made = made.contiguous()
                    with _noting(self.taken(transfer)):
                        work = dist.isend(made, group=self.group, tag=transfer.number, group_dst=transfer.target)
                    sending.append(_Posted(transfer, work, made))
        for posted in sending:
            with _noting(self.taken(posted.transfer)):
                posted.work.wait()
        return losses

    def check(self, stage: int, output: object) -> None:
        """Check the result of any stage but the last.

        Raises:
            RuntimeError: the result is not a tensor of the common shape and dtype.
        """
        if not isinstance(output, Tensor) or tuple(output.shape) != self.shape or output.dtype != self.dtype:
            raise RuntimeError(
                f"Pipeline: stage {stage} returned {_in_words(output)}, expected {self.shape} {self.dtype} for the "
                "next stage: create the pipeline with the actual shape and dtype"
            )

    def taken(self, transfer: Transfer) -> str:
        """Describe this rank's wait until another rank has received a transfer."""
        towards = stage_after(transfer.made_by, self.schedule.stages)
        target = self.global_rank(transfer.target)
        return f"waiting for rank {target}, for stage {towards}, to receive the {transfer.made_by.words}"

    def global_rank(self, rank: int) -> int:
        """The global rank of a pipeline rank."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@dataclass
class _Posted:
    """A transfer in progress, with its tensor."""

    transfer: Transfer
    work: Any
    tensor: Tensor


@dataclass
class _Step:
    """The state of a rank during a step.

    Attributes:
        inputs, outputs: the input of a stage, and the output from which the stage's backward starts, by (stage,
            micro-batch). Both are kept from the forward (F) to the backward (B) or input gradient (I). An output is
            None if it needs no gradient, because the stage is frozen.
        receiving: transfers to this rank in progress, by the instruction that computes the sent data.
        made: results that are still needed, by the instruction that computed the result. A result is needed until it
            is sent, or until another stage of this rank has used it.
        sending: sends whose data may not have arrived yet. On a GPU, once a receive from a rank is complete, all sends
            to that rank that were posted before this receive have arrived. gloo reports arrival only in a wait, at the
            end of the step.
        later: deferred weight gradients, kept until the instruction W computes them. A frozen stage has none.
        losses: the loss of each micro-batch.
        place: the index in `Pipeline.progress` of the text about the next instruction.
    """

    pipeline: Pipeline
    compute: Compute
    inputs: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    outputs: dict[tuple[int, int], GradientEdge | Tensor | None] = field(default_factory=dict)
    receiving: dict[Instruction, _Posted] = field(default_factory=dict)
    made: dict[Instruction, Tensor] = field(default_factory=dict)
    sending: list[_Posted] = field(default_factory=list)
    later: dict[tuple[int, int], Later] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    place: int = 0

    def at(self, place: int) -> None:
        """Record on the stream that the GPU has reached the text with the index `place` in `Pipeline.progress`, so that
        the GPU's progress can be queried."""
        if self.pipeline.progress is not None:
            self.pipeline.progress.mark(place)

    # ---- instructions ----

    def do(self, instruction: Instruction) -> None:
        """Wait for an instruction's inputs, then compute it."""
        kind, stage, micro_batch = instruction
        schedule = self.pipeline.schedule
        self.at(self.place)
        self.place += 2
        if kind == "W":
            self.at(self.place - 1)
            with _noting(f"computing the {instruction.words}"):
                self.later.pop((stage, micro_batch), Later()).make()
            return
        needed = schedule.needs(instruction)
        from_other = stage > 0 if kind == "F" else stage + 1 < schedule.stages
        given = self._given(needed[0]) if from_other else None
        self.at(self.place - 1)
        with _noting(f"computing the {instruction.words}"):
            made = (
                self._forward(stage, micro_batch, given)
                if kind == "F"
                else self._backward(stage, micro_batch, given, split=kind == "I")
            )
        if made is not None:
            self.made[instruction] = made

    def _forward(self, stage: int, micro_batch: int, given: Tensor | None) -> Tensor | None:
        place = stage, micro_batch
        if given is not None:
            given.requires_grad_()
        self.inputs[place] = given
        output = self.compute(stage, micro_batch, given)
        if stage + 1 == self.pipeline.schedule.stages:
            _check_loss(output)
            self.outputs[place] = output
            self.losses[micro_batch] = output.detach()
            return None
        self.pipeline.check(stage, output)
        # Backward needs the output's node in the graph, not its values.
        self.outputs[place] = get_gradient_edge(output) if output.requires_grad else None
        return output.detach().contiguous()

    def _backward(self, stage: int, micro_batch: int, given: Tensor | None, split: bool) -> Tensor | None:
        place = stage, micro_batch
        output, input = self.outputs.pop(place), self.inputs.pop(place)
        if output is not None:
            with self._collecting(place) if split else nullcontext():
                torch.autograd.backward(output, given)
        if input is None:
            return None
        return torch.zeros_like(input) if input.grad is None else input.grad.contiguous()

    @contextmanager
    def _collecting(self, place: tuple[int, int]) -> Iterator[None]:
        assert self.pipeline.deferral is not None
        with self.pipeline.deferral.collecting() as self.later[place]:
            yield

    # ---- transfers ----

    def receive(self, transfer: Transfer) -> None:
        """Post a receive."""
        pipeline = self.pipeline
        tensor = torch.empty(pipeline.shape, dtype=pipeline.dtype, device=pipeline.device)
        with _noting(pipeline.awaited(transfer)):
            work = dist.irecv(tensor, group=pipeline.group, tag=transfer.number, group_src=transfer.source)
        self.receiving[transfer.made_by] = _Posted(transfer, work, tensor)

    def send(self, transfer: Transfer) -> None:
        """Post a send."""
        pipeline, tensor = self.pipeline, self.made.pop(transfer.made_by)
        with _noting(pipeline.taken(transfer)):
            work = dist.isend(tensor, group=pipeline.group, tag=transfer.number, group_dst=transfer.target)
        self.sending.append(_Posted(transfer, work, tensor))

    def _given(self, made_by: Instruction) -> Tensor:
        """Take the result of the instruction `made_by` of an adjacent stage. If that stage is on another rank, wait
        until the result arrives."""
        if made_by in self.made:
            return self.made.pop(made_by)
        posted = self.receiving.pop(made_by)
        with _noting(self.pipeline.awaited(posted.transfer)):
            posted.work.wait()
        if posted.tensor.device.type == "cuda":  # NCCL runs the transfers between two ranks in order
            self.sending = [
                each
                for each in self.sending
                if each.transfer.target != posted.transfer.source or each.transfer.number > posted.transfer.number
            ]
        return posted.tensor

    def finish(self) -> None:
        """Wait until the other ranks have received all results that this rank sends."""
        self.at(self.place)
        for posted in self.sending:
            with _noting(self.pipeline.taken(posted.transfer)):
                posted.work.wait()


def _check_loss(output: object) -> None:
    if not isinstance(output, Tensor) or output.shape != () or not output.requires_grad:
        without = isinstance(output, Tensor) and not output.requires_grad
        raise RuntimeError(
            f"Pipeline: the last stage returned {_in_words(output)}{' that needs no gradient' * without}, expected the "
            "loss, () with a gradient: sum the losses of the micro-batch, outside torch.no_grad()"
        )


def _in_words(output: object) -> str:
    if not isinstance(output, Tensor):
        return f"a value of the type {type(output).__name__}"
    return f"{tuple(output.shape)} {output.dtype}"


@contextmanager
def _noting(what: str) -> Iterator[None]:
    """If the block raises an exception, add `what`, this rank's activity, to it as a note. While the block runs, other
    ranks can query the activity."""
    try:
        with awaiting(what.removeprefix("awaiting ")) if what.startswith("awaiting ") else nullcontext():
            yield
    except Exception as error:
        error.add_note(f"this rank was {what}")
        raise
