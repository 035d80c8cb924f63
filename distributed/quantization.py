"""Numbers in 8, 4 or 1 bits for sending: whole codes, and a scale for each row of them.

codes, scales = quantize(tensors, bits=8)
tensors = dequantize(codes, scales, bits=8, like=tensors)     # off by half a scale at most

A single bit is the sign of a number, and the scale is the mean size of its row (Karimireddy et al.,
"Error Feedback Fixes SignSGD", arXiv:1901.09847, with rows in place of whole tensors).

Codes smaller than a byte are packed by integer arithmetic on two or eight of them at once, and
unpacked through a table of what each of the 256 bytes means.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

ROW = 64  # numbers that share a scale
LARGEST_CODE = {8: 127, 4: 7}
# Times eight bytes that are 0 or 1, read as one whole number with the first byte lowest, this has
# the first of them in bit 56, the second in bit 57 and so on.
GATHER_BITS = 0x0102040810204080


def quantize(tensors: Sequence[Tensor], bits: int) -> tuple[Tensor, Tensor]:
    """Rounds numbers to multiples of their row's scale, the row's largest size / 127 or / 7.

    With one bit they become plus or minus their row's mean size. A row with a number that is not
    finite does not become finite.

    Args:
        tensors: one at least, of one dtype. Each begins a new row, of which there are R.
        bits: 8, 4 or 1.
    Returns:
        codes: (R, 64) int8, or uint8 with several codes in each: (R, 32) for 4 bits, (R, 8) for
            one.
        scales: (R,) bf16.
    """
    filled_up = [F.pad(each.flatten(), (0, -each.numel() % ROW)) for each in tensors]
    rows = torch.cat(filled_up).view(-1, ROW)
    if bits == 1:
        words = (rows >= 0).view(torch.uint8).view(torch.int64)
        sums = rows.abs().sum(1, dtype=torch.promote_types(rows.dtype, torch.float32))
        counts, end = torch.full_like(sums, ROW), 0
        for each, flat in zip(tensors, filled_up):
            end += len(flat) // ROW
            if each.numel() % ROW:  # the zeros behind the last numbers do not count in a mean
                counts[end - 1].fill_(each.numel() % ROW)
        return ((words * GATHER_BITS) >> 56).to(torch.uint8), (sums / counts).bfloat16()
    largest = LARGEST_CODE[bits]
    scales = (rows.abs().amax(1) / largest).bfloat16()
    divisors = torch.where(scales > 0, scales, torch.inf).to(rows.dtype)[:, None]
    rounded = rows.div(divisors).round_()
    codes = rounded.clamp_(-largest, largest).to(torch.int8)  # a tiny scale is too small in bf16
    if bits == 4:
        words = (codes + 8).view(torch.int16)
        codes = ((words << 4) | (words >> 8)).to(torch.uint8)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, *, bits: int, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors that `quantize` rounded, in the shapes and the dtype of `like`."""
    dtype = like[0].dtype
    if bits == 8:
        rows = codes.to(dtype)
    else:
        rows = _table(bits, dtype, codes.device)[codes.int()].view(-1, ROW)
    rows.mul_(scales.to(dtype)[:, None])
    parts = rows.view(-1).split([-(-each.numel() // ROW) * ROW for each in like])
    return [part[: each.numel()].view(each.shape) for part, each in zip(parts, like)]


@functools.cache
def _table(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns what each byte (256) means: two codes of 4 bits, or eight signs."""
    byte = torch.arange(256, device=device)[:, None]
    if bits == 4:
        codes = torch.cat([byte // 16, byte % 16], dim=1) - 8
    else:
        codes = (byte >> torch.arange(8, device=device)).bitwise_and(1) * 2 - 1
    return codes.to(dtype)
