"""Ask a running `triforce serve` through the `openai` package: python examples/openai_client.py [URL] [KEY]."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "no key"
client = OpenAI(base_url=f"{url}/v1", api_key=key)
model = client.models.list().data[0].id

print("A text as a stream:")
stream = client.completions.create(
    model=model,
    prompt="It was a dark night, and",
    max_tokens=48,
    temperature=0.8,
    seed=7,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"tier_stats": True},  # a field of triforce: counts of each tier
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].text, end="", flush=True)
    if chunk.usage:
        print("\n")
        for tier in chunk.usage.model_extra["tiers"]:
            counts = f"{tier['accepted']:>4} of {tier['proposed']:>4} accepted, {tier['passes']} passes"
            print(f"{tier['name']:<10} {counts}")

print("\nThe same seed by plain decoding gives the same text:")
options = {"model": model, "prompt": "It was a dark night, and", "max_tokens": 48, "temperature": 0.8, "seed": 7}
plain = client.completions.create(**options, extra_body={"mode": "ar"})
tiers = client.completions.create(**options)
print(plain.choices[0].text == tiers.choices[0].text)
