#!/usr/bin/env bash
# Search hyper-parameters of transformer_test.py on a tenth of the training set, from any folder.
#   bash tuning/transformer_tuning.sh --trials 40 --jobs 4
#   bash tuning/transformer_tuning.sh --help
set -euo pipefail
unset CDPATH # with it, cd prints
exec bash "$(dirname "${BASH_SOURCE[0]}")/resnet50_tuning.sh" --script transformer_test.py "$@"
