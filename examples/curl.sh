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

echo "A text at once:"
post /v1/completions '{"prompt": "It was a dark night, and", "max_tokens": 24, "seed": 7}'

echo "The same one as it comes, with what each tier did:"
post /v1/completions '{"prompt": "It was a dark night, and", "max_tokens": 24, "seed": 7, "stream": true,
    "stream_options": {"include_usage": true}, "tier_stats": true}'

echo "How probable a text is, token by token:"
post /v1/completions '{"prompt": "It was a dark night", "max_tokens": 0, "echo": true, "logprobs": 1}'

echo "Token ids:"
post /tokenize '{"prompt": "It was a dark night"}'
