"""Ask a running `triforce serve` through Open WebUI (pip install open-webui): open_webui.py [URL] [KEY] [MODEL].

It starts Open WebUI with the settings that it needs, asks one question as its page does, and ends it. People use
`open-webui serve` with the same settings.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "no key"
model = sys.argv[3] if len(sys.argv) > 3 else "smollm2"
program = os.environ.get("OPEN_WEBUI", "open-webui")
PORT = 8088
SETTINGS = {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "WEBUI_AUTH": "False"}
OFFLINE = {"ENABLE_OLLAMA_API": "False", "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1"}
START_SECONDS = 300


def ask(path, body=None, token=""):
    """Return the JSON that Open WebUI answers with."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def wait_until_started():
    for _ in range(START_SECONDS):
        try:
            return ask("/health")
        except (OSError, ValueError):
            time.sleep(1)
    sys.exit("Open WebUI did not start")


with tempfile.TemporaryDirectory() as folder:
    environment = os.environ | SETTINGS | OFFLINE | {"DATA_DIR": folder, "WEBUI_SECRET_KEY": "any"}
    page = subprocess.Popen([program, "serve", "--port", str(PORT)], env=environment, stdout=sys.stderr)
    try:
        wait_until_started()
        token = ask("/api/v1/auths/signin", {"email": "", "password": ""})["token"]
        print("Models:", [entry["id"] for entry in ask("/api/models", token=token)["data"]])
        turns = [{"role": "user", "content": "Name a fruit."}]
        question = {"model": model, "messages": turns, "stream": False, "temperature": 0, "max_tokens": 16}
        print("Answer:", ask("/api/chat/completions", question, token)["choices"][0]["message"]["content"])
    finally:
        page.terminate()
        page.wait()
