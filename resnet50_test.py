"""Image classification: ResNet-50 on CIFAR-10, and other models and data sets by flag.

python resnet50_test.py                                          # ResNet-50, CIFAR-10, 12 epochs
python resnet50_test.py --ngd --meta_learning                    # NGD, learned mixup
python resnet50_test.py --dataset digits --arch resnet20         # embedded data, a minute on a CPU
bash run_distributed.sh resnet50_test.py --bs 256                # all GPUs of this node
python resnet50_test.py --resume runs/my-run                     # go on with a run
python resnet50_test.py --checkpoint runs/my-run --evaluate      # accuracy of its last.pt
python resnet50_test.py --checkpoint runs/my-run/best.pt --predict cat.png    # or --export m.onnx
python resnet50_test.py --checkpoint best --evaluate             # best.pt of the newest run
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from errors import exit_code, interruptible

if __name__ == "__main__":
    interruptible()  # also while torch is imported

import dynamic_batch
import mixup
from cli import factory, fine_tuning, image_classification, options
from cli.flag_parser import ScriptParser
from cli.image_classification import ImageSettings
from cli.settings import script_parser
from distributed.world import TimeLimits, init_world
from mixup import MetaMixup

SCRIPT = "resnet50_test"
LEARNING_RATES = {  # defaults, by --optimizer
    "sgd": 0.1,
    "adamw": 3e-3,
    "ngd": 0.08,
    "kaldi_ngd": 0.4,
    "muon": 0.08,
    "lars": 1.0,
    "lamb": 0.01,
    "slamb": 0.01,
}


def parser() -> ScriptParser[ImageSettings]:
    """The shared flags and those of images."""
    return script_parser(__doc__, ImageSettings, LEARNING_RATES)


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
            image_classification.predict(settings, run, settings.predict)
            return None
        if checkpoint and settings.export:
            factory.export_model(settings, run, settings.export)
            return None

        saved = None if checkpoint else fine_tuning.read_saved_model(settings, run)
        data = image_classification.load_data(settings, run, saved)
        if checkpoint and settings.evaluate:
            factory.evaluate_checkpoint(settings, run, data)
            return None
        settings = factory.with_batch_size(settings, run, data)
        model = image_classification.create_model(settings, run, data)

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
