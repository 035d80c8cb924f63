"""Names of flags that people bring from timm and from Hugging Face's Trainer, and what they mean.

A name that begins with dashes stands for that flag of ours, or for one of its values. The other
ones have no counterpart; the sentence ends the line that refuses them.
"""

from __future__ import annotations

FOREIGN = {
    "--ngd": "--optimizer=ngd",
    "--meta_learning": "--mixup=meta",
    # ---- training
    "--per_device_train_batch_size": "--bs",
    "--num_train_epochs": "--epochs",
    "--grad_accum_steps": "--accumulate",
    "--gradient_accumulation_steps": "--accumulate",
    "--smoothing": "--label_smoothing",
    "--label_smoothing_factor": "--label_smoothing",
    "--model_ema_decay": "--ema",
    "--clip_grad": "--clip",
    "--max_grad_norm": "--clip",
    "--model": "--arch",
    # ---- optimizer and learning rate
    "--opt": "--optimizer",
    "--optim": "--optimizer",
    "--learning_rate": "--lr",
    "--wd": "--weight_decay",
    "--layer_lr_decay": "--layer_decay",
    "--sched": "--lr_schedule",
    "--lr_scheduler_type": "--lr_schedule",
    "--warmup_epochs": "--warmup",
    # ---- speed
    "--bf16": "--precision=bf16",
    "--fp16": "--precision=fp16",
    "--torch_compile": "--backend=compile",
    "--torchcompile": "--backend=compile",
    "--grad_checkpointing": "--checkpoint_activations",
    "--gradient_checkpointing": "--checkpoint_activations",
    "--dataloader_num_workers": "--workers",
    # ---- run
    "--output": "--out",
    "--output_dir": "--out",
    "--resume_from_checkpoint": "--resume",
    "--config": "--recipe",
    "--report_to": "--track",
    "--tensorboard": "--track=tensorboard",
    "--log_wandb": "--track=wandb",
    # ---- without a counterpart
    "--amp": "it is --precision bf16 or fp16",
    "--logging_steps": "it is --log_every, which takes seconds",
    "--do_train": "the script trains unless --evaluate, --predict or --export is given",
    "--do_eval": "each epoch is evaluated; --evaluate evaluates a checkpoint alone",
    "--do_predict": "it is --predict",
    "--help_all": "it is --help all",
    "--local_rank": "torchrun says it by the environment",
    "--save_steps": "it is --save_every",
    "--eval_steps": "it is --eval_every, which counts epochs",
    "--seed_everything": "it is --seed",
}
