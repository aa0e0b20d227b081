"""Models for vision and video compared with torchvision, transformers and Keras: ms, images/s, and the roof.

    python benchmarks/models.py [--out benchmarks/results/h200/models.json] [--only resnet50 conv_lstm-training]
    python benchmarks/models.py --reports build/reports --peers fast

ResNet-50, Swin-T and DETR run by `rooftop.inference.Engine` in bfloat16. The peers are torchvision's and transformers'
models: unchanged, channels last, and compiled with max-autotune. The network of Keras's example of next-frame
prediction is compared with Keras on its torch back end, forward and training step, with TF32 on both sides. All
variants of a case have the same weights. The row has the distance between each peer's results and ours.

Each variant is called eagerly, and replayed from a CUDA graph. All variants of a case are interleaved, and figures are
medians. The roof is our model's fused roof at the ceilings measured in the same run. It counts one transfer each of
inputs, parameters and results. Rows are written after each case. If a case fails, the others still run, and the run
fails at the end. `--peers fast` leaves out compiled variants, which take minutes for each case. `--peers none` leaves
out all peers. A peer that is not installed has a row that says so. `--reports` writes the reports of `rooftop.analyze`
about our model, launched without a graph. `--quick` tests the script on a CPU, with small inputs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from programs import imported
from torch import Tensor, nn

import rooftop
from rooftop import models
from rooftop.hardware import Ceilings, ceilings_of, compare, measure_ceilings
from rooftop.hardware.graphs import captured, waits_for_gpu
from rooftop.inference import Engine
from rooftop.models.detr.weights import detr_state_dict
from rooftop.models.vision.resnet import Bottleneck
from rooftop.whole_files import write_json

Call = Callable[[], Any]
BF16 = torch.bfloat16
# relative error: fifty layers in bfloat16 change results by about 0.02, different work changes them by about 1
FARTHEST = 0.1
REPLAYED = ", replayed"


@dataclass(frozen=True)
class Scale:
    """The sizes of a run.

    Attributes:
        device: the device of the run.
        batch: the maximum batch of images or clips.
        side: side of square photographs. `height` and `width` are the size of photographs for detection.
        depths, layers: depths of the detector's ResNet, and number of layers in its encoder and in its decoder.
        steps, frame, filters: frames of a clip, side of a frame, and filters of the network that continues clips.
    """

    device: str = "cuda"
    batch: int = 256
    side: int = 224
    height: int = 800
    width: int = 1216
    depths: tuple[int, ...] = (3, 4, 6, 3)
    layers: int = 6
    steps: int = 19
    frame: int = 64
    filters: int = 64


QUICK = Scale("cpu", batch=2, side=32, height=64, width=96, depths=(1, 1, 1, 1), layers=1, steps=3, frame=8, filters=4)


@dataclass
class Work:
    """The measurements of a case.

    Attributes:
        model, inputs: the arguments for `rooftop.predict` and `rooftop.analyze`.
        calls: the variants, ours first.
        own_graph: variants that already replay a graph.
        apart: for each peer, the relative distance |theirs - ours| / |ours| of its results.
        absent: variants that cannot be measured, and why.
        step: `train` and `loss` for `predict` and `analyze`; these arguments turn a call into a training step.
        optimizer: creates the step's optimizer from the parameters.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    calls: dict[str, Call] = field(default_factory=dict)
    own_graph: set[str] = field(default_factory=set)
    apart: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] | None = None


@dataclass(frozen=True)
class Case:
    """A model at a batch size, for inference or for training.

    Attributes:
        goal_ms: the time that Rooftop should reach for the whole batch.
        build: function of (scale, batch, peers: "none", "fast" or "all") that returns the `Work`.
    """

    model: str
    what: str
    batch: int
    goal_ms: float
    build: Callable[[Scale, int, str], Work]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*dict.fromkeys(case.model for case in CASES), *(case.name for case in CASES)]
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--peers", choices=("none", "fast", "all"), default="all", help="peers to compare with")
    parser.add_argument("--seconds", type=float, default=0.25, help="seconds to measure each variant")
    parser.add_argument(
        "--reports", type=Path, metavar="DIR", help="also write rooftop.analyze's reports of our models"
    )
    parser.add_argument("--quick", action="store_true", help="a small run on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    scale = QUICK if options.quick else Scale()
    if scale.device == "cuda":
        # for ConvLSTM, the only float32 model
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    found: dict[str, Any] = {"environment": environment, "rows": [], "failed": {}}
    for case in CASES:
        if not {case.model, case.name} & set(options.only):
            continue
        try:
            for row in measure_case(case, scale, ceilings, options):
                found["rows"].append(row)
                if options.out:
                    write_json(options.out, found)
        except Exception as error:  # continue, because the other cases are still useful
            traceback.print_exc()
            found["failed"][case.name] = f"{type(error).__name__}: {error}"
            if options.out:
                write_json(options.out, found)
    if found["failed"]:
        print("failed:", *found["failed"])
    return 1 if found["failed"] else 0


# ---- one case ----------------------------------------------------------------------------------------------------


def measure_case(case: Case, scale: Scale, ceilings: Ceilings, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure and print a row for each variant, then write the report.

    Raises:
        RuntimeError: a peer's results differ from ours, so the peer does different work.
    """
    torch._dynamo.reset()
    gc.collect()
    if scale.device == "cuda":
        torch.cuda.empty_cache()  # free the memory of the previous case
    torch.manual_seed(0)
    batch = min(case.batch, scale.batch)
    work = case.build(scale, batch, options.peers)
    roofs = rooftop.predict(work.model, *work.inputs, ceilings=ceilings, optimizer=work.optimizer, **work.step).summary
    goal_ms = case.goal_ms if batch == case.batch and scale.device == "cuda" else None
    known = {"case": case.name, "model": case.model, "batch": batch, "goal_ms": goal_ms}
    known |= {"roof_ms": roofs.fused_roof_ms, "op_roof_ms": roofs.op_roof_ms}
    print(f"{case.name} of {batch}: fused roof {roofs.fused_roof_ms:.3f} ms, op roof {roofs.op_roof_ms:.3f} ms", end="")
    print("" if goal_ms is None else f", goal {goal_ms:.2f} ms")
    calls = work.calls | (replays(work) if scale.device == "cuda" else {})
    timings = compare(calls, device=scale.device, seconds=options.seconds, warm_up_seconds=options.seconds / 2)
    for name, timing in timings.items():
        row = {**known, "variant": name, "ms": timing.median_ms, "spread": timing.spread}
        row["images_per_s"] = 1e3 * batch / timing.median_ms
        row["percent_of_roof"] = 100 * roofs.fused_roof_ms / timing.median_ms
        row["apart"] = work.apart.get(name.removesuffix(REPLAYED))
        far = "" if row["apart"] is None else f", {row['apart']:.1e} from ours"
        print(
            f"  {name:42}{row['ms']:9.3f} ms{row['images_per_s']:12,.1f}/s{row['percent_of_roof']:7.1f}% of roof{far}"
        )
        yield row
    for name, why in work.absent.items():
        print(f"  {name:42}{why}")
        yield {**known, "variant": name, "absent": why}
    sys.stdout.flush()
    if options.reports:
        options.reports.mkdir(parents=True, exist_ok=True)
        against = ceilings if scale.device == "cuda" else None
        optimizer = work.optimizer(work.model.parameters()) if work.optimizer else None
        report = rooftop.analyze(
            work.model, *work.inputs, ceilings=against, optimizer=optimizer, name=case.name, **work.step
        )
        report.to_json(options.reports / f"{case.name}.json")
    if far := {name: apart for name, apart in work.apart.items() if not apart <= FARTHEST}:
        raise RuntimeError(
            f"expected each peer's results within a relative distance of {FARTHEST} from ours; got {far}"
        )


def replays(work: Work) -> dict[str, Call]:
    """Capture each call in a CUDA graph, and return the replays. `work.absent` records calls that cannot be
    captured."""
    found, stream = {}, torch.cuda.Stream()
    for name, call in work.calls.items():
        if name in work.own_graph:
            continue
        call()  # compiles, and runs lazy initialization, which may wait for the GPU
        if waits_for_gpu(call):
            work.absent[name + REPLAYED] = "cannot be captured: the host waits for the GPU"
            continue
        try:
            found[name + REPLAYED] = captured(call, stream)
        except RuntimeError as error:
            torch.cuda.synchronize()
            work.absent[name + REPLAYED] = f"cannot be captured: {str(error).splitlines()[0]}"
    return found


def relative(theirs: Tensor, ours: Tensor) -> float:
    return float((theirs.double() - ours.double()).norm() / ours.double().norm())


# ---- images, in bfloat16 -----------------------------------------------------------------------------------------


def classifier(name: str) -> Callable[[Scale, int, str], Work]:
    """Compare ResNet or Swin with torchvision's model of the same name."""

    def build(scale: Scale, batch: int, which: str) -> Work:
        model = models.model_entry(name).build().eval()
        x = photographs(batch, scale.side, scale.side, scale.device)
        work = by_engine(model, x)
        if which != "none":
            torchvision = imported("torchvision")
            if isinstance(torchvision, str):
                work.absent["torchvision"] = torchvision
            else:
                peer = getattr(torchvision.models, name)()
                peer.load_state_dict(model.state_dict())
                add_peers(work, "torchvision", peer, which, lambda logits: logits)
        return work

    return build


def detector(scale: Scale, batch: int, which: str) -> Work:
    """Compare DETR with transformers' DETR in the same configuration. Photographs have one size, without padding."""
    model = models.Detr(Bottleneck, scale.depths, encoder_layers=scale.layers, decoder_layers=scale.layers).eval()
    model.auxiliary = False  # only training needs the predictions of earlier layers
    transformers = imported("transformers") if which != "none" else ""
    peer = None if isinstance(transformers, str) else hugging_face_detr(transformers, scale)
    if peer is not None:
        model.load_state_dict(detr_state_dict(peer.state_dict()))
    work = by_engine(model, photographs(batch, scale.height, scale.width, scale.device))
    if peer is not None:
        add_peers(work, "transformers", peer, which, lambda found: found.logits)
    elif transformers:
        work.absent["transformers"] = transformers
    return work


def hugging_face_detr(transformers: Any, scale: Scale) -> nn.Module:
    """transformers' DETR with its own ResNet-50 and random weights, configured as for COCO."""
    backbone = transformers.ResNetConfig(out_features=["stage4"], depths=scale.depths)
    options = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    depths = {"encoder_layers": scale.layers, "decoder_layers": scale.layers}
    config = transformers.DetrConfig(backbone_config=backbone, num_labels=91, **options, **depths)
    model: nn.Module = transformers.DetrForObjectDetection(config)
    return model


def photographs(batch: int, height: int, width: int, device: str) -> Tensor:
    """(B, 3, H, W) bfloat16, channels last."""
    return torch.randn(batch, 3, height, width, device=device).to(BF16, memory_format=torch.channels_last)


def by_engine(model: nn.Module, x: Tensor) -> Work:
    """Run a model in two engines: with graphs, where each call copies its input in and its result out, and without.
    Prediction and analysis use the engine without graphs."""
    model = model.to(x.device)
    plain = Engine(model, dtype=BF16, channels_last=True, graphs=False)
    work = Work(plain.model, (x,), {"rooftop": lambda: plain(x)})
    if x.is_cuda:
        engine = Engine(model, dtype=BF16)
        work.calls["rooftop, graphs of the engine"] = lambda: engine(x)
        work.own_graph.add("rooftop, graphs of the engine")
    return work


def add_peers(work: Work, name: str, peer: nn.Module, which: str, result: Callable[[Any], Tensor]) -> None:
    """Add a peer's module in bfloat16, unchanged and channels last. With `which` "all", also add it channels last and
    compiled.

    Args:
        result: returns the part of the module's output that is compared with ours.
    """
    (x,) = work.inputs
    peer = peer.to(x.device, BF16).eval()
    images = x.contiguous()
    last: Any = copy.deepcopy(peer).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    variants = {name: without_gradients(peer, images), f"{name}, channels last": without_gradients(last, x)}
    if which == "all":
        how = {"mode": "max-autotune-no-cudagraphs"} if x.is_cuda else {"backend": "aot_eager"}
        variants[f"{name}, compiled"] = without_gradients(torch.compile(last, dynamic=False, **how), x)
    ours = result(work.calls["rooftop"]())
    work.calls |= variants
    work.apart |= {key: relative(result(call()), ours) for key, call in variants.items()}


def without_gradients(model: Callable[[Tensor], Any], x: Tensor) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return model(x)

    return call


# ---- clips, in float32 with TF32 ---------------------------------------------------------------------------------


class Logits(nn.Module):
    """A next-frame network that returns logits, which its loss expects."""

    def __init__(self, network: models.NextFrameNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network.logits(x)


def next_frames(scale: Scale, batch: int, which: str) -> Work:
    """Compare the forward pass of the network in Keras's example with Keras."""
    x, _ = clips(scale, batch)
    network, peer, why = next_frame_networks(scale, which)
    network.eval()
    work = Work(network, (x,), {"rooftop": without_gradients(network, x)}, absent=why)
    if peer is not None:
        work.calls["keras on torch"] = call = without_gradients(lambda x: peer(x, training=False), x)
        work.apart["keras on torch"] = relative(call(), work.calls["rooftop"]())
    return work


def next_frames_training(scale: Scale, batch: int, which: str) -> Work:
    """Compare a training step (binary cross entropy, Adam) with Keras's `train_on_batch`."""
    x, y = clips(scale, batch)
    network, peer, why = next_frame_networks(scale, which)
    model = Logits(network.train())

    def loss(logits: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, y)

    optimizer = torch.optim.Adam(model.parameters(), fused=True, capturable=scale.device == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x))
        value.backward()
        optimizer.step()
        return value.detach()

    work = Work(model, (x,), {"rooftop": step}, absent=why, step={"train": True, "loss": loss})
    work.optimizer = partial(torch.optim.Adam, fused=True)
    if peer is not None:
        peer.compile(optimizer="adam", loss="binary_crossentropy")
        first, theirs = (torch.as_tensor(float(call())) for call in (step, lambda: peer.train_on_batch(x, y)))
        work.apart["keras on torch"] = relative(theirs, first)
        work.calls["keras on torch"] = lambda: peer.train_on_batch(x, y)
    return work


def clips(scale: Scale, batch: int) -> tuple[Tensor, Tensor]:
    """Frames and the frames that follow them, (N, T, H, W, 1) each."""
    frames = torch.rand(batch, scale.steps + 1, scale.frame, scale.frame, 1, device=scale.device)
    return frames[:, :-1].contiguous(), frames[:, 1:].contiguous()


def next_frame_networks(scale: Scale, which: str) -> tuple[models.NextFrameNetwork, Any, dict[str, str]]:
    """Our network, Keras's network with the same weights, and the reason if Keras's is missing."""
    network = models.next_frame_network(filters=scale.filters).to(scale.device)
    if which == "none":
        return network, None, {}
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = imported("keras")
    if not isinstance(keras, str) and keras.backend.backend() != "torch":
        keras = f"KERAS_BACKEND is {keras.backend.backend()}, expected torch"
    if isinstance(keras, str):
        return network, None, {"keras on torch": keras}
    peer = keras_network(keras, scale)
    with tempfile.TemporaryDirectory() as folder:
        peer.save_weights(path := Path(folder, "network.weights.h5"))
        models.load_keras_weights(network, path)
    return network, peer, {}


def keras_network(keras: Any, scale: Scale) -> Any:
    """The network of Keras's example "Next-Frame Video Prediction with Convolutional LSTMs"."""
    layers, options = keras.layers, {"padding": "same", "return_sequences": True, "activation": "relu"}
    inputs = layers.Input((None, scale.frame, scale.frame, 1))
    x = layers.ConvLSTM2D(scale.filters, (5, 5), **options)(inputs)
    x = layers.ConvLSTM2D(scale.filters, (3, 3), **options)(layers.BatchNormalization()(x))
    x = layers.ConvLSTM2D(scale.filters, (1, 1), **options)(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Conv3D(1, (3, 3, 3), activation="sigmoid", padding="same")(x))


CASES = (
    Case("resnet50", "256", 256, 1e3 * 256 / 34_000, classifier("resnet50")),
    Case("resnet50", "1", 1, 0.40, classifier("resnet50")),
    Case("swin_t", "256", 256, 1e3 * 256 / 20_000, classifier("swin_t")),
    Case("swin_t", "1", 1, 0.50, classifier("swin_t")),
    Case("detr_resnet50", "1", 1, 1.6, detector),
    Case("detr_resnet50", "8", 8, 6.2, detector),
    Case("conv_lstm", "forward", 8, 5.5, next_frames),
    Case("conv_lstm", "training", 8, 18.5, next_frames_training),
)

if __name__ == "__main__":
    sys.exit(main())
