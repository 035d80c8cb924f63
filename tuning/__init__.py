"""Hyper-parameter search on a fraction of the training data: `bash tuning/resnet50_tuning.sh`."""
