"""Pretrained text encoders of Hugging Face Transformers, named hf:NAME_OR_FOLDER.

    saved = read_encoder("hf:distilbert-base-uncased")          # saved.encoder, saved.tokenizer
    model = Encoder(**saved.encoder, classes=2)                 # with random weights
    line, _ = model.load("hf:distilbert-base-uncased", ["bad", "good"])    # with pretrained ones

Checkpoints hold `encoder` and `tokenizer`, so that a run needs neither network nor folder later.
"""

import contextlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from errors import InputError, in_one_line, needing
from input_pipeline.own_data import list_names
from models.pretrained import SavedModel, classifier_names, describe_rows, matching_rows
from models.transformer import Dropout, mix_rows

HF = "hf:"  # in front of the name of a model on the hub, or of a folder


def is_hf(name: object) -> bool:
    """Whether this is hf:NAME or hf:FOLDER."""
    return str(name).startswith(HF) and name != HF


def refused(arch: str) -> contextlib.AbstractContextManager[None]:
    """Turn whatever Transformers raises, or that it is missing, into one line; its notes vanish."""
    with needing(arch, "transformers"):
        from transformers import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    advice = "; check the name and the network, or give a folder that save_pretrained wrote"
    return in_one_line(f"{arch}: cannot be loaded", advice)


def read_encoder(arch: str) -> SavedModel:
    """All of a model but its weights; it is downloaded. Raises InputError for its tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    folder = _find(arch)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pad, fits = tokenizer.pad_token_id, len(tokenizer) <= config.vocab_size
    if not (fits and tokenizer.is_fast and pad is not None and tokenizer.padding_side == "right"):
        raise InputError(
            f"{arch}: its tokenizer is not supported; it must be a fast one with a padding "
            f"token, on the right, and with at most the model's {config.vocab_size} tokens"
        )
    tokenizer.backend_tokenizer.no_padding()  # it may have been saved with a fixed length
    encoder = {"config": config.to_json_string(use_diff=False), "pad": pad}
    return SavedModel({}, tokenizer=tokenizer.backend_tokenizer.to_str(), encoder=encoder)


class Encoder(nn.Module):
    """A text classifier of Transformers, called as `models.transformer.Transformer` is.

    Args:
        config: of the model, as JSON.
        pad: id of the tokens behind the end of a text.
        mix_at: where texts are mixed: 'pooled' mixes the logits, which is the same as mixing what
            the last linear layer sees, 'tokens' the embeddings.
    """

    def __init__(self, config: str, pad: int, *, classes: int, mix_at: str = "pooled") -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        super().__init__()
        self.pad, self.mix_at = pad, mix_at
        known = AutoConfig.for_model(**json.loads(config))
        known.num_labels, known.pad_token_id = classes, pad  # by which decoders find the last token
        self.model = AutoModelForSequenceClassification.from_config(known, dtype=torch.float32)
        for name, child in list(self.model.named_children()):
            if child is not self.model.base_model:  # the classifier last, as most models have it
                delattr(self.model, name)
                self.model.add_module(name, child)
        for parent in list(self.model.modules()):
            for name, child in parent.named_children():
                if type(child) is nn.Dropout:  # which takes a seventh of a step on a CPU
                    setattr(parent, name, Dropout(child.p))

    def checkpoint_activations(self) -> int:
        """Store only the inputs of layers; returns how many, 0 where the encoder cannot."""
        if not self.model.supports_gradient_checkpointing:
            return 0
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        return self.model.config.num_hidden_layers

    def head_names(self) -> list[str]:
        """The parameters behind the encoder, which begin anew with other classes."""
        inside = {*self.model.base_model.parameters()}
        return [name for name, parameter in self.named_parameters() if parameter not in inside]

    def load(self, arch: str, classes: Sequence[str]) -> tuple[str, bool]:
        """Take the pretrained weights, of the classifier those of classes of the same name.

        Returns a line that says what was loaded, and which layers and outputs begin anew; and
        whether any output does.
        """
        from transformers import AutoConfig

        folder, own = _find(arch), self.model.state_dict()
        more = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        load = partial(type(self.model).from_pretrained, folder, dtype=torch.float32, **more)
        loaded, info = load(config=self.model.config)
        state, mismatched = loaded.state_dict(), {name for name, *_ in info["mismatched_keys"]}
        new = {*info["missing_keys"], *mismatched}
        frozen = {name for name, p in self.model.named_parameters() if not p.requires_grad}
        if random := sorted(new & frozen):
            raise InputError(
                f"{list_names(random)}: the weights lack them, and frozen they would stay random; "
                "train the whole encoder"
            )
        theirs, head = AutoConfig.from_pretrained(folder), classifier_names(self.model)
        names = [theirs.id2label.get(number, "") for number in range(theirs.num_labels)]
        is_saved = info["missing_keys"].isdisjoint(head)
        rows = matching_rows(names, classes) if is_saved else {}
        saved = load(config=theirs)[0].state_dict() if rows and mismatched else state
        for name in head:
            anew = (state if name in new else own)[name].clone()
            for row, saved_row in rows.items():
                anew[row] = saved[name][saved_row]
            state[name] = anew
        self.model.load_state_dict(state)
        new = new.difference(head)
        line = f"weights of {arch}: {len(state) - len(new) - (0 if rows else len(head))} tensors"
        line += f"; begin anew: {list_names(sorted(new))}" if new else ""
        line += describe_rows(head[0].rpartition(".")[0], rows, classes)
        return line, len(rows) < len(classes)

    def forward(
        self, tokens: Tensor, partner: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Compute logits as `models.transformer.Transformer.forward` does.

        With mix_at='tokens' a position that only one of two texts has takes part as a whole, its
        embedding mixed with that of the padding; a text of weight 1 is not mixed.
        """
        present = tokens != self.pad  # (batch, length)
        if partner is None or weight is None or self.mix_at == "pooled":
            logits = self.model(input_ids=tokens, attention_mask=present.long()).logits
            return mix_rows(logits, partner, weight)
        embedded = mix_rows(self.model.get_input_embeddings()(tokens), partner, weight)
        present = present | (present[partner] & (weight < 1)[:, None])
        return self.model(inputs_embeds=embedded, attention_mask=present.long()).logits

    @torch.no_grad()
    def check(self, tokens: Tensor, *, mixed: bool) -> None:
        """Raise InputError if two texts (2, length) cannot be classified, or not be `mixed`."""
        problem = "mixed embeddings; use pooled" if mixed else "texts of that length"
        with in_one_line(f"the encoder cannot take {problem}", ""):
            logits = self.eval()(tokens)
            if mixed:
                found = self(tokens, torch.arange(2), torch.full((2,), 0.5))
                torch.testing.assert_close(found, logits)


def _find(arch: str) -> Path:
    """The folder of a model: a local one, or that of the hub's cache, into which it is loaded."""
    from huggingface_hub import snapshot_download  # unlike from_pretrained, gives up at once

    folder = Path(arch.removeprefix(HF)).expanduser()
    if folder.is_dir():
        return folder
    files = ["*.json", "*.txt", "*.model", "*.safetensors"]
    return Path(snapshot_download(str(folder), allow_patterns=files, ignore_patterns=["*/*"]))
