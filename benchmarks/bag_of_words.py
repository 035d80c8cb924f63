"""How well TF-IDF features with logistic regression do on the AG News subset, after a search.

DATA_DIR=data python -m benchmarks.bag_of_words --json FILE  # --quick: one seed

The peer of the Transformer: scikit-learn's TfidfVectorizer (with the logarithm of the counts) and
LogisticRegression on the same training rows, cleaned in the same way. Lengths of word sequences,
how rare a word may be, and the strength of regularisation C are searched by the mean accuracy on a
tenth of the training rows, held out with each of three seeds: for the first one these are the rows
that the searches of the Transformer hold out. Then the best setting trains on all rows, and the
test set is looked at once. A bar compares committed runs of the Transformer with that.
"""

import json
import statistics
import sys
import tempfile

import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from benchmarks import bench
from errors import InputError, exit_code
from figures.run_logs import LOGS, accuracy, last, read_groups
from input_pipeline import text_datasets
from input_pipeline.sampler import held_out_rows

GROUP, RUN = "optimizers_agnews12k", "adamw"  # the Transformer without a prior
HELD_OUT, SEEDS = 0.1, (1, 2, 3)  # an entry script with --seed 0 holds out the rows of 1
SEARCHED = {
    "tfidfvectorizer__ngram_range": [(1, 1), (1, 2), (1, 3)],  # words in a row that are a feature
    "tfidfvectorizer__min_df": [1, 2],  # in how many texts a feature is at least
    "logisticregression__C": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],  # inverse regularisation
}
ITERATIONS = 1000  # of L-BFGS at most
PACKAGES = ("torch", "scikit-learn")


def main() -> int:
    args = bench.parser(__doc__, reads_data=True).parse_args()
    splits, _ = text_datasets.read_text_splits("agnews", args.data_dir)
    train, test = ((list(splits[n].texts), list(splits[n].labels)) for n in ("train", "test"))
    runs = read_groups(LOGS)[GROUP][RUN]
    if len(train[0]) != (rows := runs[0][0]["samples"]):
        raise InputError(f"--data_dir: {len(train[0])} rows to train on; the logs are of {rows}")
    labels, folds = torch.tensor(train[1]), []
    for seed in SEEDS[:1] if args.quick else SEEDS:
        held_out, rest = held_out_rows(labels, HELD_OUT, seed=seed)
        folds.append((rest.numpy(), held_out.numpy()))
    regression = LogisticRegression(max_iter=ITERATIONS)
    with tempfile.TemporaryDirectory() as cache:
        model = make_pipeline(TfidfVectorizer(sublinear_tf=True), regression, memory=cache)
        search = GridSearchCV(model, SEARCHED, cv=folds, verbose=2).fit(*train)
        reached = 100 * search.score(*test)  # of the best one, trained on all rows
    tried = zip(search.cv_results_["params"], search.cv_results_["mean_test_score"])
    settings = [{**setting, "held_out": 100 * score} for setting, score in tried]
    settings.sort(key=lambda each: -each["held_out"])
    seeds = last(runs, accuracy)
    print(f"AG News, {len(train[0])} training rows, {len(test[0])} test rows")
    print(f"TF-IDF with logistic regression, {json.dumps(settings[0])}: {reached:.2f} %")
    print(f"Transformer ({GROUP}/{RUN}): {', '.join(f'{seed:.2f}' for seed in seeds)} %")
    bars = [bench.Bar("Transformer over TF-IDF, points", statistics.mean(seeds) - reached, 0.0)]
    return bench.finish(
        args,
        bars,
        machine=bench.machine(torch.device("cpu"), PACKAGES),
        train_rows=len(train[0]),
        test_rows=len(test[0]),
        tfidf=reached,
        transformer=seeds,
        search=settings,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
