#!/bin/sh
# Ask a running `triforce serve` with curl: examples/curl.sh [URL] [KEY]
set -eu
URL=${1:-http://127.0.0.1:8000}
KEY=${2:-no-key}

post() {
    curl --silent --show-error --fail-with-body --no-buffer "$URL$1" \
        -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" -d "$2"
    echo
}

echo "A text in one piece:"
post /v1/completions '{"prompt": "It was a dark night, and", "max_tokens": 24, "seed": 7}'

echo "The same text as a stream, with counts of each tier:"
post /v1/completions '{"prompt": "It was a dark night, and", "max_tokens": 24, "seed": 7, "stream": true,
    "stream_options": {"include_usage": true}, "tier_stats": true}'

echo "The log-probability of each token of a text:"
post /v1/completions '{"prompt": "It was a dark night", "max_tokens": 0, "echo": true, "logprobs": 1}'

echo "Token ids:"
post /tokenize '{"prompt": "It was a dark night"}'
