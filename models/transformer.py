"""Transformer encoder for text classification (arXiv:1706.03762), pre-norm (arXiv:2002.04745).

model = Transformer(vocab_size=8000, classes=4)
logits = model(tokens)                       # tokens: (batch, length) integers, 0 is padding
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.residual import ResidualBlock

PAD, UNKNOWN, CLS = 0, 1, 2  # ids of the special tokens
PRIOR_WEIGHT = 0.1  # initial weight of the bag of words in the logits


class Attention(nn.Module):
    """Multi-head self-attention through `scaled_dot_product_attention`.

    There is no dropout within it, so that fused kernels apply.

    Args:
        width: features of a token, divisible by `heads`.
        heads: number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend from every token of x (batch, length, width) to those that the mask allows.

        `mask` has a shape that broadcasts to (batch, heads, length, length): booleans, or numbers
        that are added to the scores.
        """
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Dropout(nn.Module):
    """Dropout (Srivastava et al., 2014) with one random byte an element on CPUs.

    torch samples a float for each element. With bytes `p` is rounded to a multiple of 1/256; kept
    elements are scaled by the exact inverse, so that the mean does not change.

    Args:
        p: probability that an element is set to zero.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        threshold = round(self.p * 256)
        has_bytes = x.device.type == "cpu" and threshold < 256
        if not has_bytes or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return F.dropout(x, self.p)  # one kernel on GPUs, fused with what follows
        random_words = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 8),))  # of 8 bytes
        random_bytes = random_words.view(torch.uint8)[: x.numel()]
        keep = (random_bytes >= threshold).view(x.shape)
        return x * (keep * (256 / (256 - threshold))).to(x.dtype)


class Block(ResidualBlock):
    """A pre-norm encoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, *, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width), nn.GELU(), nn.Linear(mlp_width, width)
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Encoder with learned positions, and a linear classifier of the mean of a text's tokens.

    Args:
        vocab_size: number of token ids; ids 0, 1 and 2 are padding, unknown and [CLS].
        classes: number of outputs.
        width: features of a token, divisible by `heads`.
        depth: number of blocks.
        heads: attention heads of a block.
        mlp_width: hidden units of the MLP of a block.
        max_len: length of the longest input in tokens.
        dropout: probability, on embeddings and on both branches of a block.
        token_dropout: share of input tokens that are replaced by unknown in training
            (arXiv:1512.05287, section 5).
        prior: (vocab_size, classes) scores of each token, such as those of naive Bayes. Their sum
            over the tokens of a text, divided by the square root of the number of tokens, is added
            to the logits with a learned weight: the encoder only learns what a bag of words cannot
            say ("wide and deep", arXiv:1606.07792).
        mix_at: where `forward` mixes texts: 'pooled' mixes the pooled representations, 'tokens' the
            embeddings (senMixup and wordMixup of arXiv:1905.08941).
    """

    def __init__(
        self,
        vocab_size: int,
        classes: int,
        *,
        width: int = 128,
        depth: int = 1,
        heads: int = 4,
        mlp_width: int = 512,
        max_len: int = 128,
        dropout: float = 0.1,
        token_dropout: float = 0.0,
        prior: Tensor | None = None,
        mix_at: str = "pooled",
    ) -> None:
        super().__init__()
        if width < 1 or heads < 1 or width % heads:
            raise ValueError(f"width={width} must be divisible by heads={heads}")
        if depth < 1 or mlp_width < 1:
            raise ValueError(f"depth={depth} and mlp_width={mlp_width} must be at least 1")
        self.mix_at = mix_at
        self.register_buffer("prior", prior)
        self.prior_weight: nn.Parameter | None = None
        if prior is not None:
            self.prior_weight = nn.Parameter(torch.tensor([PRIOR_WEIGHT]))
        self.token_dropout = token_dropout
        self.embed = nn.Embedding(vocab_size, width, padding_idx=PAD)
        self.positions = nn.Parameter(torch.zeros(max_len, width))
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp_width=mlp_width, dropout=dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self._initialise(depth)

    def _initialise(self, depth: int) -> None:
        """Initialise as GPT-2 does: weights from Normal(0, 0.02), biases zero.

        The weights of the layers that end a residual branch are divided by sqrt(2 depth).
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                ends_branch = name.endswith((".out", ".mlp.2"))
                std = 0.02 / math.sqrt(2 * depth) if ends_branch else 0.02
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embed.weight, std=0.02)
        with torch.no_grad():
            self.embed.weight[PAD].zero_()

    def forward(
        self, tokens: Tensor, partner: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Classify texts, each mixed with a partner where partners are given.

        Representations at `mix_at` and bags of words become weight x own + (1 - weight) x
        partner's. A position that only one of two texts has takes part in attention and mean with
        the weight of that text, so that a weight of 1 is no mixing.

        Args:
            tokens: (batch, length) integers.
            partner: (batch,) the row with which each text is mixed.
            weight: (batch,) the weight of each text itself.

        Returns:
            (batch, classes) logits.
        """
        keep = tokens != PAD  # (batch, length)
        if self.training and self.token_dropout > 0:
            drop = torch.rand(tokens.shape, device=tokens.device) < self.token_dropout
            tokens = torch.where(drop & (tokens > CLS), UNKNOWN, tokens)
        x = self.embed(tokens) * math.sqrt(self.embed.embedding_dim)
        present, mask = keep.to(x.dtype), keep
        if self.mix_at == "tokens" and partner is not None:
            x, present = mix_rows(x, partner, weight), mix_rows(present, partner, weight)
            # This is added to the scores, so that the attention to a key is proportional to its
            # presence. It is never -inf, since the logarithm has a gradient.
            mask = present.clamp(min=1e-30).log()
        x = self.dropout(x + self.positions[: tokens.shape[1]])  # (batch, length, width)
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        x = self.norm(x)
        weights = present.unsqueeze(-1).to(x.dtype)
        pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1)
        if self.mix_at == "pooled":
            pooled = mix_rows(pooled, partner, weight)
        logits = self.head(pooled)
        if self.prior_weight is None:
            return logits
        scores = mix_rows(self.bag_of_words(tokens), partner, weight)
        return logits.float() + self.prior_weight * scores

    def bag_of_words(self, tokens: Tensor) -> Tensor:
        """Sum the prior's rows of the tokens and divide by the square root of their number.

        Args:
            tokens: (batch, length) integers; special tokens do not count.

        Returns:
            (batch, classes) scores.
        """
        words = (tokens > CLS).sum(1, keepdim=True).clamp(min=1)
        return F.embedding(tokens, self.get_buffer("prior")).sum(1) / words.sqrt()


def mix_rows(x: Tensor, partner: Tensor | None, weight: Tensor | None) -> Tensor:
    """Mix every row of x (batch, ...) with its partner; None returns x itself."""
    if partner is None or weight is None:
        return x
    return torch.lerp(x[partner], x, weight.view(-1, *[1] * (x.ndim - 1)).to(x.dtype))
