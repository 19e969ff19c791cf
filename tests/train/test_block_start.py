"""First weights of a block head from a draft model: the fit against a plain least-squares solution."""

from __future__ import annotations

import torch

from paceline.train.block_start import RIDGE, _fit, _Moments

WIDTH, TAPPED, TOKENS, LAYERS = 8, 20, 400, 3


def test_the_fit_is_that_of_a_regression_on_the_best_features() -> None:
    random = torch.Generator().manual_seed(3)
    taps = torch.randn(TOKENS, TAPPED, generator=random, dtype=torch.float64)
    inputs = [torch.randn(TOKENS, WIDTH, generator=random, dtype=torch.float64) for _ in range(LAYERS)]
    inputs = [x + taps[:, :WIDTH] * (number + 1) for number, x in enumerate(inputs)]
    layers = [
        {name: torch.randn(4, WIDTH, generator=random, dtype=torch.float64) for name in ("attn_k", "attn_v")}
        for _ in range(LAYERS)
    ]
    moments = _Moments(
        taps.T @ taps / TOKENS, [taps.T @ x / TOKENS for x in inputs], [x.T @ x / TOKENS for x in inputs]
    )
    stacked, wanted = [], []
    for layer, x in zip(layers, inputs, strict=True):
        for matrix in layer.values():
            made = x @ matrix.T
            size = made.square().mean().sqrt()
            stacked.append(matrix / size)
            wanted.append(made / size)
    # Of each token the feature whose products are nearest to all that are wanted, then its regression on the taps.
    features = torch.linalg.lstsq(torch.cat(stacked), torch.cat(wanted, 1).T).solution.T
    plain = torch.linalg.lstsq(taps, features).solution.T
    assert float((_fit(layers, moments) - plain).norm() / plain.norm()) < 10 * RIDGE
