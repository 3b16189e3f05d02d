"""Private training with Opacus, of the models that its layers allow: logistic regression and the VAE.

Runs in an environment of its own (`benchmarks/peers/torch.txt`) as a child of `benchmarks/suite.py`, and answers like
`jax_peer.py`: {"case": name, "steps": int, ...settings} with {"seconds": ..., "finite": true}, one JSON object a line.

Clipping, noise and scaling are Opacus's own (`GradSampleModule` and `DPOptimizer`, or their fast-gradient-clipping forms
for `ghost`). Batches are exact Poisson batches of records taken by one index: Opacus's own loader gathers them one record
at a time in Python, which is slower. Data are random numbers of the right shapes; nothing here is about accuracy.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import opacus
import torch
from opacus.grad_sample import (
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    register_grad_sampler,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn
from torch.nn import functional

CLIP, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.0, 1e-3

#: `train(steps)` and the parameters that it changes.
Training = tuple[Callable[[int], None], list[torch.Tensor]]


def poisson(num_records: int, batch_size: int) -> torch.Tensor:
    """Indices of an exact Poisson batch: O(N), as Opacus's own sampler is."""
    return torch.nonzero(
        torch.rand(num_records, dtype=torch.float64) < batch_size / num_records
    ).squeeze(1)


# ---------------------------------------------------------------------- logistic regression


class MeanFieldLogits(nn.Module):
    """`x @ (loc + softplus(raw_scale) * epsilon)` for the draw that `redraw` made."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(num_features))
        self.raw_scale = nn.Parameter(torch.full([num_features], -4.0))
        self.redraw()

    def redraw(self) -> None:
        self.epsilon = torch.randn_like(self.loc)

    def weights(self) -> torch.Tensor:
        return self.loc + functional.softplus(self.raw_scale) * self.epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights()


@register_grad_sampler(MeanFieldLogits)
def _(
    layer: MeanFieldLogits, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[Any, torch.Tensor]:
    by_weights = activations[0] * backprops[:, None]
    return {
        layer.loc: by_weights,
        layer.raw_scale: by_weights * (layer.epsilon * torch.sigmoid(layer.raw_scale)),
    }


def logistic_regression(
    num_records: int = 40_000, num_features: int = 100, batch_size: int = 200
) -> Training:
    x = torch.randn(num_records, num_features)
    y = torch.randint(2, [num_records]).float()
    layer = MeanFieldLogits(num_features)
    module = GradSampleModule(layer, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.Adam(layer.parameters(), lr=LEARNING_RATE),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
        expected_batch_size=batch_size,
    )
    parameters = list(layer.parameters())

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = poisson(num_records, batch_size)
            layer.redraw()
            optimizer.zero_grad()
            logits = module(x[batch])
            functional.binary_cross_entropy_with_logits(
                logits, y[batch], reduction="sum"
            ).backward()
            if not optimizer.pre_step():
                raise RuntimeError("Opacus left a step out.")
            # The prior and the entropy see no record: their gradient is added outside the clip.
            weights = layer.weights()
            divergence = (
                0.5 * (weights**2).sum() / 16.0 - functional.softplus(layer.raw_scale).log().sum()
            )
            exact = torch.autograd.grad(divergence / num_records, parameters)
            for parameter, gradient in zip(parameters, exact, strict=True):
                parameter.grad += gradient
            optimizer.original_optimizer.step()

    return train, parameters


# ---------------------------------------------------------------------- the VAE


class VAE(nn.Module):
    """784-400-50-400-784; returns -ELBO of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(*size) for size in [(784, 400), (400, 100), (50, 400), (400, 784)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, codes, third, last = self.layers
        loc, raw_scale = codes(functional.relu(first(x))).split(50, dim=1)
        scale = functional.softplus(raw_scale)
        logits = last(functional.relu(third(loc + scale * torch.randn_like(loc))))
        reconstruction = functional.binary_cross_entropy_with_logits(
            logits, x, reduction="none"
        ).sum(1)
        return reconstruction + (0.5 * (scale**2 + loc**2 - 1) - scale.log()).sum(1)


def vae(num_records: int = 60_000, batch_size: int = 128, ghost: bool = False) -> Training:
    x = torch.rand(num_records, 784)
    model = VAE()
    settings: dict[str, Any] = {
        "noise_multiplier": NOISE_MULTIPLIER,
        "max_grad_norm": CLIP,
        "expected_batch_size": batch_size,
    }
    plain = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    if ghost:
        module = GradSampleModuleFastGradientClipping(
            model, loss_reduction="sum", max_grad_norm=CLIP, use_ghost_clipping=True
        )
        optimizer: DPOptimizer = DPOptimizerFastGradientClipping(plain, **settings)
    else:
        module = GradSampleModule(model, loss_reduction="sum")
        optimizer = DPOptimizer(plain, **settings)

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = x[poisson(num_records, batch_size)]
            optimizer.zero_grad()
            if ghost:
                module.enable_hooks()
                DPTensorFastGradientClipping(module, optimizer, module(batch), "sum").backward()
            else:
                module(batch).sum().backward()
            optimizer.step()

    return train, list(model.parameters())


CASES = {"logistic_regression": logistic_regression, "vae": vae}


def main() -> None:
    warnings.simplefilter(
        "ignore"
    )  # Opacus warns of the full backward hooks that it installs itself.
    made: dict[str, Training] = {}
    print(json.dumps({"torch": torch.__version__, "opacus": opacus.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        steps = request.pop("steps")
        name = json.dumps(request, sort_keys=True)
        if name not in made:
            made[name] = CASES[request.pop("case")](**request)
        train, parameters = made[name]
        begin = time.perf_counter()
        train(steps)
        seconds = time.perf_counter() - begin
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in parameters)
        print(json.dumps({"seconds": seconds, "finite": finite}), flush=True)


if __name__ == "__main__":
    main()
