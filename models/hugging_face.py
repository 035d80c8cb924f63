"""Pretrained text encoders of Hugging Face Transformers: --arch hf:NAME_OR_FOLDER.

    encoder, tokenizer = read_encoder("hf:distilbert-base-uncased", classes=["bad", "good"])
    model = Encoder(**encoder)                   # random weights, as those of a checkpoint replace
    print(model.load("hf:distilbert-base-uncased"))
    logits = model(tokens)                       # tokens: (batch, length) integers

A checkpoint holds `encoder` and `tokenizer`, so that a run needs neither network nor folder later.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError, first_line
from models.transformer import mix_rows

HF = "hf:"  # in front of the name of a model, or of a folder
FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]  # of a model on the hub


def read_encoder(arch: str, classes: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Read what a checkpoint keeps of a model of the hub, or of a folder; downloads the model.

    Args:
        arch: hf:NAME, or hf: and a folder that save_pretrained wrote.
        classes: names of the outputs.
    Returns:
        The arguments of `Encoder`; and the tokenizer, as JSON of the package tokenizers.
    Raises:
        InputError: Transformers is not installed, there is no such model, or it does not fit.
    """
    with _refused(arch) as transformers:
        folder = _find(arch)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        pad = tokenizer.pad_token_id
        if not tokenizer.is_fast or pad is None or tokenizer.padding_side != "right":
            raise InputError(
                f"--arch {arch}: its tokenizer is not one of the package tokenizers that pads "
                "behind the text; choose an encoder such as hf:distilbert-base-uncased"
            )
        if len(tokenizer) > config.vocab_size:
            raise InputError(
                f"--arch {arch}: its tokenizer has {len(tokenizer)} tokens and its model only "
                f"{config.vocab_size}; resize the model's embeddings and save both anew"
            )
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = pad
        splitter = tokenizer.backend_tokenizer
        splitter.no_padding()  # it may have been saved with a fixed length
        text = with_classes(config.to_json_string(use_diff=False), classes)
    return {"config": text, "pad": pad}, splitter.to_str()


def with_classes(config: str, classes: Sequence[str]) -> str:
    """The configuration of a model with these classes."""
    numbers = {name: number for number, name in enumerate(classes)}
    labels = {"id2label": dict(enumerate(classes)), "label2id": numbers}
    return json.dumps({**json.loads(config), **labels})


class Encoder(nn.Module):
    """A text classifier of Transformers, called as `models.transformer.Transformer` is.

    Args:
        config: of the model, as JSON.
        pad: id of the tokens behind the end of a text.
        arch: its name in messages.
        mix_at: where `forward` mixes texts: 'pooled' mixes what the last linear layer sees, which
            is the same as mixing the logits, 'tokens' the embeddings.
    Raises:
        InputError: Transformers is not installed, or does not know the model.
    """

    def __init__(self, config: str, pad: int, *, arch: str = HF, mix_at: str = "pooled") -> None:
        super().__init__()
        self.pad, self.arch, self.mix_at = pad, arch, mix_at
        with _refused(arch) as transformers:
            known = transformers.AutoConfig.for_model(**json.loads(config))
            auto = transformers.AutoModelForSequenceClassification
            self.model = _head_last(auto.from_config(known, dtype=torch.float32))

    def load(self) -> str:
        """Take the pretrained weights; returns a line that says which layers begin anew."""
        with _refused(self.arch):
            loaded, info = type(self.model).from_pretrained(
                _find(self.arch),
                config=self.model.config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        self.model = _head_last(loaded)
        new = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
        anew = f"; begin anew: {', '.join(sorted(new))}" if new else ""
        return f"weights of {self.arch}: {len(self.model.state_dict()) - len(new)} tensors{anew}"

    def forward(
        self, tokens: Tensor, partner: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Classify texts, each mixed with a partner where partners are given.

        With mix_at='tokens' a position that only one of two texts has takes part as a whole, its
        embedding mixed with that of the padding; a text of weight 1 is not mixed.

        Args:
            tokens, partner, weight: as of `models.transformer.Transformer.forward`.

        Returns:
            (batch, classes) logits.
        """
        present = tokens != self.pad  # (batch, length)
        if partner is None or weight is None or self.mix_at == "pooled":
            logits = self.model(input_ids=tokens, attention_mask=present.long()).logits
            return mix_rows(logits, partner, weight)
        embedded = mix_rows(self.model.get_input_embeddings()(tokens), partner, weight)
        present = present | (present[partner] & (weight < 1)[:, None])
        return self.model(inputs_embeds=embedded, attention_mask=present.long()).logits

    @torch.no_grad()
    def check(self, tokens: Tensor) -> None:
        """Classify two texts, one of them of the greatest length, each mixed with itself.

        Args:
            tokens: (2, length) integers.
        Raises:
            InputError: the model cannot take them, or not as embeddings where these are mixed.
        """
        problem = f"cannot take texts of --max_len {tokens.shape[1]} tokens"
        with _refused(self.arch, problem, "use a smaller one"):
            logits = self.eval()(tokens)
        with _refused(self.arch, "cannot mix embeddings of tokens", "use --mix_at pooled"):
            mixed = self(tokens, torch.arange(2), torch.full((2,), 0.5))
            torch.testing.assert_close(mixed, logits, rtol=1e-3, atol=1e-3)

    def freeze(self) -> None:
        """Train what is behind the pretrained layers alone."""
        self.model.base_model.requires_grad_(False)


def _head_last(model: Any) -> Any:
    """The model with its classifier defined behind the pretrained layers, as most define it."""
    for name, child in list(model.named_children()):
        if child is not model.base_model:
            delattr(model, name)
            model.add_module(name, child)
    return model


def _find(arch: str) -> Path:
    """The folder of a model: a local one, or one that the hub's cache now holds."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    name = arch.removeprefix(HF)
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns=["*/*"]))
    except RepositoryNotFoundError:
        raise ValueError("the hub has no such model, or a private one") from None


@contextlib.contextmanager
def _refused(
    arch: str,
    problem: str = "cannot be loaded",
    advice: str = "check the name and the network, or give a folder that save_pretrained wrote",
) -> Iterator[ModuleType]:
    """Turn what Transformers raises into one line; yields its module."""
    try:
        import transformers
    except ImportError:
        raise InputError(f"--arch {arch} needs a package: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield transformers
    except InputError:
        raise
    except Exception as error:  # of many kinds
        raise InputError(f"--arch {arch}: {problem} ({first_line(error)}); {advice}") from None
