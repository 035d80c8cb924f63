"""Linear models on simple features, in seconds: what a network is worth its hours against.

    found = text_baseline(splits["train"], splits["test"])
    print(found.line("test"))
    # baseline: TF-IDF with logistic regression 86.98 % on the test set, its largest class 25.00 %

Texts: words and pairs of words, as TF-IDF for logistic regression and as present or not for naive
Bayes, which wrong labels harm less; the one that is better on the evaluated rows counts. Images:
pixels at 16 a side.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from input_pipeline.image_batches import FileDecoder
from input_pipeline.image_datasets import ImageSplit
from input_pipeline.sampler import spread
from input_pipeline.text_datasets import TextSplit

MOST_TEXTS, MOST_IMAGES = 20_000, 10_000  # rows of a split that are used
MOST_FILES = 2_000  # images of a split that are decoded for it
MOST_WORDS = 50_000  # words and pairs of words, the most frequent ones
SMOOTHING = 0.3  # of naive Bayes: what searches of benchmarks/bag_of_words.py mostly chose
LONGEST_TEXT = 5_000  # characters, beyond which a text is cut
CJK = r"\u3040-\u30ff\u3400-\u9fff"  # letters of Chinese and Japanese, each of which is a word
WORD = rf"[{CJK}]|[^\W{CJK}]+|[^\w\s]"
MOST_CLASSES = 100  # of more, the linear model would take minutes and gigabytes
SIDE = 16  # pixels


@dataclass(frozen=True)
class Baseline:
    """What a linear model reached."""

    features: str  # what it saw, in words
    accuracy: float  # on the evaluation set, in 0..1; with metric 'map' mean average precision
    largest_class: float  # share of the evaluation set that its largest class has
    metric: str = "accuracy"  # what was measured: 'map' where rows may have several labels
    kind: str = "logistic regression"

    def line(self, eval_set: str) -> str:
        """The result in words; `eval_set` is test or validation."""
        if self.metric == "map":
            return (
                f"baseline: {self.features} with a {self.kind} for each label, mAP "
                f"{100 * self.accuracy:.2f} % on the {eval_set} set"
            )
        return (
            f"baseline: {self.features} with {self.kind} {100 * self.accuracy:.2f} % on the "
            f"{eval_set} set, its largest class {100 * self.largest_class:.2f} %"
        )

    def verdict(self, accuracy: float, name: str = "baseline") -> str:
        """How an accuracy on the same evaluation set compares with this model, called `name`."""
        points = 100 * (accuracy - self.accuracy)
        side = "ahead of" if points > 0 else "behind"
        distance = f"{abs(points):.2f} points {side}" if points else "level with"
        return f"{distance} the {name} of {100 * self.accuracy:.2f} %"


def text_baseline(train: TextSplit, evaluated: TextSplit) -> Baseline:
    """The better of two linear models of words, on up to 20,000 rows of each split.

    Where rows may have several labels it is logistic regression.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second
    from sklearn.naive_bayes import MultinomialNB

    vectorizer = TfidfVectorizer(
        token_pattern=WORD, ngram_range=(1, 2), sublinear_tf=True, max_features=MOST_WORDS
    )
    train, evaluated = (
        split.select_rows(spread(len(split), MOST_TEXTS)) for split in (train, evaluated)
    )
    texts, eval_texts = ([text[:LONGEST_TEXT] for text in s.texts] for s in (train, evaluated))
    inputs, eval_inputs = vectorizer.fit_transform(texts), vectorizer.transform(eval_texts)
    labels, eval_labels = torch.as_tensor(train.labels), torch.as_tensor(evaluated.labels)
    of_frequencies = fit(
        "TF-IDF", inputs, labels, eval_inputs=eval_inputs, eval_labels=eval_labels, strength=10
    )
    if labels.ndim > 1:
        return of_frequencies
    bayes = MultinomialNB(alpha=SMOOTHING).fit(inputs > 0, labels.numpy())
    accuracy = float(bayes.score(eval_inputs > 0, eval_labels.numpy()))
    of_words = replace(of_frequencies, features="words", kind="naive Bayes", accuracy=accuracy)
    return max(of_frequencies, of_words, key=lambda found: found.accuracy)


def image_baseline(train: ImageSplit, evaluated: ImageSplit, *, decoder: FileDecoder) -> Baseline:
    """Logistic regression on pixels of 16 a side, of some thousand images of each split."""
    most = MOST_IMAGES if train.files is None else MOST_FILES
    train, evaluated = (split.select_rows(spread(len(split), most)) for split in (train, evaluated))
    inputs, eval_inputs = (small_pixels(split, decoder) for split in (train, evaluated))
    mean, std = inputs.mean(0), inputs.std(0).clamp(min=0.01)
    return fit(
        "small images",
        ((inputs - mean) / std).numpy(),
        train.labels,
        eval_inputs=((eval_inputs - mean) / std).numpy(),
        eval_labels=evaluated.labels,
        strength=0.01,
    )


def fit(
    features: str,
    inputs: Any,
    labels: Tensor,
    *,
    eval_inputs: Any,
    eval_labels: Tensor,
    strength: float,
) -> Baseline:
    """Fit a logistic regression of (rows, features) inputs, or one for each of several labels.

    Args:
        labels, eval_labels: (rows,) or (rows, classes).
        strength: sklearn's C.
    """
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import average_precision_score
    from sklearn.multiclass import OneVsRestClassifier

    is_multilabel, counts = labels.ndim > 1, eval_labels.unique(return_counts=True)[1]
    model: Any = LogisticRegression(C=strength, tol=1e-3)
    if is_multilabel:
        model = OneVsRestClassifier(model)
    elif len(labels.unique()) < 2:
        model = DummyClassifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 100 iterations are enough here
        model.fit(inputs, labels.numpy())
    if is_multilabel:
        pairs = zip(eval_labels.T.numpy(), model.decision_function(eval_inputs).T)
        found = [average_precision_score(*pair) for pair in pairs if pair[0].any()]
        return Baseline(features, sum(found) / max(len(found), 1), 0.0, metric="map")
    return Baseline(
        features,
        accuracy=float(model.score(eval_inputs, eval_labels.numpy())),
        largest_class=counts.max().item() / len(eval_labels),
    )


def small_pixels(split: ImageSplit, decoder: FileDecoder) -> Tensor:
    """The images of a split as (rows, channels x 256) fp32 in 0..1."""
    parts = decoder.run(map(split.reader, torch.arange(len(split)).split(64)))
    images = (part.permute(0, 3, 1, 2).float().div_(255) for part in parts)
    return torch.cat([F.adaptive_avg_pool2d(part, SIDE).flatten(1) for part in images])
