"""Pre-norm Transformer encoder for text classification (Vaswani et al., arXiv:1706.03762; pre-norm: arXiv:2002.04745).

model = Transformer(vocab_size=8000, classes=4)
logits = model(tokens)                       # tokens: (batch, length) integers, 0 is padding
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD, UNKNOWN, CLS = 0, 1, 2
PRIOR_WEIGHT = 0.1  # at the start


class Attention(nn.Module):
    """Multi-head self-attention through `scaled_dot_product_attention`; no dropout inside, so that fused kernels apply."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Dropout(nn.Module):
    """Dropout (Srivastava et al., 2014) with one random byte an element on CPUs, where torch draws a float each.

    `p` is rounded to 1/256 there; what is kept is scaled by the exact inverse, so the mean is unchanged.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if (
            x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing()
        ):  # they fuse the draw with what follows
            return F.dropout(x, self.p)
        dropped = min(255, round(self.p * 256))
        words = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 8),))
        keep = (words.view(torch.uint8)[: x.numel()] >= dropped).view(x.shape)
        return x * (keep * (256 / (256 - dropped))).to(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    residual = True

    def __init__(self, width: int, heads: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width), nn.GELU(), nn.Linear(mlp_width, width)
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), keep))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Encoder with a linear classifier.

    Args:
        vocab_size: number of token ids; ids 0, 1 and 2 are padding, unknown and [CLS].
        classes: number of classes.
        width, depth, heads, mlp_width: size of the encoder; `width` is divisible by `heads`.
        max_len: longest input in tokens.
        dropout: on embeddings and on both residual branches.
        token_dropout: share of input tokens replaced by unknown while training (arXiv:1512.05287, section 5).
        positions: 'learned' or 'sinusoidal' (Vaswani et al., section 3.5).
        pooling: 'mean' over the tokens that are not padding, or 'cls', the first token.
        prior: (vocab_size, classes) scores of each token, such as `naive_bayes_scores` counts. Their sum over the visible
            tokens, divided by the square root of how many there are, is added to the logits with a learned weight, so
            that the encoder only learns what a bag of words cannot say ("wide and deep", arXiv:1606.07792).
        mix_at: where `forward` mixes texts: 'pooled', what the pooling gives, or 'tokens', their embeddings
            (senMixup and wordMixup of arXiv:1905.08941).
    """

    def __init__(
        self,
        vocab_size: int,
        classes: int,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        mlp_width: int = 512,
        max_len: int = 128,
        dropout: float = 0.1,
        token_dropout: float = 0.0,
        positions: str = "learned",
        pooling: str = "mean",
        prior: Tensor | None = None,
        mix_at: str = "pooled",
    ) -> None:
        super().__init__()
        self.mix_at = mix_at
        self.register_buffer("prior", prior)
        self.prior_weight = (
            nn.Parameter(torch.tensor([PRIOR_WEIGHT])) if prior is not None else None
        )
        self.token_dropout = token_dropout
        self.pooling = pooling
        self.embed = nn.Embedding(vocab_size, width, padding_idx=PAD)
        table = sinusoids(max_len, width)
        if positions == "learned":
            self.positions = nn.Parameter(torch.zeros_like(table))
        else:
            self.register_buffer("positions", table, persistent=False)
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, mlp_width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self._initialise(depth)

    def _initialise(self, depth: int) -> None:
        """Normal(0, 0.02) weights, zero biases; residual outputs scaled by 1/sqrt(2 depth) (GPT-2)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                residual = name.endswith((".out", ".mlp.2"))
                nn.init.normal_(
                    module.weight, std=0.02 / math.sqrt(2 * depth) if residual else 0.02
                )
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embed.weight, std=0.02)
        with torch.no_grad():
            self.embed.weight[PAD].zero_()

    def forward(
        self, tokens: Tensor, partner: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """tokens (batch, length), integers -> logits (batch, classes).

        With `partner` (batch,), rows, and `weight` (batch,), each text is mixed with its partner at `mix_at`, and so is its
        bag of words: weight x own + (1 - weight) x partner's. A place that only one of two texts has takes part in
        attention and mean with that text's weight, so that a weight of 1 is no mixing.
        """
        keep = tokens != PAD  # (batch, length)
        if self.training and self.token_dropout > 0:
            drop = torch.rand(tokens.shape, device=tokens.device) < self.token_dropout
            tokens = torch.where(drop & (tokens > CLS), UNKNOWN, tokens)
        x = self.embed(tokens) * math.sqrt(self.embed.embedding_dim)
        present, mask = keep.to(x.dtype), keep
        if self.mix_at == "tokens" and partner is not None:
            x, present = mixed(x, partner, weight), mixed(present, partner, weight)
            # Added to the scores: a key's share in the attention is as large as its presence. Never -inf: log has a gradient.
            mask = present.clamp(min=1e-30).log()
        x = self.dropout(x + self.positions[: tokens.shape[1]])  # (batch, length, width)
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        x = self.norm(x)
        if self.pooling == "cls":
            pooled = x[:, 0]
        else:
            weights = present.unsqueeze(-1).to(x.dtype)
            pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1)
        if self.mix_at == "pooled":
            pooled = mixed(pooled, partner, weight)
        logits = self.head(pooled)
        if self.prior_weight is None:
            return logits
        return logits.float() + self.prior_weight * mixed(
            self.bag_of_words(tokens), partner, weight
        )

    def bag_of_words(self, tokens: Tensor) -> Tensor:
        """tokens (batch, length) -> (batch, classes): sum of the prior's rows over the square root of their number."""
        words = (tokens > CLS).sum(1, keepdim=True).clamp(min=1)
        return F.embedding(tokens, self.get_buffer("prior")).sum(1) / words.sqrt()


def mixed(x: Tensor, partner: Tensor | None, weight: Tensor | None) -> Tensor:
    """x (batch, ...), each row mixed with its partner's where there is one."""
    if partner is None or weight is None:
        return x
    return torch.lerp(x[partner], x, weight.view(-1, *[1] * (x.ndim - 1)).to(x.dtype))


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width) table of sine and cosine positions."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(length, -1)[:, :width]
