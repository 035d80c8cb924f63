"""Names of flags that people bring from timm and from Hugging Face's Trainer, and what they mean.

What begins with dashes in FOREIGN is a flag of ours, one of its values as in --backend=compile, or
a setting of a part as in --opt_args=rank=. The other names have no counterpart; the sentence ends
the line that refuses them.
"""

NAMES = {  # our flag, value or setting: its foreign names
    "--optimizer=ngd": "--ngd",
    "--mixup=meta": "--meta_learning",
    # ---- training
    "--bs": "--per_device_train_batch_size",
    "--epochs": "--num_train_epochs",
    "--accumulate": "--grad_accum_steps --gradient_accumulation_steps",
    "--label_smoothing": "--smoothing --label_smoothing_factor",
    "--ema": "--model_ema_decay",
    "--clip": "--clip_grad --max_grad_norm",
    "--arch": "--model --model_name_or_path",
    "--image_size": "--img_size",
    "--augment": "--auto_augment --aa",
    "--random_erasing": "--reprob",
    "--augment_args=jitter=": "--color_jitter",
    "--best_by": "--metric_for_best_model",
    "--patience": "--early_stopping_patience",
    "--weights": "--initial_checkpoint",
    "--max_len": "--max_seq_length",
    # ---- optimizer and learning rate
    "--optimizer": "--opt --optim",
    "--lr": "--learning_rate",
    "--weight_decay": "--wd",
    "--layer_decay": "--layer_lr_decay",
    "--lr_schedule": "--sched --lr_scheduler_type",
    "--warmup": "--warmup_epochs",
    # ---- speed
    "--precision=bf16": "--bf16",
    "--precision=fp16": "--fp16",
    "--backend=compile": "--torch_compile --torchcompile",
    "--checkpoint_activations": "--grad_checkpointing --gradient_checkpointing",
    "--workers": "--dataloader_num_workers",
    # ---- run
    "--out": "--output --output_dir",
    "--resume": "--resume_from_checkpoint",
    "--recipe": "--config",
    "--track": "--report_to",
    "--track=tensorboard": "--tensorboard",
    "--track=wandb": "--log_wandb",
    # ---- settings of a part, which were flags
    "--opt_args=rank=": "--ngd_rank",
    "--opt_args=alpha=": "--ngd_alpha",
    "--sync_args=momentum=": "--outer_momentum",
    "--batch_args=window=": "--loss_window",
    "--batch_args=replace_decay=true": "--replace_decay",
    "--batch_args=min=": "--min_bs",
    "--batch_args=max=": "--max_bs",
    "--mixup_args=policy=": "--meta_policy",
    "--mixup_args=every=": "--meta_every",
    "--augment_args=pad=": "--crop_pad",
    "--augment_args=fill=": "--crop_fill",
    "--augment_args=alternate=true": "--alternate_flip",
    "--augment_args=alternate=false": "--no_alternate_flip",
}
SETTINGS = {  # that were flags of the same name
    "--opt_args": "adamw_ratio beta3",
    "--lr_args": "step_size peak",
    "--model_args": "width depth heads mlp_width",
    "--augment_args": "small_epochs small_size small_stages",
}
FOREIGN = {
    **{name: own for own, names in NAMES.items() for name in names.split()},
    **{f"--{key}": f"{own}={key}=" for own, keys in SETTINGS.items() for key in keys.split()},
    # ---- without a counterpart
    "--pretrained": "it is --weights DEFAULT",
    "--num_classes": "the data says it",
    "--warmup_ratio": "it is --warmup, in epochs",
    "--load_best_model_at_end": "best.pt is kept beside last.pt",
    "--amp": "it is --precision bf16 or fp16",
    "--logging_steps": "it is --log_every, which takes seconds",
    "--do_train": "the script trains unless --evaluate, --predict or --export is given",
    "--do_eval": "each epoch is evaluated; --evaluate evaluates a checkpoint alone",
    "--local_rank": "torchrun says it by the environment",
}
