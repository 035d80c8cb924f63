"""Numbers in 8 or 4 bits for sending: whole codes, and a scale for each row of them.

codes, scales = quantize(values, bits=8)                    # values (n,)
values = dequantize(codes, scales, bits=8, like=values)     # off by half a scale at most
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROW = 64  # numbers that share a scale
LARGEST_CODE = {8: 127, 4: 7}


def quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rounds numbers to multiples of their row's scale, the row's largest size / 127 or / 7.

    A row with a number that is not finite becomes NaN.

    Args:
        values: (n,) of any n.
        bits: 8 or 4.
    Returns:
        codes: (ceil(n / 64), 64) int8, or (ceil(n / 64), 32) uint8 with two codes in each.
        scales: (ceil(n / 64),) bf16.
    """
    largest = LARGEST_CODE[bits]
    rows = F.pad(values, (0, -len(values) % ROW)).view(-1, ROW)
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
        bits: 8 or 4.
        like: (n,), of the length and dtype of the result.
    """
    if bits == 4:
        pairs = torch.stack([codes // 16, codes % 16], dim=2).to(torch.int8) - 8
        codes = pairs.flatten(1)
    return (codes.to(like.dtype) * scales.to(like.dtype)[:, None]).view(-1)[: len(like)]
