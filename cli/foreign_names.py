"""Names of flags that people bring from timm and from Hugging Face's Trainer, and what they mean.

What begins with dashes in FOREIGN is a flag of ours, one of its values as in --backend=compile, or
a setting of a part as in --opt_args=rank=. The other names have no counterpart of the same kind; a
sentence ends the line that refuses them.
"""

NAMES = {  # our flag, value or setting: its foreign names
    "--optimizer=ngd": "--ngd",
    "--mixup=meta": "--meta_learning",
    # ---- training
    "--bs": "--per_device_train_batch_size --per_gpu_train_batch_size",
    "--epochs": "--num_train_epochs --num_epochs --max_epochs",
    "--accumulate": "--grad_accum_steps --gradient_accumulation_steps",
    "--label_smoothing": "--smoothing --label_smoothing_factor",
    "--ema": "--model_ema_decay",
    "--clip": "--clip_grad --max_grad_norm",
    "--arch": "--model --model_name_or_path",
    "--image_size": "--img_size",
    "--augment": "--auto_augment --aa",
    "--augment=none": "--no_aug",
    "--random_erasing": "--reprob",
    "--augment_args=jitter=": "--color_jitter",
    "--best_by": "--metric_for_best_model --eval_metric",
    "--patience": "--early_stopping_patience",
    "--weights": "--initial_checkpoint",
    "--max_len": "--max_seq_length --max_length",
    "--dropout": "--drop --hidden_dropout_prob",
    "--tokenizer": "--tokenizer_name",
    "--freeze": "--freeze_encoder --freeze_backbone",
    "--model_args": "--model_kwargs",
    # ---- optimizer and learning rate
    "--optimizer": "--opt --optim",
    "--opt_args": "--opt_kwargs",
    "--betas": "--opt_betas",
    "--lr": "--learning_rate",
    "--weight_decay": "--wd",
    "--lr_schedule": "--sched --lr_scheduler_type --lr_scheduler",
    "--warmup": "--warmup_epochs",
    "--gamma": "--decay_rate --dr",
    "--milestones": "--decay_milestones",
    "--lr_args=step_size=": "--decay_epochs",
    # ---- speed
    "--precision=bf16": "--bf16",
    "--precision=fp16": "--fp16",
    "--precision=tf32": "--tf32",
    "--timeout": "--ddp_timeout",
    "--backend=compile": "--torch_compile --torchcompile",
    "--checkpoint_activations": "--grad_checkpointing --gradient_checkpointing",
    "--workers": "--dataloader_num_workers",
    "--device=cpu": "--use_cpu --no_cuda",
    "--deterministic": "--full_determinism",
    # ---- run
    "--out": "--output --output_dir",
    "--resume": "--resume_from_checkpoint",
    "--keep": "--save_total_limit --checkpoint_hist",
    "--save_every": "--save_steps",
    "--recipe": "--config",
    "--track": "--report_to",
    "--track=tensorboard": "--tensorboard",
    "--track=wandb": "--log_wandb",
}
FORMER = {  # our setting: the flag that it was
    "--opt_args=rank=": "--ngd_rank",
    "--opt_args=alpha=": "--ngd_alpha",
    "--sync_args=momentum=": "--outer_momentum",
    "--batch_args=window=": "--loss_window",
    "--batch_args=replace_decay=true": "--replace_decay",
    "--batch_args=min=": "--min_bs",
    "--batch_args=max=": "--max_bs",
    "--augment_args=pad=": "--crop_pad",
    "--augment_args=fill=": "--crop_fill",
    "--augment_args=alternate=true": "--alternate_flip",
    "--augment_args=alternate=false": "--no_alternate_flip",
}
SETTINGS = {  # and those that were flags of the same name
    "--opt_args": "adamw_ratio beta3",
    "--lr_args": "step_size peak",
    "--model_args": "width depth heads mlp_width",
    "--augment_args": "small_epochs small_size small_stages",
}
INSTEAD = {  # what there is in place of some names
    "it is --weights DEFAULT": "--pretrained",
    "the data or the weights say it": "--num_classes --in_chans --mean --std --interpolation",
    "it is --image_size, in pixels a side": "--input_size",
    "the data is found by --dataset and --data_dir": "--dataset_name --train_file --test_file "
    "--validation_file --train_dir --validation_dir --train_split --val_split --dataset_download",
    "the length of a run is --epochs": "--max_steps --max_train_steps",
    "it is --warmup, in epochs": "--warmup_ratio --warmup_steps --num_warmup_steps",
    "it is --lr_args end=F, a share of --lr": "--min_lr",
    "it is --opt_args or --lr_args NAME=VALUE": "--optim_args --lr_scheduler_kwargs",
    "BatchNorm's statistics are averaged before each evaluation": "--sync_bn",
    "it is --betas B1 B2": "--adam_beta1 --adam_beta2",
    "it is --ema DECAY": "--model_ema --use_ema",
    "it is --mixup cutmix, of strength --alpha": "--cutmix",
    "it is --precision bf16 or fp16": "--amp --amp_dtype --native_amp --apex_amp",
    "it is --parallel fsdp": "--fsdp --fsdp_config --deepspeed",
    "torchrun says it by the environment": "--local_rank",
    "it is NGPU and NNODES of run_distributed.sh": "--gpus --n_gpus --num_gpus --num_nodes",
    "it is --subset, a share of the rows": "--max_train_samples",
    "an evaluation takes --bs, at least 64": "--per_device_eval_batch_size --validation_batch_size",
    "it is --eval_every, in epochs": "--eval_steps --eval_strategy --evaluation_strategy",
    "last.pt and best.pt are saved after each epoch": "--save_strategy --load_best_model_at_end",
    "it is --log_every, which takes seconds": "--logging_steps --log_interval --logging_strategy",
    "it is --out, a folder": "--run_name --experiment --logging_dir",
    "the script trains unless --evaluate, --predict or --export is given": "--do_train",
    "each epoch is evaluated; --evaluate evaluates a checkpoint alone": "--do_eval",
    "it is --predict PATH": "--do_predict",
    "it is timm's or Hugging Face's alone": "--bn_momentum --color_jitter_prob --drop_path --fuser "
    "--dataloader_in_order --dataloader_pin_memory --eval_accumulation_steps --pretrained_path "
    "--gradient_checkpointing_kwargs --layer_decay --layer_lr_decay --token --torch_compile_mode "
    "--torchcompile_mode --warmup_lr",
}
FOREIGN = {
    **{name: own for own, names in (NAMES | FORMER | INSTEAD).items() for name in names.split()},
    **{f"--{key}": f"{own}={key}=" for own, keys in SETTINGS.items() for key in keys.split()},
}
