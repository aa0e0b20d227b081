"""Public models from torchvision, timm and transformers, with random weights and inputs, run as their users run
them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Loss = Callable[[Any], Tensor]


@dataclass
class Workload:
    """A model with its inputs, and for training its loss and optimizer."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    called: Callable[..., Any] | None = None

    def run(self) -> None:
        """Run one step, as a plain loop would."""
        call = self.model if self.called is None else self.called
        if self.loss is None:
            with torch.no_grad(), self.around():
                call(*self.args, **self.kwargs)
            return
        assert self.optimizer is not None
        with self.around():
            loss = self.loss(call(*self.args, **self.kwargs))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def analyzed(self) -> dict[str, Any]:
        """The keyword arguments for `rooftop.analyze`."""
        return {} if self.loss is None else {"train": True, "loss": self.loss, "optimizer": self.optimizer}


@dataclass(frozen=True)
class Case:
    """A model at a batch size.

    Attributes:
        make: function of (batch, small) that returns (model, args, kwargs, training loss); `small` asks for a size that
            suits a CPU.
    """

    name: str
    make: Callable[[int, bool], tuple[nn.Module, tuple[Any, ...], dict[str, Any], Loss | None]]
    batch: int
    train: bool = False
    dtype: torch.dtype = torch.bfloat16
    channels_last: bool = False

    def build(self, device: str, *, batches: int = 1, capturable: bool = False, fused: bool = False) -> Workload:
        """Create the workload, ready to run.

        Args:
            batches: factor by which the batch size is multiplied. capturable, fused: options of the optimizer.
        """
        small = device == "cpu"
        torch.manual_seed(0)
        with torch.device(device):
            model, args, kwargs, loss = self.make(batches * (2 if small else self.batch), small)
        layout: dict[str, Any] = {"memory_format": torch.channels_last} if self.channels_last else {}
        model = model.to(device=device, dtype=torch.float32 if small else self.dtype, **layout).train(self.train)

        def placed(value: Any) -> Any:
            if isinstance(value, list):
                return [placed(item) for item in value]
            if not isinstance(value, Tensor):
                return value
            if not value.is_floating_point():
                return value.to(device)
            here = value.to(device, torch.float32 if small else self.dtype)
            return here.to(**layout) if layout and here.dim() == 4 else here

        work = Workload(model, tuple(map(placed, args)), {name: placed(value) for name, value in kwargs.items()})
        if not self.train:
            return work
        if loss is None:
            labels = torch.randint(1000, (args[0].shape[0],), device=device)
            loss = lambda logits: cross_entropy(logits, labels)  # noqa: E731
        work.loss = loss
        options = {name: True for name, chosen in (("capturable", capturable), ("fused", fused)) if chosen}
        work.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **options)
        return work


def _image(name: str, library: str = "torchvision", size: int = 224) -> Any:
    def make(batch: int, small: bool) -> Any:
        if library == "timm":
            import timm

            model = timm.create_model(name)
        else:
            import torchvision

            model = torchvision.models.get_model(name, weights=None)
        return model, (torch.randn(batch, 3, size, size),), {}, None

    return make


def _segmentation(batch: int, small: bool) -> Any:
    import torchvision

    side = 128 if small else 512
    model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)
    return model, (torch.randn(batch, 3, side, side),), {}, None


def _detection(batch: int, small: bool) -> Any:
    import torchvision

    side = 320 if small else 640
    model = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    return model, ([torch.rand(3, side, side) for _ in range(batch)],), {}, None


def _text(kind: str, tokens: int) -> Any:
    def make(batch: int, small: bool) -> Any:
        import transformers as t

        t.logging.set_verbosity_error()
        length = 32 if small else tokens
        tiny: dict[str, Any] = {"num_hidden_layers": 2} if small else {}
        loss: Loss = lambda out: out.loss  # noqa: E731
        if kind == "bert":
            model: nn.Module = t.BertModel(t.BertConfig(**tiny))
            return model, (torch.randint(30000, (batch, length)),), {}, None
        if kind == "gpt2":
            model = t.GPT2LMHeadModel(t.GPT2Config(use_cache=False, **({"n_layer": 2} if small else {})))
            ids = torch.randint(50000, (batch, length))
            return model, (ids,), {"labels": ids}, loss
        if kind == "llama":
            sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
            sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000} | tiny
            model = t.LlamaForCausalLM(t.LlamaConfig(use_cache=False, **sizes))
            ids = torch.randint(32000, (batch, length))
            return model, (ids,), {"labels": ids}, loss
        if kind == "t5":
            model = t.T5ForConditionalGeneration(
                t.T5Config(decoder_start_token_id=0, **({"num_layers": 2} if small else {}))
            )
            ids = torch.randint(32000, (batch, length))
            return model, (), {"input_ids": ids, "labels": ids}, loss
        raise ValueError(kind)

    return make


def _mamba(batch: int, small: bool) -> Any:
    import transformers as t

    t.logging.set_verbosity_error()
    config = t.MambaConfig(num_hidden_layers=1 if small else 4, hidden_size=768, use_cache=False)
    return t.MambaForCausalLM(config), (torch.randint(50000, (batch, 32 if small else 256)),), {}, None


CASES = [
    Case("BERT-base 32x512", _text("bert", 512), 32),
    Case("GPT-2 8x1024 training", _text("gpt2", 1024), 8, train=True),
    Case("ConvNeXt-T b64 training", _image("convnext_tiny"), 64, train=True),
    Case("ResNet-50 b128 channels last training", _image("resnet50"), 128, train=True, channels_last=True),
    Case("MaxViT-T b32", _image("maxvit_t"), 32),
    Case("DeepLabV3 8x512x512", _segmentation, 8),
    Case("Faster R-CNN 2x640x640 float32", _detection, 2, dtype=torch.float32),
    Case("timm ViT-B b128", _image("vit_base_patch16_224", "timm"), 128),
    Case("timm ViT-B b64 training", _image("vit_base_patch16_224", "timm"), 64, train=True),
    Case("Swin-T b64 training", _image("swin_t"), 64, train=True),
    Case("timm EfficientNet-B0 b128", _image("efficientnet_b0", "timm"), 128),
    Case("ResNet-18 b1 float32", _image("resnet18"), 1, dtype=torch.float32),
    Case("ResNet-50 b64 float32 training", _image("resnet50"), 64, train=True, dtype=torch.float32),
    Case("Llama 300 M 1x512", _text("llama", 512), 1),
    Case("T5-small 16x256 training", _text("t5", 256), 16, train=True),
    Case("Mamba 4 layers 1x256", _mamba, 1),
]
