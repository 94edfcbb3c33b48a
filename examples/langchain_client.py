"""Ask a running `triforce serve` through LangChain (pip install langchain-openai): langchain_client.py [URL] [KEY]."""

import sys

from langchain_openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "no key"
model = OpenAI(
    base_url=f"{url}/v1",
    api_key=key,
    model=sys.argv[3] if len(sys.argv) > 3 else "triforce",
    max_tokens=48,
    temperature=0.8,
    seed=7,
    extra_body={"mode": "retrieval"},  # a field of triforce
)
prompt = "It was a dark night, and"

print("A text in one piece:")
print(whole_text := model.invoke(prompt))

print("\nThe same text as a stream:")
pieces = []
for piece in model.stream(prompt):
    pieces.append(piece)
    print(piece, end="", flush=True)
print("\n\nBoth are the same:", "".join(pieces) == whole_text)
