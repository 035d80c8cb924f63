"""Text classification: a Transformer encoder on AG News, the embedded headlines, or your own csv.

python transformer_test.py                                       # AG News, 4 epochs
python transformer_test.py --dataset headlines --epochs 10       # embedded data, seconds on a CPU
python transformer_test.py --dataset csv --data_dir my_texts     # train.csv, test.csv: label, text
python transformer_test.py --arch hf:distilbert-base-uncased     # a pretrained encoder
bash run_distributed.sh transformer_test.py --bs 256             # all GPUs of this node
python transformer_test.py --resume runs/my-run                  # go on with a run
python transformer_test.py --checkpoint runs/my-run --evaluate   # accuracy of its last.pt
python transformer_test.py --checkpoint runs/my-run/best.pt --predict lines.txt   # --export m.pt2
python transformer_test.py --checkpoint best --evaluate          # best.pt of the newest run
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from errors import exit_code, interruptible

if __name__ == "__main__":
    interruptible()  # also while torch is imported

import dynamic_batch
import mixup
from cli import factory, fine_tuning, options, text_classification
from cli.flag_parser import ScriptParser
from cli.settings import script_parser
from cli.text_classification import TextSettings
from distributed.world import TimeLimits, init_world
from mixup import MetaMixup

SCRIPT = "transformer_test"
LEARNING_RATES = {  # defaults, by --optimizer
    "sgd": 0.02,
    "adamw": 8e-5,
    "ngd": 0.016,
    "kaldi_ngd": 0.02,
    "muon": 0.008,
    "lars": 1.0,
    "lamb": 4e-3,
    "slamb": 4e-3,
}


def parser() -> ScriptParser[TextSettings]:
    """The shared flags and those of texts."""
    return script_parser(__doc__, TextSettings, LEARNING_RATES)


def main(arguments: Sequence[str] | None = None) -> Path | None:
    """What a run is made of, from its flags (None: the command line's) to its last epoch.

    Returns:
        The run folder, or None where a trained model was only used.
    """
    script_parser = parser()
    settings, checkpoint = options.parse(script_parser, SCRIPT, arguments)
    with init_world(settings.device, TimeLimits(*settings.timeout)) as world:
        factory.check_processes(settings, script_parser, world, checkpoint)
        run = factory.create_run(settings, SCRIPT, world, checkpoint)
        if checkpoint and settings.predict:
            text_classification.predict(settings, run, settings.predict)
            return None
        if checkpoint and settings.export:
            factory.export_model(settings, run, settings.export)
            return None

        saved = None if checkpoint else fine_tuning.read_saved_model(settings, run)
        data = text_classification.load_data(settings, run, saved)
        if checkpoint and settings.evaluate:
            factory.evaluate_checkpoint(settings, run, data)
            return None
        settings = factory.with_batch_size(settings, run, data)
        settings = text_classification.with_epochs(settings, run, data)
        model = text_classification.create_model(settings, run, data)

        data = fine_tuning.begin_with_weights(settings, run, model, saved, data)
        loss = factory.create_loss(
            settings, run, data, sample_mix=mixup.sample_mix, meta_mixup=MetaMixup
        )
        batches = factory.create_batch_sampler(settings, run, data, dynamic_batch.RULES)
        model = factory.prepare_model(settings, run, model, batches)  # fused, sharded, compiled
        optimizer = factory.create_optimizer(settings, run, model)
        trainer = factory.create_trainer(
            settings, run, data, model=model, optimizer=optimizer, loss=loss, batches=batches
        )
        trainer.fit(checkpoint)  # the loop is in training/trainer.py
        trainer.report()
        return trainer.log.folder


if __name__ == "__main__":
    sys.exit(exit_code(main))
