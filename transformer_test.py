"""Text classification: a Transformer encoder on AG News, the embedded headlines, or your own csv.

python transformer_test.py                                       # AG News, 8 epochs
python transformer_test.py --dataset headlines --epochs 10       # embedded data, seconds on a CPU
python transformer_test.py --dataset csv --data_dir my_texts     # train.csv, test.csv: label, text
bash run_distributed.sh transformer_test.py --bs 256             # all GPUs of this node
python transformer_test.py --resume runs/my-run                  # go on with a run
python transformer_test.py --checkpoint runs/my-run --evaluate   # accuracy of its last.pt
python transformer_test.py --checkpoint runs/my-run/best.pt --predict lines.txt   # --export m.pt2
python transformer_test.py --checkpoint best --evaluate          # best.pt of the newest run
"""

from __future__ import annotations

import sys

import mixup
from cli import factory, fine_tuning, flags, options, text_classification
from cli.apex_optimizers import APEX_OPTIMIZERS
from cli.flags import OptimizerChoice, Parser, shared_parser
from cli.start_checks import check_processes
from distributed.world import TimeLimits, init_world
from dynamic_batch import ByLoss, ByNoise, Scheduled
from errors import exit_code
from mixup import MetaMixup
from ngd import NGD
from optimizers.demo import DeMo
from optimizers.kaldi_ngd import KaldiNGD
from optimizers.lars import LARS
from optimizers.muon import Muon
from optimizers.torch_fused import fused_adamw, fused_sgd
from slamb import LAMB, SLAMB

SCRIPT = "transformer_test"
OPTIMIZERS = {  # values of --optimizer: how it is made, and its defaults; docs/recipes.md has more
    "sgd": OptimizerChoice(fused_sgd, flags.SGD, lr=0.02, weight_decay=5e-4, nesterov=True),
    "adamw": OptimizerChoice(fused_adamw, flags.ADAM, lr=1e-4, weight_decay=0.05),
    "ngd": OptimizerChoice(
        NGD,
        flags.WITH_ADAMW,
        lr=0.016,
        weight_decay=0.05,
        nesterov=True,
        momentum=0.6,
        own=("rank", "adamw_ratio"),
    ),
    "kaldi_ngd": OptimizerChoice(
        KaldiNGD,
        flags.SGD,
        lr=0.02,
        weight_decay=5e-4,
        nesterov=True,
        own=("rank", "alpha", "eta", "update_period", "max_dim"),
    ),
    "muon": OptimizerChoice(
        Muon,
        flags.WITH_ADAMW,
        lr=0.008,
        weight_decay=0.05,
        nesterov=True,
        momentum=0.6,
        own=("adamw_ratio",),
    ),
    "lars": OptimizerChoice(
        LARS, flags.SGD, lr=1.0, weight_decay=5e-4, nesterov=True, own=("trust_coefficient", "clip")
    ),
    "lamb": OptimizerChoice(LAMB, flags.ADAM, lr=4e-3, weight_decay=0.01),
    "slamb": OptimizerChoice(
        SLAMB, flags.SLAMB, lr=4e-3, weight_decay=0.01, own=("beta3", "selection")
    ),
    "demo": OptimizerChoice(DeMo, {}, lr=3e-4, weight_decay=0.05, own=("topk", "chunk", "decay")),
    **APEX_OPTIMIZERS,
}
BATCH_RULES = {  # values of --dynamic_batch: how the batch size of the next epoch is chosen
    "none": None,
    "increase": Scheduled,
    "decrease": Scheduled,
    "loss": ByLoss,
    "noise": ByNoise,
}


def parser() -> Parser:
    """The shared flags and those of texts."""
    return shared_parser(
        __doc__,
        datasets=["agnews", "headlines", "csv"],
        optimizers=OPTIMIZERS,
        mixing=mixup.TEXT_KINDS,
        batch_rules=BATCH_RULES,
        optimizer="adamw",
        lr_schedule="onecycle",
        epochs=8,
        add_own=text_classification.add_flags,
    )


def main() -> None:
    """What a run is made of, from its flags to its last epoch."""
    script_parser = parser()
    args, checkpoint = options.parse(script_parser, SCRIPT)
    with init_world(args.device, TimeLimits(*args.timeout)) as world:
        check_processes(args, script_parser, world, checkpoint)
        run = factory.create_run(args, SCRIPT, world)
        if checkpoint and args.predict:
            return text_classification.predict(args, run, checkpoint)
        if checkpoint and args.export:
            return text_classification.export_model(args, run, checkpoint)

        saved = None if checkpoint else fine_tuning.read_saved_model(args, run)
        data = text_classification.load_data(args, run, checkpoint, saved)
        model = text_classification.create_model(args, run, data.metadata)
        if checkpoint and args.evaluate:
            model = factory.load_weights(args, run, model, checkpoint)
            return factory.evaluate_checkpoint(args, run, data, model)

        if saved is not None:
            text_classification.begin_with_weights(args, run, model, data.metadata, saved)
        loss_fn, meta_learner = factory.create_loss(
            args, run, data, sample_mix=mixup.sample_mix, meta_mixup=MetaMixup
        )
        batches = factory.create_batch_sampler(args, run, data, BATCH_RULES)
        model = factory.prepare_model(args, run, model)  # fused, sharded, compiled
        optimizer = factory.create_optimizer(args, run, model, OPTIMIZERS)
        trainer = factory.create_trainer(
            args,
            run,
            data,
            model=model,
            optimizer=optimizer,
            loss_fn=loss_fn,
            meta_learner=meta_learner,
            batches=batches,
            state=checkpoint,
            long_run_hint=text_classification.LONG_RUN_HINT,
        )
        text_classification.write_tokenizer(trainer.log, data.metadata)
        summary = trainer.fit(checkpoint)  # the loop is in training/trainer.py
        factory.report_result(run, data, summary, folder=trainer.log.folder)


if __name__ == "__main__":
    sys.exit(exit_code(main))
