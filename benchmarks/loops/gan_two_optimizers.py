"""A GAN on synthetic images: each step runs the discriminator's and the generator's optimizer."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from loop_clock import LoopClock
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    device, large = options.device, options.device == "cuda"
    torch.manual_seed(9)
    batch, channels = (128, 64) if large else (64, 16)
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 2 * channels, 4),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.ConvTranspose2d(channels, 1, 4, 2, 1),
        nn.Tanh(),
    ).to(device)
    discriminator = nn.Sequential(
        nn.Conv2d(1, channels, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(channels, 2 * channels, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * channels, 1, 4),
    ).to(device)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    ones, zeros = torch.ones(batch, device=device), torch.zeros(batch, device=device)
    clock = LoopClock(device)
    for step in range(options.steps):
        real = torch.rand(batch, 1, 16, 16, device=device)
        discriminator.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(discriminator(real).flatten(), ones)
        loss_real.backward()
        fake = generator(torch.randn(batch, 32, 1, 1, device=device))
        loss_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()).flatten(), zeros)
        loss_fake.backward()
        of_discriminator.step()
        generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(discriminator(fake).flatten(), ones)
        loss.backward()
        of_generator.step()
        clock.step(loss)
        if step % 10 == 0:
            print(f"{step}: discriminator {(loss_real + loss_fake).item():.4f} generator {loss.item():.4f}")
    clock.finish()


if __name__ == "__main__":
    main()
