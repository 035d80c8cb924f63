"""Image classification: ResNet-50 on CIFAR-10, and other models and data sets by flag.

python resnet50_test.py                                          # ResNet-50, CIFAR-10, 50 epochs
python resnet50_test.py --ngd --meta_learning                    # NGD, learned mixup
python resnet50_test.py --dataset digits --arch resnet20         # embedded data, a minute on a CPU
bash run_distributed.sh resnet50_test.py --bs 256                # all GPUs of this node
python resnet50_test.py --resume runs/my-run                     # go on with a run
python resnet50_test.py --checkpoint runs/my-run --evaluate      # accuracy of its last.pt
python resnet50_test.py --checkpoint runs/my-run/best.pt --predict cat.png    # or --export m.onnx
python resnet50_test.py --checkpoint best --evaluate             # best.pt of the newest run
"""

import sys

from errors import exit_code, interruptible

if __name__ == "__main__":
    interruptible()  # also while torch is imported

import dynamic_batch
import mixup
from cli import factory, fine_tuning, image_classification, options
from cli.flag_parser import ScriptParser
from cli.flags import shared_parser
from cli.optimizers import optimizer_choices
from distributed.world import TimeLimits, init_world
from input_pipeline.augmentation import AUGMENTATIONS
from mixup import MetaMixup

SCRIPT = "resnet50_test"
OPTIMIZERS = optimizer_choices(  # values of --optimizer, and their default learning rates
    sgd=0.1,
    adamw=3e-3,
    ngd=0.08,
    kaldi_ngd=0.4,
    muon=0.08,
    lars=1.0,
    lamb=0.01,
    slamb=0.01,
)


def parser() -> ScriptParser:
    """The shared flags and those of images."""
    return shared_parser(
        __doc__,
        datasets=list(AUGMENTATIONS),
        optimizers=OPTIMIZERS,
        mixing=mixup.KINDS,
        add_own=image_classification.add_flags,
    )


def main() -> None:
    """What a run is made of, from its flags to its last epoch."""
    script_parser = parser()
    args, checkpoint = options.parse(script_parser, SCRIPT)
    with init_world(args.device, TimeLimits(*args.timeout)) as world:
        factory.check_processes(args, script_parser, world, checkpoint)
        run = factory.create_run(args, SCRIPT, world, checkpoint)
        if checkpoint and args.predict:
            return image_classification.predict(args, run)
        if checkpoint and args.export:
            return factory.export_model(args, run)

        saved = None if checkpoint else fine_tuning.read_saved_model(args, run)
        data = image_classification.load_data(args, run, saved)
        if checkpoint and args.evaluate:
            return factory.evaluate_checkpoint(args, run, data)
        model = image_classification.create_model(args, run, data.metadata, images=data.train)

        data = fine_tuning.begin_with_weights(args, run, model, saved, data)
        loss = factory.create_loss(
            args, run, data, sample_mix=mixup.sample_mix, meta_mixup=MetaMixup
        )
        batches = factory.create_batch_sampler(args, run, data, dynamic_batch.RULES)
        model = factory.prepare_model(args, run, model, batches)  # fused, sharded, compiled
        optimizer = factory.create_optimizer(args, run, model, OPTIMIZERS)
        trainer = factory.create_trainer(
            args, run, data, model=model, optimizer=optimizer, loss=loss, batches=batches
        )
        trainer.fit(checkpoint)  # the loop is in training/trainer.py
        trainer.report()


if __name__ == "__main__":
    sys.exit(exit_code(main))
