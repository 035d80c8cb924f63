"""How well bags of words do on AG News, after a search: the peers of the Transformer.

DATA_DIR=data python -m benchmarks.bag_of_words --json FILE  # --quick: 1,500 rows alone
DATA_DIR=data python -m benchmarks.bag_of_words --wrong_labels --json FILE

The peers are scikit-learn's logistic regression on TF-IDF features, and naive Bayes on whether a
text has a word, both trained on the same rows as committed runs of the Transformer, cleaned in the
same way. Lengths of word sequences, how rare a word may be, and the strength of regularisation are
searched for each number of rows by five-fold cross-validation within the first draw; the best
setting then trains on all rows of each draw, and the test set is looked at once. Bars compare the
mean accuracy of the Transformer with theirs. With --wrong_labels naive Bayes alone sees the rows
and labels of `label_noise_agnews12k`.
"""

import statistics
import sys
import tempfile
from typing import Any

import torch
from sklearn.base import clone
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import Pipeline

import transformer_test
from benchmarks import bench
from cli import options
from cli.data import choose_rows
from errors import exit_code
from figures.run_logs import LOGS, accuracy, last, read_groups
from input_pipeline import text_datasets
from input_pipeline.sampler import stratified_rows

FOLDS = 5
RUNS = {  # logs of the Transformer by rows of AG News, each with the group and name of its runs
    1_500: [("texts_by_rows", "rows1500")],
    3_000: [("texts_by_rows", "rows3000")],
    9_600: [("texts_by_rows", "rows9600")],
    12_000: [("defaults_agnews12k", "bare"), ("optimizers_agnews12k", "adamw")],
}
NOISY = ("label_noise_agnews12k", ["default-none", "default-mixup1", "default-meta"])
NOISE = ["--label_noise", "0.4", "--val_fraction", "0.1", "--seed"]  # of these runs
WORDS = {
    "words__ngram_range": [(1, 1), (1, 2), (1, 3)],  # words in a row that are a feature
    "words__min_df": [1, 2],  # in how many texts a feature is at least
}
REGULARISATION = {
    "TF-IDF, logistic regression": {"model__C": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]},
    "naive Bayes": {"model__alpha": [0.03, 0.1, 0.3, 1.0, 3.0]},
}
ITERATIONS = 1000  # of L-BFGS at most
PACKAGES = ("torch", "scikit-learn")


def pipeline(name: str, cache: str) -> Pipeline:
    """Return one of the models of `REGULARISATION`, which keeps features in a folder."""
    if name == "naive Bayes":
        steps: list[Any] = [CountVectorizer(binary=True), MultinomialNB()]
    else:
        steps = [TfidfVectorizer(sublinear_tf=True), LogisticRegression(max_iter=ITERATIONS)]
    return Pipeline(list(zip(("words", "model"), steps)), memory=cache)


def main() -> int:
    parser = bench.parser(__doc__)
    bench.add_data_dir(parser)
    parser.add_argument("--wrong_labels", action="store_true", help="40 %% of them alone")
    args = parser.parse_args()
    splits, classes = text_datasets.read_text_splits("agnews", args.data_dir)
    train, test = splits["train"], splits["test"]
    labels, groups = torch.as_tensor(train.labels), read_groups(LOGS)
    bars, results = [], []
    cases = list(RUNS.items())[: 1 if args.quick else None]
    peers = dict(REGULARISATION)
    if args.wrong_labels:
        peers = {"naive Bayes": peers["naive Bayes"]}
        cases = [(10_800, [(NOISY[0], name) for name in NOISY[1]])]
    for rows, runs in cases:
        logged = {name: last(groups[group][name], accuracy) for group, name in runs}
        seeds = range(1 if rows == len(labels) else len(next(iter(logged.values()))))
        if args.wrong_labels:
            given = (
                options.parse(transformer_test.parser(), "", [*NOISE, str(i)])[0] for i in seeds
            )
            draws = [choose_rows(each, splits, classes).splits["train"] for each in given]
        else:
            share = rows / len(labels)
            drawn = (stratified_rows(labels, share, seed=seed)[0] for seed in seeds)
            draws = [train if share == 1 else train.select_rows(each) for each in drawn]
        for peer, strengths in peers.items():
            first = draws[0]
            with tempfile.TemporaryDirectory() as cache:
                search = GridSearchCV(pipeline(peer, cache), WORDS | strengths, cv=FOLDS, n_jobs=-1)
                search.fit(list(first.texts), list(first.labels))
                best, reached = search.best_estimator_, list[float]()
                for draw in draws:
                    model = clone(best).fit(list(draw.texts), list(draw.labels))
                    reached.append(100 * model.score(list(test.texts), list(test.labels)))
            setting, held = search.best_params_, 100 * search.best_score_
            results.append({"rows": rows, "peer": peer, "test": reached, **logged})
            results[-1] |= {"setting": setting, "held_out": held}
            print(f"{rows} rows: {peer} {statistics.mean(reached):.2f} % {setting}", flush=True)
            for name, each in logged.items():
                print(f"    Transformer {name} {statistics.mean(each):.2f} %", flush=True)
                points = statistics.mean(each) - statistics.mean(reached)
                bars.append(bench.Bar(f"{name} over {peer}, points", points, 0.0))
    machine = bench.machine(torch.device("cpu"), PACKAGES)
    return bench.finish(args, bars, machine=machine, results=results)


if __name__ == "__main__":
    sys.exit(exit_code(main))
