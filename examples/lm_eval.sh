#!/bin/sh
# Score a task of lm_eval (pip install 'lm_eval[api]') against a running `triforce serve`:
#   examples/lm_eval.sh URL KEY MODEL TOKENIZER TASK [more options of lm_eval, such as --include_path or --limit]
# MODEL is the name of the served model, and TOKENIZER its folder or hub name.
set -eu
URL=$1 KEY=$2 MODEL=$3 TOKENIZER=$4 TASK=$5
shift 5
OPENAI_API_KEY=$KEY exec "${PYTHON:-python3}" -m lm_eval --model local-completions --tasks "$TASK" \
    --model_args "model=$MODEL,base_url=$URL/v1/completions,tokenizer_backend=huggingface,tokenizer=$TOKENIZER" "$@"
