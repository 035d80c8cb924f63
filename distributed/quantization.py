"""Numbers in 8, 4 or 1 bits for sending: whole codes, and a scale for each row of them.

codes, scales = quantize(values, bits=8)                    # values (n,)
values = dequantize(codes, scales, bits=8, like=values)     # off by half a scale at most

A single bit is the sign of a number, and the scale is the mean size of its row (Karimireddy et al.,
"Error Feedback Fixes SignSGD", arXiv:1901.09847, with rows in place of whole tensors).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROW = 64  # numbers that share a scale
LARGEST_CODE = {8: 127, 4: 7}
SIGNS = 8  # that a byte holds


def quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rounds numbers to multiples of their row's scale, the row's largest size / 127 or / 7.

    With one bit they become plus or minus their row's mean size. A row with a number that is not
    finite does not become finite.

    Args:
        values: (n,) of any n.
        bits: 8, 4 or 1.
    Returns:
        codes: (ceil(n / 64), 64) int8, or uint8 with several codes in each: (ceil(n / 64), 32) for
            4 bits, (ceil(n / 64), 8) for one.
        scales: (ceil(n / 64),) bf16.
    """
    rows = F.pad(values, (0, -len(values) % ROW)).view(-1, ROW)
    if bits == 1:
        signs = (rows >= 0).view(len(rows), -1, SIGNS) * _sign_places(values.device)
        return signs.sum(2, dtype=torch.uint8), rows.abs().mean(1).to(torch.bfloat16)
    largest = LARGEST_CODE[bits]
    scales = (rows.abs().amax(1) / largest).to(torch.bfloat16)
    divisors = scales.to(rows.dtype)[:, None]
    rounded = torch.where(divisors > 0, rows / divisors, 0.0).round_()
    codes = rounded.clamp_(-largest, largest).to(torch.int8)  # a tiny scale is too small in bf16
    if bits == 4:
        codes = (codes[:, ::2] + 8).to(torch.uint8) * 16 + (codes[:, 1::2] + 8).to(torch.uint8)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, *, bits: int, like: Tensor) -> Tensor:
    """Returns the numbers that `quantize` rounded.

    Args:
        codes, scales: as of `quantize`.
        bits: 8, 4 or 1.
        like: (n,), of the length and dtype of the result.
    """
    if bits == 1:
        places = _sign_places(codes.device)
        codes = (codes[:, :, None].bitwise_and(places) > 0).flatten(1).to(torch.int8) * 2 - 1
    if bits == 4:
        pairs = torch.stack([codes // 16, codes % 16], dim=2).to(torch.int8) - 8
        codes = pairs.flatten(1)
    return (codes.to(like.dtype) * scales.to(like.dtype)[:, None]).view(-1)[: len(like)]


def _sign_places(device: torch.device) -> Tensor:
    """Returns the value of each bit of a byte (8,), the highest first."""
    return 2 ** torch.arange(SIGNS - 1, -1, -1, dtype=torch.uint8, device=device)
